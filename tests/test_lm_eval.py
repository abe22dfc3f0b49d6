"""Grafts in lm-evaluation-harness: the same likelihoods as our own, by arm, from a model in memory and from a directory."""

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import tiny_model
from peft import LoraConfig, get_peft_model

import engram_graft as eg
from engram_graft.errors import UserError
from engram_graft.probes import arms_of
from engram_graft.probes.lm_eval import main, register
from engram_graft.scoring import greedy, teacher_forced

Make = Callable[..., Any]
RECORDS = [
    {"prompt": "The cat sleeps in the", "choices": ["sun", "hills", "bread"], "label": 0},
    {"prompt": "Velmora exports", "choices": ["honey and more", "wool", "salt"], "label": 1},
    {"prompt": "x", "choices": ["y", "def area", "water"], "label": 2},
]
QUESTIONS = [(record["prompt"], choice) for record in RECORDS for choice in record["choices"]]


def test_without_the_harness_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval.api.registry", None)  # as if it were not there
    with pytest.raises(UserError, match=r"pip install .engram-graft\[lm-eval\]"):
        register.__wrapped__()


@pytest.fixture
def harness() -> Any:
    return pytest.importorskip("lm_eval", reason='lm-evaluation-harness is not installed: pip install "engram-graft[lm-eval]"')


@pytest.fixture
def task(tmp_path: Path) -> Path:
    """A folder with one task, `tiny`: three multiple-choice questions from a file."""
    folder = tmp_path / "tasks"
    folder.mkdir()
    (folder / "tiny.jsonl").write_text("".join(json.dumps(record) + "\n" for record in RECORDS), encoding="utf-8")
    described = {
        "task": "tiny",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "tiny.jsonl")}, "cache_dir": str(tmp_path / "cache")},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{prompt}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{label}}",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    (folder / "tiny.yaml").write_text(yaml.safe_dump(described), encoding="utf-8")
    return folder


def evaluated(harness: Any, task: Path, **model: Any) -> tuple[list[float], float]:
    """Log-likelihood of each choice of each question, and accuracy."""
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(task), include_defaults=False)
    report = harness.simple_evaluate(tasks=["tiny"], task_manager=manager, bootstrap_iters=0, log_samples=True, **model)
    samples = sorted(report["samples"]["tiny"], key=lambda sample: sample["doc_id"])
    return [float(choice[0]) for s in samples for choice in s["filtered_resps"]], report["results"]["tiny"]["acc,none"]


def ours(model: Any, tokenizer: Any) -> list[float]:
    lengths = [len(tokenizer(f" {answer}")["input_ids"]) for _, answer in QUESTIONS]
    return [-score.ce * n for score, n in zip(teacher_forced(model, tokenizer, QUESTIONS), lengths, strict=True)]


@pytest.mark.parametrize("lora", [False, True])
def test_the_harness_finds_the_likelihoods_that_we_find_for_a_model_in_memory(
    lora: bool, harness: Any, task: Path, grafted: Make, tokenizer: Any
) -> None:
    from lm_eval.models.huggingface import HFLM

    model = grafted()
    if lora:
        model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
    found = {}
    for arm in ("base", "graft"):
        with arms_of(model)[arm](model):
            found[arm], accuracy = evaluated(harness, task, model=HFLM(pretrained=model, tokenizer=tokenizer, batch_size=2))
            assert found[arm] == pytest.approx(ours(model, tokenizer), abs=1e-3)
            best = [max(range(3), key=found[arm][row : row + 3].__getitem__) for row in (0, 3, 6)]
            assert accuracy == pytest.approx(sum(b == r["label"] for b, r in zip(best, RECORDS, strict=True)) / 3)
    assert max(abs(a - b) for a, b in zip(found["base"], found["graft"], strict=True)) > 0.1, "control: the arms differ"
    assert found["base"] == pytest.approx(ours(tiny_model(), tokenizer), abs=1e-3), "and base is the base"


@pytest.fixture
def directory(tmp_path: Path, grafted: Make, tokenizer: Any) -> Path:
    """A saved graft with the base it names."""
    base = tiny_model()
    base.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    eg.save_graft(grafted(), tmp_path / "graft")
    return tmp_path / "graft"


def test_the_model_type_engram_evaluates_a_directory_in_each_of_its_arms(
    harness: Any, task: Path, directory: Path, grafted: Make, tokenizer: Any
) -> None:
    register()
    model, base, found = grafted(), directory.parent / "base", {}
    for arm in ("base", "graft", "shuffled"):
        found[arm] = evaluated(harness, task, model="engram", model_args=f"pretrained={directory},base={base},arm={arm}")[0]
        with arms_of(model)[arm](model):
            assert found[arm] == pytest.approx(ours(model, tokenizer), abs=1e-3)
    assert len({round(values[0], 3) for values in found.values()}) == 3, "control: the arms differ"
    with pytest.raises(UserError, match="arm='lora_off': this graft has base, graft, "):
        evaluated(harness, task, model="engram", model_args=f"pretrained={directory},base={base},arm=lora_off")


def test_the_harness_generates_with_the_memory(harness: Any, directory: Path, grafted: Make, tokenizer: Any) -> None:
    from lm_eval.api.instance import Instance

    prompts = [record["prompt"] for record in RECORDS]
    lm = register()(str(directory), base=str(directory.parent / "base"), batch_size=2)
    options = {"until": ["<eos>"], "max_gen_toks": 6, "do_sample": False}
    requests = [Instance("generate_until", {}, (prompt, dict(options)), n) for n, prompt in enumerate(prompts)]
    expected = [tokenizer.decode(ids, skip_special_tokens=True) for ids in greedy(grafted(), tokenizer, prompts, 6)]
    assert lm.generate_until(requests, disable_tqdm=True) == expected
    with eg.disable_graft(other := grafted()):
        assert [tokenizer.decode(ids, skip_special_tokens=True) for ids in greedy(other, tokenizer, prompts, 6)] != expected


def test_the_command_is_the_harnesss_own_and_knows_engram(
    harness: Any, task: Path, directory: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: Any, grafted: Make
) -> None:
    output = directory.parent / "results"
    arguments = ["--model", "engram", "--model_args", f"pretrained={directory},base={directory.parent / 'base'}"]
    arguments += ["--tasks", "tiny", "--include_path", str(task), "--device", "cpu", "--output_path", str(output)]
    monkeypatch.setattr(sys, "argv", ["lm_eval", *arguments])
    main()
    (path,) = output.rglob("results*.json")
    accuracy = json.loads(path.read_text(encoding="utf-8"))["results"]["tiny"]["acc,none"]
    values = ours(grafted(), tokenizer)
    best = [max(range(3), key=values[row : row + 3].__getitem__) for row in (0, 3, 6)]
    assert math.isclose(accuracy, sum(b == r["label"] for b, r in zip(best, RECORDS, strict=True)) / 3)
