"""Export: one directory, reloaded bit for bit; LoRA merged in float32 and cast once; a failed check leaves nothing."""

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TINY_ENGRAM, keep_seen, randomize, tiny_model
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

import engram_graft as eg
from engram_graft import export
from engram_graft.errors import PromiseError, UserError
from engram_graft.files import memory_tensors
from engram_graft.merge import merged_state


def with_lora(tokenizer: Any, architecture: str = "llama", targets: Any = ("q_proj", "v_proj"), **changes: Any) -> Any:
    """A grafted tiny model with a LoRA that matters."""
    options = changes.pop("lora", {})
    model: Any = get_peft_model(tiny_model(architecture, **changes), LoraConfig(r=4, target_modules=targets, **options))
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    eg.graft(model, tokenizer, eg.EngramConfig(**TINY_ENGRAM))
    randomize(model)
    return model.eval()


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gpt2", "gpt_neox"])
def test_memory_only_exports_and_reloads_bit_equal(
    architecture: str, tmp_path: Path, grafted: Any, tokenizer: Any, ids: Any
) -> None:
    model = grafted(architecture)
    report = eg.export_merged(model, tokenizer, tmp_path / "merged")
    assert report["max_difference"] == 0 and report["flips"] == 0
    loaded, _ = eg.load_graft(tmp_path / "merged")
    with torch.no_grad():
        assert torch.equal(model(ids).logits, loaded(ids).logits)
    own, other = memory_tensors(model), memory_tensors(loaded)
    assert own.keys() == other.keys() and all(torch.equal(own[name], other[name]) for name in own)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("lora", [{}, {"use_rslora": True}, {"use_dora": True}])
def test_case_25_lora_is_merged_and_tied_embeddings_stay_tied(
    tied: bool, lora: dict[str, Any], tmp_path: Path, tokenizer: Any, ids: Any
) -> None:
    model = with_lora(tokenizer, tie_word_embeddings=tied, lora=lora)
    keep_seen(model, torch.arange(0, 100, 3))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    report = eg.export_merged(model, tokenizer, tmp_path / "merged")
    assert 0 < report["max_difference"] < 1e-4
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items()), (
        "the model itself is not changed"
    )
    loaded, _ = eg.load_graft(tmp_path / "merged")
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    with torch.no_grad():
        assert (model(ids).logits - loaded(ids).logits).abs().max() < 1e-4


def test_automodel_opens_the_export_as_the_base_with_lora_merged(tmp_path: Path, tokenizer: Any, ids: Any) -> None:
    model = with_lora(tokenizer)
    eg.export_merged(model, tokenizer, tmp_path / "merged")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    with torch.no_grad(), eg.disable_graft(model):
        assert (plain(ids).logits - model(ids).logits).abs().max() < 1e-4
    assert not (tmp_path / "merged" / "adapter_config.json").exists()


def test_case_26_lora_is_merged_in_float32_and_cast_once(tokenizer: Any) -> None:
    model = with_lora(tokenizer, dtype=torch.bfloat16)
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    assert layer.weight.dtype == torch.bfloat16 and layer.lora_A["default"].weight.dtype == torch.float32
    once = layer.weight.float() + layer.get_delta_weight("default").float()
    merged = merged_state(model)["model.layers.0.self_attn.q_proj.weight"]
    assert torch.equal(merged, once.to(torch.bfloat16))
    twice = layer.weight + layer.get_delta_weight("default").to(torch.bfloat16)
    assert not torch.equal(merged, twice), "control: rounding twice is something else"


def test_a_bfloat16_base_exports_and_reloads(tmp_path: Path, tokenizer: Any) -> None:
    model = with_lora(tokenizer, dtype=torch.bfloat16)
    eg.export_merged(model, tokenizer, tmp_path / "merged")
    loaded, _ = eg.load_graft(tmp_path / "merged")
    assert loaded.dtype == torch.bfloat16 and memory_tensors(loaded)["layers.1.key_norm"].dtype == torch.float32


def test_shards_are_written_and_read(tmp_path: Path, grafted: Any, tokenizer: Any, ids: Any) -> None:
    model = grafted()
    eg.export_merged(model, tokenizer, tmp_path / "merged", max_shard_size="50KB")
    assert len(list((tmp_path / "merged").glob("*.safetensors"))) > 2
    assert torch.equal(eg.load_graft(tmp_path / "merged")[0](ids).logits, model(ids).logits)


def test_a_failed_check_leaves_no_directory(tmp_path: Path, grafted: Any, tokenizer: Any, monkeypatch: Any) -> None:
    def fails(*args: Any) -> None:
        raise PromiseError("planted")

    monkeypatch.setattr("engram_graft.export._check_tensors", fails)
    with pytest.raises(PromiseError, match="planted"):
        eg.export_merged(grafted(), tokenizer, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_the_check_notices_a_changed_tensor(tmp_path: Path, grafted: Any, tokenizer: Any, monkeypatch: Any) -> None:
    real = export.reopen

    def nudged(directory: Path) -> Any:
        model = real(directory)
        with torch.no_grad():
            model.get_parameter("model.layers.1.engram.key_norm")[0, 0] += 1
        return model

    monkeypatch.setattr(export, "reopen", nudged)
    with pytest.raises(PromiseError, match=r"changed \['model.layers.1.engram.key_norm'\]"):
        eg.export_merged(grafted(), tokenizer, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_a_non_empty_directory_is_refused_and_untouched(tmp_path: Path, grafted: Any, tokenizer: Any) -> None:
    (tmp_path / "mine").write_text("precious")
    with pytest.raises(UserError, match="not empty"):
        eg.export_merged(grafted(), tokenizer, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_case_27_a_quantized_base_is_refused(tmp_path: Path, grafted: Any, tokenizer: Any) -> None:
    class Quantizer:
        class quantization_config:
            quant_method = "bitsandbytes"

    model = grafted()
    model.hf_quantizer = Quantizer()
    with pytest.raises(UserError, match=r"quantized \(bitsandbytes\).*bfloat16"):
        eg.export_merged(model, tokenizer, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_lora_on_a_tied_embedding_is_refused(tmp_path: Path, tokenizer: Any) -> None:
    model = with_lora(tokenizer, targets=("q_proj", "embed_tokens"), tie_word_embeddings=True)
    with pytest.raises(UserError, match="embedding"):
        eg.export_merged(model, tokenizer, tmp_path / "merged")
