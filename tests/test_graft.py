"""Attaching: not a bit changes, every path is reached, nothing stays behind. Case numbers are those of the project's list of faults."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import ARCHITECTURES, LAYERS, TINY_ENGRAM, randomize, tiny_model
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

import engram_graft as eg
from engram_graft.errors import PromiseError, UserError
from engram_graft.grafted import find_graft, memories
from engram_graft.params import adapter_names, is_memory


def logits(model: nn.Module, ids: Tensor, **kwargs: Any) -> Tensor:
    with torch.no_grad():
        return model(input_ids=ids, **kwargs).logits


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_fresh_graft_changes_no_bit_and_a_random_one_does(architecture: str, tokenizer: Any, ids: Tensor) -> None:
    model = tiny_model(architecture)
    before = logits(model, ids)
    eg.graft(model, tokenizer, eg.EngramConfig(**TINY_ENGRAM))
    assert torch.equal(logits(model, ids), before)
    randomize(model)
    assert not torch.equal(logits(model, ids), before)


@pytest.mark.parametrize("zero_init", ["value", "table"])
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "falcon"])
def test_verify_identity_holds_in_both_dtypes_modes_and_ways(architecture: str, zero_init: str, tokenizer: Any) -> None:
    model = tiny_model(architecture)
    eg.graft(model, tokenizer, eg.EngramConfig(**{**TINY_ENGRAM, "zero_init": zero_init}))
    report = eg.verify_identity(model, tokenizer)
    seen = {(c["dtype"], c["mode"], c["check"]) for c in report["checks"]}
    assert len(seen) == 2 * 2 * 3 and report["bitwise"] and all(c["max_difference"] == 0 for c in report["checks"])
    assert {(n["dtype"], n["layer"]) for n in report["nudges"]} == {
        (d, layer) for d in ("float32", "bfloat16") for layer in (1, 2)
    }
    assert all(nudge["max_difference"] > 0 for nudge in report["nudges"])


def test_verify_identity_fails_when_one_value_projection_is_nudged(model: nn.Module, tokenizer: Any, config: Any) -> None:
    eg.graft(model, tokenizer, config)
    with torch.no_grad():
        memories(model)[1].value_proj.weight[0, 0] = 1e-3
    with pytest.raises(PromiseError, match="logits differ"):
        eg.verify_identity(model, tokenizer)


def test_verify_identity_fails_when_a_grafted_layer_is_not_reached(model: nn.Module, tokenizer: Any, config: Any) -> None:
    eg.graft(model, tokenizer, config)
    layer = model.model.layers[2]
    layer._forward_pre_hooks.clear()
    with pytest.raises(PromiseError, match=r"layers \[2\] did not run"):
        eg.verify_identity(model, tokenizer)


def test_verify_identity_leaves_model_and_random_state_as_they_were(model: nn.Module, tokenizer: Any, config: Any) -> None:
    eg.graft(model, tokenizer, config)
    model.model.layers[0].train()
    state, random = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    eg.verify_identity(model, tokenizer)
    assert all(torch.equal(state[k], v) for k, v in model.state_dict().items())
    assert torch.equal(random, torch.get_rng_state())
    assert model.model.layers[0].training and not model.model.layers[1].training


def test_case_1_hooks_are_reached_through_peft_forward_and_generate(tokenizer: Any, ids: Tensor, config: Any) -> None:
    model = get_peft_model(tiny_model(), LoraConfig(r=2, target_modules=["q_proj"]))
    eg.graft(model, tokenizer, config)
    calls = []
    for memory in memories(model):
        memory.register_forward_hook(lambda m, a, o: calls.append(m.layer_id))
    logits(model, ids)
    assert calls == [1, 2]
    calls.clear()
    model.generate(input_ids=ids, max_new_tokens=3, do_sample=False, eos_token_id=None)
    assert calls == [1, 2] * 3


@pytest.mark.parametrize("architecture", ["llama", "falcon"])
def test_case_1_a_grafted_layer_that_runs_without_ids_raises(architecture: str, grafted: Callable[..., nn.Module]) -> None:
    model = grafted(architecture)
    layer = memories(model)[0]
    owner = next(m for m in model.modules() if getattr(m, "engram", None) is layer)
    with pytest.raises(RuntimeError, match="without token ids"):
        owner(torch.zeros(1, 3, 32))


def test_case_2_a_long_input_uses_the_memory_everywhere(grafted: Callable[..., nn.Module]) -> None:
    model = grafted()
    ids = torch.randint(2, 300, (1, 1100))
    with_table = logits(model, ids)
    with torch.no_grad():
        for memory in memories(model):
            memory.table.weight.zero_()
    changed = (with_table != logits(model, ids)).any(-1)[0]
    assert changed[1:].all()  # the first position has no n-gram before it


def test_case_12_lora_before_or_after_the_graft_is_the_same(tokenizer: Any, ids: Tensor, config: Any) -> None:
    lora = LoraConfig(r=2, target_modules="all-linear")

    def made(first: str) -> nn.Module:
        model: Any = tiny_model()
        torch.manual_seed(5)
        if first == "lora":
            model = get_peft_model(model, lora)
        eg.graft(model, tokenizer, config)
        if first == "graft":
            torch.manual_seed(5)
            model = get_peft_model(model, lora)
        randomize(model)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                nn.init.constant_(parameter, 0.01)
        return model

    one, other = made("lora"), made("graft")
    assert torch.equal(logits(one, ids), logits(other, ids))
    names = [sorted(eg.trainable_parameters(model)) for model in (one, other)]
    assert names[0] == names[1]
    for model in (one, other):
        assert not any(is_memory(name) for name in adapter_names(model)), "no LoRA inside the memory"
        trainable = {name for name, p in model.named_parameters() if p.requires_grad}
        assert trainable == set(eg.trainable_parameters(model))
        assert any("lora_A" in name for name in trainable) and any(is_memory(name) for name in trainable)


def test_case_13_disable_graft_turns_memory_off_and_with_lora_the_adapters_too(tokenizer: Any, ids: Tensor, config: Any) -> None:
    base = tiny_model()
    bare = logits(base, ids)
    model = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"]))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.constant_(parameter, 0.1)
    lora_only = logits(model, ids)
    eg.graft(model, tokenizer, config)
    randomize(model)
    both = logits(model, ids)
    trainable = {n: p.requires_grad for n, p in model.named_parameters()}
    with eg.disable_graft(model):
        assert torch.equal(logits(model, ids), lora_only)
        with eg.disable_graft(model, lora=True):
            assert torch.equal(logits(model, ids), bare)
        assert torch.equal(logits(model, ids), lora_only)
    assert torch.equal(logits(model, ids), both)
    assert {n: p.requires_grad for n, p in model.named_parameters()} == trainable
    assert not torch.equal(bare, lora_only) and not torch.equal(both, lora_only)


def test_case_13_disable_graft_comes_back_on_after_an_error(grafted: Callable[..., nn.Module], ids: Tensor) -> None:
    model = grafted()
    on = logits(model, ids)
    with pytest.raises(KeyError), eg.disable_graft(model):
        raise KeyError
    assert torch.equal(logits(model, ids), on)


def test_case_14_a_deepcopy_acts_with_its_own_parameters(grafted: Callable[..., nn.Module], ids: Tensor) -> None:
    model = grafted()
    before = logits(model, ids)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        memories(twin)[0].table.weight.zero_()
    assert torch.equal(logits(model, ids), before) and not torch.equal(logits(twin, ids), before)
    with eg.disable_graft(twin):
        assert torch.equal(logits(model, ids), before)
    eg.ungraft(twin)
    assert not any(module._forward_pre_hooks for module in twin.modules())
    assert torch.equal(logits(model, ids), before)


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "falcon"])
def test_case_14_ungraft_leaves_no_trace(architecture: str, tokenizer: Any, ids: Tensor, config: Any) -> None:
    model = tiny_model(architecture)
    model.get_input_embeddings().weight.requires_grad_(False)
    names, trainable = list(model.state_dict()), {n: p.requires_grad for n, p in model.named_parameters()}
    before = logits(model, ids)
    eg.graft(model, tokenizer, config)
    randomize(model)
    assert not any(p.requires_grad for n, p in model.named_parameters() if not is_memory(n))
    eg.ungraft(model)
    assert list(model.state_dict()) == names and {n: p.requires_grad for n, p in model.named_parameters()} == trainable
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())
    assert torch.equal(logits(model, ids), before)
    eg.graft(model, tokenizer, config)  # and it can be grafted again
    with pytest.raises(UserError, match="grafted already"):
        eg.graft(model, tokenizer, config)


@pytest.mark.parametrize("layer_ids", [(LAYERS,), (0, 99)])
def test_case_15_a_layer_out_of_range_is_refused_with_the_valid_range(layer_ids: Any, model: nn.Module, tokenizer: Any) -> None:
    before = list(model.state_dict())
    with pytest.raises(UserError, match=f"layers 0 to {LAYERS - 1}"):
        eg.graft(model, tokenizer, eg.EngramConfig(**{**TINY_ENGRAM, "layer_ids": layer_ids}))
    assert list(model.state_dict()) == before


def test_case_15_layer_ids_count_from_0(grafted: Callable[..., nn.Module]) -> None:
    model = grafted(layer_ids=(0, 3))
    assert [hasattr(layer, "engram") for layer in model.model.layers] == [True, False, False, True]


def test_case_22_every_id_of_the_embedding_has_an_address(grafted: Callable[..., nn.Module], tokenizer: Any) -> None:
    model = grafted()
    ids = torch.arange(model.get_input_embeddings().weight.shape[0])[None]
    assert ids.shape[1] > len(tokenizer)
    assert logits(model, ids).isfinite().all()
    lookup = find_graft(model).lookup
    beyond = lookup[len(tokenizer) :]
    assert len(beyond.unique()) == len(beyond) and beyond.min() > lookup[: len(tokenizer)].max()


def test_case_10_inputs_embeds_without_ids_raise_and_with_ids_equal_the_plain_call(
    grafted: Callable[..., nn.Module], ids: Tensor
) -> None:
    model = grafted()
    embeds = model.get_input_embeddings()(ids)
    with pytest.raises(UserError, match="inputs_embeds"):
        model(inputs_embeds=embeds)
    with torch.no_grad():
        given = model(inputs_embeds=embeds, engram_input_ids=ids).logits
    assert torch.equal(given, logits(model, ids))


def test_a_fresh_graft_is_a_function_of_its_seed(tokenizer: Any, config: Any) -> None:
    def state(seed: int) -> dict[str, Tensor]:
        model = tiny_model()
        torch.manual_seed(torch.initial_seed() + 1)  # whatever the global generator says
        eg.graft(model, tokenizer, eg.EngramConfig(**{**TINY_ENGRAM, "seed": seed}))
        for memory in memories(model):
            memory.table.touch(torch.arange(len(memory.table.weight)))
        return {n: t.clone() for n, t in model.state_dict().items() if is_memory(n)}

    one, same, other = state(0), state(0), state(1)
    assert all(torch.equal(one[n], same[n]) for n in one)
    for name in ("model.layers.1.engram.table.values", "model.layers.1.engram.key_proj.weight"):
        assert not torch.equal(one[name], other[name])
    sizes = [len(one[f"model.layers.{layer}.engram.table.values"]) for layer in (1, 2)]
    first, second = (one[f"model.layers.{layer}.engram.table.values"][: min(sizes)] for layer in (1, 2))
    assert not (first == second).all(1).any(), "no row of one layer is the same row of another"
    assert not torch.equal(one["model.engram_hash.multipliers"], other["model.engram_hash.multipliers"])


def test_attach_refuses_another_number_of_streams(model: nn.Module, tokenizer: Any) -> None:
    with pytest.raises(UserError, match="1 residual streams"):
        eg.graft(model, tokenizer, eg.EngramConfig(**{**TINY_ENGRAM, "hc_mult": 4}))


def test_what_is_no_language_model_is_refused(tokenizer: Any) -> None:
    with pytest.raises(UserError, match="no Hugging Face model inside"):
        eg.graft(nn.Linear(2, 2), tokenizer)


def test_case_13_disable_graft_in_overlapping_blocks_is_on_again_after_the_last(
    grafted: Callable[..., nn.Module], ids: Tensor
) -> None:
    model = grafted()
    on = logits(model, ids)
    one, two = eg.disable_graft(model), eg.disable_graft(model)
    one.__enter__()
    off = logits(model, ids)
    two.__enter__()
    one.__exit__(None, None, None)
    assert torch.equal(logits(model, ids), off) and not torch.equal(on, off)
    two.__exit__(None, None, None)
    assert torch.equal(logits(model, ids), on)


def test_a_graft_that_fails_half_way_leaves_the_model_as_it_was(
    model: nn.Module, tokenizer: Any, ids: Tensor, monkeypatch: Any
) -> None:
    import engram_graft.hooks as hooks

    real = hooks.fresh_layer

    def full(config: Any, index: int, *rest: Any) -> Any:
        if index:
            raise MemoryError
        return real(config, index, *rest)

    monkeypatch.setattr(hooks, "fresh_layer", full)
    names, trainable = list(model.state_dict()), [p.requires_grad for p in model.parameters()]
    with pytest.raises(MemoryError):
        eg.graft(model, tokenizer, eg.EngramConfig(**TINY_ENGRAM))
    assert list(model.state_dict()) == names and [p.requires_grad for p in model.parameters()] == trainable
    assert not any(m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize(
    "name", ["LlamaModel", "BertForMaskedLM", "LlamaForSequenceClassification", "BartForConditionalGeneration"]
)
def test_what_is_no_causal_language_model_is_refused(name: str, tokenizer: Any) -> None:
    import transformers

    sizes = {"vocab_size": 328, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    if name.startswith("Bart"):
        sizes = {
            "vocab_size": 328,
            "d_model": 32,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_ffn_dim": 48,
            "decoder_ffn_dim": 48,
        }
        sizes |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    kind = getattr(transformers, name)
    with pytest.raises(UserError, match="no causal language model"):
        eg.graft(
            kind(kind.config_class(**sizes, pad_token_id=0)), tokenizer, eg.EngramConfig(**{**TINY_ENGRAM, "layer_ids": (1,)})
        )
