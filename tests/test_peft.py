"""The memory beside everything PEFT does to a model: it is never wrapped, never frozen for good, never lost."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import TINY_ENGRAM, randomize, tiny_model
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

import engram_graft as eg
from engram_graft.params import adapter_names, is_memory

Make = Callable[..., nn.Module]


def adapted(tokenizer: Any, seed: int = 0, **options: Any) -> Any:
    """A tiny model with a LoRA that matters, grafted, everything random."""
    model: Any = get_peft_model(tiny_model(), LoraConfig(r=2, **{"target_modules": ["q_proj"], **options}))
    eg.graft(model, tokenizer, eg.EngramConfig(**TINY_ENGRAM))
    randomize(model)
    stir(model, "default", seed)
    return model.eval()


def stir(model: nn.Module, adapter: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in adapter_names(model) and f".{adapter}." in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)


def logits(model: Any, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model(input_ids=ids).logits


def test_adapters_can_be_switched_beside_one_memory(tokenizer: Any, ids: Tensor) -> None:
    model = adapted(tokenizer)
    one = logits(model, ids)
    model.add_adapter("other", LoraConfig(r=2, target_modules=["v_proj"]))
    stir(model, "other", 9)
    model.set_adapter("other")
    other = logits(model, ids)
    assert all("other" in name or is_memory(name) for name in eg.trainable_parameters(model))
    model.set_adapter("default")
    assert torch.equal(logits(model, ids), one) and not torch.equal(one, other)


@pytest.mark.parametrize("options", [{"use_dora": True}, {"modules_to_save": ["lm_head"]}, {"target_modules": "all-linear"}])
def test_other_kinds_of_adapters_work_beside_the_memory(options: dict[str, Any], tokenizer: Any, ids: Tensor) -> None:
    model = adapted(tokenizer, **options)
    generated = [
        model.generate(input_ids=ids, max_new_tokens=8, do_sample=False, eos_token_id=None, use_cache=use)
        for use in (True, False)
    ]
    assert torch.equal(*generated)
    assert not any(is_memory(name) for name in adapter_names(model))
    with eg.disable_graft(model, lora=True):
        assert torch.equal(logits(model, ids), logits(tiny_model(), ids))


def test_merging_the_adapter_keeps_the_memory(tokenizer: Any, ids: Tensor) -> None:
    model = adapted(tokenizer)
    before = logits(model, ids)
    merged = model.merge_and_unload()
    assert (logits(merged, ids) - before).abs().max() < 1e-5
    with eg.disable_graft(merged):
        assert (logits(merged, ids) - before).abs().max() > 1e-3, "control: the memory is in it"


def test_disable_adapter_alone_leaves_the_memory_on_and_disable_graft_takes_both(tokenizer: Any, ids: Tensor) -> None:
    model = adapted(tokenizer)
    with model.disable_adapter():
        memory_only = logits(model, ids)
    with eg.disable_graft(model, lora=True):
        bare = logits(model, ids)
    assert not torch.equal(memory_only, bare) and torch.equal(bare, logits(tiny_model(), ids))
