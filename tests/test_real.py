"""The real SmolLM2-135M-Instruct, from its GGUF: compression, identity, learning, decoding and export."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_remote import opened_without_toolkit
from transformers import AutoModelForCausalLM

import engram_graft as eg
from engram_graft.bases import ALIASES, load_base, packaged
from engram_graft.compress import compress
from engram_graft.data import Data, load_data
from engram_graft.probes import Subject, run_probes
from engram_graft.recipe import load_recipe
from engram_graft.scoring import greedy
from engram_graft.verify import verify_decoding

pytestmark = pytest.mark.real
FACTS = Path(__file__).parent.parent / "recipes" / "data" / "facts.jsonl"


@pytest.fixture(scope="module")
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def smollm2(threads: None) -> Any:
    return load_base("smollm2")


def test_compression_of_smollm2s_own_tokenizer_is_the_golden_one(smollm2: Any) -> None:
    expected = json.loads((Path(__file__).parent / "data" / "geometry.json").read_text())["smollm2_4gram"]
    token_map = compress(smollm2[1])
    assert (len(token_map.lookup), token_map.size) == (expected["vocab"], expected["compressed_vocab"]) == (49152, 32873)
    assert hashlib.sha256(token_map.lookup.astype("<i8").tobytes()).hexdigest() == expected["lookup_sha256"]
    for sample in expected["samples"]:
        ids = smollm2[1](sample["text"])["input_ids"]
        assert ids == sample["input_ids"] and token_map.lookup[ids].tolist() == sample["compressed"]


def test_identity_learning_decoding_and_reload_on_the_real_model(smollm2: Any, tmp_path: Path) -> None:
    model, tokenizer = smollm2
    eg.graft(model, tokenizer, eg.EngramConfig(layer_ids=(2, 6), engram_vocab_size=(2000, 2000)))
    try:
        data = Data(facts=load_data(str(FACTS)).facts[30:38]).with_forms(1)
        overrides = {
            "train.max_steps": 16,
            "train.batch_size": 8,
            "train.learning_rate": 3e-3,
            "train.recall_every": 16,
        }
        result = eg.train(model, tokenizer, load_recipe(None, overrides), data)
        assert result["identity"]["bitwise"] and {c["dtype"] for c in result["identity"]["checks"]} == {
            "float32",
            "bfloat16",
        }
        arms = run_probes(Subject(model, tokenizer, data))["arms"]
        assert arms["graft"]["recall"]["greedy_exact"] >= 0.75
        assert arms["shuffled"]["recall"]["greedy_exact"] <= 0.25
        assert arms["memory_off"] == arms["base"] and arms["base"]["locality"]["unchanged_positions"] == 1
        decoding = verify_decoding(model, tokenizer)
        assert decoding["ok"], decoding
        prompts = [fact.prompts[0] for fact in data.facts]
        cached = greedy(model, tokenizer, prompts, 6)
        assert cached == greedy(model, tokenizer, prompts, 6, use_cache=False)
        assert cached == greedy(model, tokenizer, prompts, 6, batch_size=1)
        eg.save_graft(model, tmp_path / "graft")
        eg.export_merged(model, tokenizer, tmp_path / "merged", table_dtype="bfloat16")
        (there,) = opened_without_toolkit({"directories": [str(tmp_path / "merged")], "prompts": prompts, "tokens": 6}, tmp_path)
        for way in ("cached", "uncached", "batch"):
            assert [answer[: len(own)] for answer, own in zip(there[way], cached, strict=True)] == cached, way
    finally:
        eg.ungraft(model)
    loaded, _ = eg.load_graft(tmp_path / "graft", base=model, tokenizer=tokenizer)
    assert greedy(loaded, tokenizer, prompts, 6) == cached
    eg.ungraft(loaded)


def test_case_24_a_base_loaded_from_gguf_without_further_ado_exports_and_reloads(smollm2: Any, tmp_path: Path) -> None:
    tokenizer = smollm2[1]
    path = packaged(ALIASES["smollm2"])
    assert path is not None
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    with pytest.raises(ValueError, match="not serializable"):
        model.save_pretrained(tmp_path / "control")
    eg.graft(model, tokenizer, eg.EngramConfig(layer_ids=(2,), engram_vocab_size=(500, 500)))
    with torch.no_grad():
        model.model.layers[2].engram.value_proj.weight.fill_(0.01)
    report = eg.export_merged(model, tokenizer, tmp_path / "merged")
    assert report["max_difference"] == 0
    config = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert "quantization_config" not in config and config["tie_word_embeddings"] is True
