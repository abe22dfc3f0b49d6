"""Every way `generate` runs a grafted model gives the tokens of the loop without a cache. All memory parameters are random."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import ARCHITECTURES, TINY_ENGRAM, randomize, tiny_model
from torch import Tensor, nn
from transformers import DynamicCache, QuantizedCache, StaticCache

import engram_graft as eg
from engram_graft.errors import UserError
from engram_graft.grafted import explicit_ids

Make = Callable[..., nn.Module]
SETTINGS: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


def generate(model: Any, ids: Tensor, **changes: Any) -> Tensor:
    torch.manual_seed(0)
    return model.generate(input_ids=ids, **{**SETTINGS, **changes})


MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True, "temperature": 1.5},
    "3 beams": {"num_beams": 3},
    "4 beams": {"num_beams": 4},
    "3 return sequences": {"num_beams": 3, "num_return_sequences": 3},
    "sampled sequences": {"do_sample": True, "num_return_sequences": 2},
    "chunked prefill": {"prefill_chunk_size": 4},
    "static cache": {"cache_implementation": "static"},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_generate_with_cache_equals_without(architecture: str, mode: str, grafted: Make, ids: Tensor) -> None:
    model = grafted(architecture)
    changes = {k: v for k, v in MODES[mode].items() if k not in ("prefill_chunk_size", "cache_implementation")}
    expected = generate(model, ids, **changes, use_cache=False)
    assert torch.equal(generate(model, ids, **MODES[mode]), expected)


@pytest.mark.parametrize("mode", ["prompt lookup", "assisted"])
@pytest.mark.parametrize("architecture", [name for name in ARCHITECTURES if name != "falcon"])
def test_case_6_speculative_decoding_rewinds_the_memory(architecture: str, mode: str, grafted: Make, ids: Tensor) -> None:
    model = grafted(architecture)
    row = torch.cat([ids[:1], ids[:1, :12]], 1)  # repeats itself, so that there is something to look up
    expected = generate(model, row, use_cache=False)
    how = {"prompt_lookup_num_tokens": 4} if mode == "prompt lookup" else {"assistant_model": tiny_model("llama", seed=7)}
    assert torch.equal(generate(model, row, **how), expected)


# not the sampled modes: rows draw from one random stream in a batch and from another alone
@pytest.mark.parametrize("mode", [mode for mode in MODES if "sampl" not in mode])
def test_a_left_padded_batch_generates_as_the_rows_alone(mode: str, grafted: Make, ids: Tensor) -> None:
    model = grafted()
    padded, mask = ids.clone(), torch.ones_like(ids)
    padded[1, :9], mask[1, :9] = 5, 0
    batch = generate(model, padded, attention_mask=mask, **MODES[mode])[:, 24:]
    alone = [generate(model, row, **MODES[mode])[:, -12:] for row in (ids[:1], ids[1:, 9:])]
    assert torch.equal(batch, torch.cat(alone))


def test_case_5_threads_that_share_a_model_do_not_mix(grafted: Make, ids: Tensor) -> None:
    model = grafted()
    rows = [ids[:1], ids[1:], ids[:1, :7], ids[1:, 3:20]]
    expected = [model.generate(input_ids=row, **SETTINGS) for row in rows]
    found: list[Any] = [None] * len(rows)

    def run(n: int) -> None:
        found[n] = model.generate(input_ids=rows[n], **SETTINGS)

    threads = [threading.Thread(target=run, args=(n,)) for n in range(len(rows))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_a_returned_cache_can_be_continued(grafted: Make, ids: Tensor) -> None:
    model: Any = grafted()
    whole = generate(model, ids)
    first = model.generate(input_ids=ids, **{**SETTINGS, "max_new_tokens": 5}, return_dict_in_generate=True)
    cache = getattr(first, "cache", None) or first.past_key_values
    rest = model.generate(input_ids=first.sequences, past_key_values=cache, **{**SETTINGS, "max_new_tokens": 7})
    assert torch.equal(rest, whole)


def test_a_quantized_cache_carries_the_memory_as_a_full_one_does(grafted: Make, ids: Tensor) -> None:
    """The base's own keys and values lose precision; the memory's past does not: what differs is what differs without a memory."""
    model: Any = grafted()

    def difference() -> float:
        with torch.no_grad():
            cache = QuantizedCache("fp8", config=model.config)
            parts = [model(input_ids=part, past_key_values=cache, use_cache=True).logits for part in ids.split(6, 1)]
            return float((torch.cat(parts, 1) - model(input_ids=ids, use_cache=False).logits).abs().max())

    with eg.disable_graft(model):
        control = difference()
    assert control > 0 and difference() <= 4 * control


def test_a_static_cache_can_be_reset_and_used_again(grafted: Make, ids: Tensor) -> None:
    model: Any = grafted()
    cache = StaticCache(config=model.config, max_cache_len=64)
    for row in (ids, ids.flip(1)):
        with torch.no_grad():
            logits = [model(input_ids=part, past_key_values=cache, use_cache=True).logits for part in row.split(5, 1)]
            assert (torch.cat(logits, 1) - model(input_ids=row, use_cache=False).logits).abs().max() <= 1e-5
        cache.reset()


def test_disabled_memory_generates_as_the_base(grafted: Make, ids: Tensor) -> None:
    model = grafted()
    with eg.disable_graft(model):
        assert torch.equal(generate(model, ids), generate(tiny_model(), ids))


def test_autocast_leaves_the_memory_in_its_dtype(grafted: Make, ids: Tensor) -> None:
    model = grafted()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        whole = model(input_ids=ids, use_cache=False).logits
        cache = DynamicCache()
        parts = [model(input_ids=part, past_key_values=cache, use_cache=True).logits for part in ids.split(6, 1)]
    assert whole.isfinite().all() and (torch.cat(parts, 1) - whole).abs().max() < 0.1


def test_continuous_batching_is_refused_up_front_and_back_after_ungraft(grafted: Make) -> None:
    model: Any = grafted()
    for name in ("generate_batch", "init_continuous_batching"):
        with pytest.raises(UserError, match=r"use model.generate"):
            getattr(model, name)([[1, 2, 3]])
    eg.ungraft(model)
    assert "generate_batch" not in model.__dict__ and callable(model.generate_batch)


def test_case_10_generate_from_embeddings_with_explicit_ids_equals_generate_from_ids(grafted: Make, ids: Tensor) -> None:
    model: Any = grafted()
    expected = generate(model, ids)[:, 24:]
    embeds = model.get_input_embeddings()(ids)
    with pytest.raises(UserError, match="explicit_ids"):
        model.generate(inputs_embeds=embeds, **SETTINGS)
    with explicit_ids(model, ids):
        assert torch.equal(model.generate(inputs_embeds=embeds, **SETTINGS), expected)
        beams = {**SETTINGS, "num_beams": 3}
        assert torch.equal(model.generate(inputs_embeds=embeds, **beams), generate(model, ids, num_beams=3)[:, 24:])
        with pytest.raises(UserError, match="one id each"):
            model.generate(inputs_embeds=embeds[:, :5], **SETTINGS)


def test_torch_compile_has_one_graph_and_notices_graft_and_ungraft(tokenizer: Any, ids: Tensor) -> None:
    model: Any = tiny_model()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")

    def run(module: Any) -> Tensor:
        with torch.no_grad():
            return module(input_ids=ids, use_cache=False).logits

    bare = run(compiled)
    eg.graft(model, tokenizer, eg.EngramConfig(**TINY_ENGRAM))
    randomize(model)
    assert (run(compiled) - run(model)).abs().max() <= 1e-5 and not torch.equal(run(compiled), bare)
    explained = torch._dynamo.explain(lambda ids: model(input_ids=ids, use_cache=False).logits)(ids)
    assert explained.graph_count == 1 and explained.graph_break_count == 0, explained.break_reasons
    with eg.disable_graft(model):
        assert torch.equal(run(compiled), bare)
    eg.ungraft(model)
    assert torch.equal(run(compiled), bare)
    torch._dynamo.reset()


def test_a_base_kept_on_disk_by_accelerate_grafts_and_runs(tokenizer: Any, ids: Tensor, tmp_path: Any) -> None:
    import accelerate

    plain = tiny_model()
    expected = plain(ids).logits
    placed = {"model.embed_tokens": "cpu", "lm_head": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu"}
    placed |= {f"model.layers.{n}": "disk" if n == 2 else "cpu" for n in range(4)}
    model: Any = accelerate.dispatch_model(plain, placed, main_device="cpu", offload_dir=str(tmp_path), force_hooks=True)
    assert next(model.model.layers[2].parameters()).device.type == "meta"
    eg.graft(model, tokenizer, eg.EngramConfig(**TINY_ENGRAM))
    with torch.no_grad():
        assert torch.equal(model(ids).logits, expected)
        randomize(model)
        reference = tiny_model()
        eg.graft(reference, tokenizer, eg.EngramConfig(**TINY_ENGRAM))
        randomize(reference)
        assert torch.equal(model(ids).logits, reference(ids).logits)
