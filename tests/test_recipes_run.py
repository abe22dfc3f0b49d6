"""Every recipe in the repository trains: two steps on a tiny random model of its architecture, with its own data and settings."""

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import tiny_model

from engram_graft.cli.train import run
from engram_graft.recipe import load_recipe

ROOT = Path(__file__).parent.parent
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
ARCHITECTURE = {"smollm2": "llama", "qwen3": "qwen3"}


def test_there_are_recipes() -> None:
    names = {path.stem for path in RECIPES}
    assert {"smollm2-facts", "smollm2-facts-memory-only", "qwen3-facts", "qwen3-domain"} <= names


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_the_recipe_trains_two_steps_and_its_header_is_the_command_that_runs_it(
    path: Path, tokenizer: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(ROOT)
    header = path.read_text().split("\nbase:")[0]
    assert f"engram-graft train --recipe recipes/{path.name}" in header
    base = load_recipe(path).base
    assert base is not None
    model = tiny_model(ARCHITECTURE[base], num_hidden_layers=8)
    model.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    overrides = {
        "base": str(tmp_path / "base"),
        "output": str(tmp_path / "out"),
        "merged": str(tmp_path / "merged") if load_recipe(path).merged else None,
        "train.max_steps": 2,
        "train.batch_size": 2,
        "train.recall_every": 0,
        "train.stop_at_recall": None,
        "engram.engram_vocab_size": [211] * (load_recipe(path).engram.max_ngram_size - 1),
    }
    # the data whole would take minutes on an untrained tokenizer: some of it, in the recipe's own form
    data = Path(load_recipe(path).data or "")
    if data.suffix == ".jsonl":
        some = tmp_path / data.name
        some.write_text("".join(line + "\n" for line in data.read_text().splitlines()[:3]))
        overrides["data"] = str(some)
    result = run(load_recipe(path, overrides), "cpu", quietly=True)
    assert result["steps"] == 2 and result["decoding"]["ok"]
    arms = json.loads((tmp_path / "out" / "probes.json").read_text())["arms"]
    assert {"base", "graft", "memory_off", "shuffled"} <= arms.keys()
    assert ("lora_off" in arms) == (load_recipe(path).lora.rank > 0)
