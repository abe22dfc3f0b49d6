"""The same memory however it is run: cache or none, chunks, padding, packing, beams. Every memory parameter is random here."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import ARCHITECTURES, keep_seen
from torch import Tensor, nn
from transformers import DynamicCache

import engram_graft as eg
from engram_graft.cache import find_state
from engram_graft.context import Context
from engram_graft.errors import UserError
from engram_graft.grafted import find_graft
from engram_graft.verify import verify_decoding

Make = Callable[..., nn.Module]


@torch.no_grad()
def full(model: nn.Module, ids: Tensor, **kwargs: Any) -> Tensor:
    return model(input_ids=ids, use_cache=False, **kwargs).logits


@torch.no_grad()
def in_chunks(model: nn.Module, ids: Tensor, size: int, cache: DynamicCache | None = None) -> Tensor:
    cache = DynamicCache() if cache is None else cache
    parts = [model(input_ids=part, past_key_values=cache, use_cache=True).logits for part in ids.split(size, 1)]
    return torch.cat(parts, 1)


@pytest.mark.parametrize("size", [1, 4, 23])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_case_4_token_by_token_and_chunks_equal_the_full_forward(
    architecture: str, size: int, grafted: Make, ids: Tensor
) -> None:
    model = grafted(architecture)
    assert (in_chunks(model, ids, size) - full(model, ids)).abs().max() <= 1e-5


def test_case_4_control_a_forgotten_tail_is_noticed(grafted: Make, ids: Tensor) -> None:
    model = grafted()
    cache = DynamicCache()
    first = in_chunks(model, ids[:, :12], 12, cache)
    state = find_state(cache, find_graft(model).owner)
    assert state is not None
    state.normed = {layer: torch.zeros_like(values) for layer, values in state.normed.items()}
    second = in_chunks(model, ids[:, 12:], 12, cache)
    assert (torch.cat([first, second], 1) - full(model, ids)).abs().max() > 1e-3


@pytest.mark.parametrize("mode", [{}, {"num_beams": 3}, {"num_beams": 4, "num_return_sequences": 2}])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_generate_with_cache_equals_without(architecture: str, mode: dict[str, int], grafted: Make, ids: Tensor) -> None:
    model = grafted(architecture)
    settings = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0, **mode}
    with_cache = model.generate(input_ids=ids, use_cache=True, **settings)
    assert torch.equal(with_cache, model.generate(input_ids=ids, use_cache=False, **settings))
    with eg.disable_graft(model):
        assert not torch.equal(with_cache, model.generate(input_ids=ids, **settings)), "control: the memory changes what is said"


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("fill", [0, 1, 7])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_case_8_a_left_padded_row_equals_the_row_alone(
    architecture: str, fill: int, whole: bool, grafted: Make, ids: Tensor
) -> None:
    model = grafted(architecture, whole_ngrams=whole)
    padded, mask = ids.clone(), torch.ones_like(ids)
    padded[1, :9], mask[1, :9] = fill, 0
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    batch = full(model, padded, attention_mask=mask, position_ids=positions)
    assert (batch[:1] - full(model, ids[:1])).abs().max() <= 1e-5
    assert (batch[1:, 9:] - full(model, ids[1:, 9:])).abs().max() <= 1e-5


def test_case_8_a_left_padded_batch_decodes_as_the_rows_alone(grafted: Make, ids: Tensor) -> None:
    model = grafted()
    padded, mask = ids.clone(), torch.ones_like(ids)
    padded[1, :9], mask[1, :9] = 5, 0
    settings = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    batch = model.generate(input_ids=padded, attention_mask=mask, **settings)[:, 24:]
    alone = [model.generate(input_ids=row, **settings)[0, -12:] for row in (ids[:1], ids[1:, 9:])]
    assert torch.equal(batch, torch.stack(alone))


def test_right_padding_changes_nothing(grafted: Make, ids: Tensor) -> None:
    model = grafted()
    padded = torch.cat([ids, torch.zeros_like(ids[:, :5])], 1)
    mask = torch.cat([torch.ones_like(ids), torch.zeros_like(ids[:, :5])], 1)
    assert (full(model, padded, attention_mask=mask)[:, :24] - full(model, ids)).abs().max() <= 1e-5


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("told_by", ["position_ids", "seq_idx", "cu_seq_lens_q"])
def test_case_9_packed_documents_equal_the_documents_apart(told_by: str, whole: bool, grafted: Make, ids: Tensor) -> None:
    model = grafted(whole_ngrams=whole)
    packed = torch.cat([ids[:1, :13], ids[1:, :11]], 1)
    positions = torch.cat([torch.arange(13), torch.arange(11)])[None]
    extra = {"seq_idx": (positions == 0).cumsum(1).int(), "cu_seq_lens_q": torch.tensor([0, 13, 24], dtype=torch.int32)}
    # the positions are the base's own way to keep documents apart; the memory goes by the most explicit of the three
    together = full(model, packed, position_ids=positions, **{k: v for k, v in extra.items() if k == told_by})
    apart = torch.cat([full(model, ids[:1, :13]), full(model, ids[1:, :11])], 1)
    assert (together - apart).abs().max() <= 1e-5
    assert (full(model, packed) - apart).abs().max() > 1e-3, "control: without positions they are one document"


@pytest.mark.parametrize("reentrant", [True, False, None])
def test_case_11_gradients_with_checkpointing_equal_those_without(reentrant: bool | None, grafted: Make, ids: Tensor) -> None:
    """Two forwards before one backward; `None` is the second run without checkpointing, the tolerance's control."""

    def gradients(checkpointing: bool) -> dict[str, Tensor]:
        model: Any = grafted().train()
        if checkpointing and reentrant is not None:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        loss = model(input_ids=ids, labels=ids).loss + model(input_ids=ids.flip(1), labels=ids).loss
        loss.backward()
        return {n: p.grad.to_dense() for n, p in model.named_parameters() if p.grad is not None}

    plain, saving = gradients(False), gradients(True)
    assert plain.keys() == saving.keys() and len(plain) > 10
    assert all((plain[n] - saving[n]).abs().max() <= 1e-6 for n in plain)


def test_verify_decoding_notices_a_forgotten_tail_on_texts_nothing_was_trained_on(
    grafted: Make, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = grafted(seen_filter=True)
    keep_seen(model)
    assert verify_decoding(model, tokenizer)["ok"]
    real = Context.record

    def forgetful(context: Context, cache: DynamicCache) -> Any:
        state = real(context, cache)
        state.normed = {layer: torch.zeros_like(values) for layer, values in state.normed.items()}
        return state

    monkeypatch.setattr(Context, "record", forgetful)
    report = verify_decoding(model, tokenizer)
    assert not report["ok"] and not report["token by token"]["ok"] and report["left-padded batch"]["ok"]


def test_case_6_crop_rewinds_the_memory(grafted: Make, ids: Tensor) -> None:
    model = grafted()
    cache = DynamicCache()
    in_chunks(model, ids, 24, cache)
    cache.crop(-10)
    again = in_chunks(model, ids[:, 14:], 10, cache)
    assert (again - full(model, ids)[:, 14:]).abs().max() <= 1e-5


def test_case_5_two_interleaved_streams_equal_the_two_alone(grafted: Make, ids: Tensor) -> None:
    model = grafted()
    caches = [DynamicCache(), DynamicCache()]
    parts: list[list[Tensor]] = [[], []]
    for at in range(0, 24, 3):
        for row in (0, 1):
            parts[row].append(in_chunks(model, ids[row : row + 1, at : at + 3], 3, caches[row]))
    assert (torch.cat([torch.cat(part, 1) for part in parts]) - full(model, ids)).abs().max() <= 1e-5


def test_a_copied_prefix_cache_can_be_continued_twice(grafted: Make, ids: Tensor) -> None:
    model = grafted()
    cache = DynamicCache()
    in_chunks(model, ids[:, :16], 16, cache)
    for tail in (ids[:, 16:], ids[:, 16:].flip(1)):
        continued = in_chunks(model, tail, 3, copy.deepcopy(cache))
        assert (continued - full(model, torch.cat([ids[:, :16], tail], 1))[:, 16:]).abs().max() <= 1e-5


def test_a_cache_the_memory_has_not_followed_is_refused(grafted: Make, ids: Tensor) -> None:
    model = grafted()
    cache = DynamicCache()
    with eg.disable_graft(model):
        in_chunks(model, ids[:, :8], 8, cache)
    with pytest.raises(UserError, match="holds 8 tokens and the memory has followed 0"):
        in_chunks(model, ids[:, 8:], 8, cache)


@pytest.mark.parametrize("base", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("memory", ["float32", "bfloat16"])
def test_case_32_any_base_dtype_with_any_memory_dtype_keeps_the_base_dtype(
    base: str, memory: str, grafted: Make, ids: Tensor
) -> None:
    model = grafted(base={"dtype": getattr(torch, base)}, dtype=memory)
    logits = full(model.to(getattr(torch, base)) if memory == base else model, ids)
    assert logits.dtype == getattr(torch, base) and logits.isfinite().all()


def test_case_5_decoding_in_train_mode_equals_eval_mode(grafted: Make, ids: Tensor) -> None:
    model = grafted(seen_filter=True)
    for layer in (1, 2):
        table = model.model.layers[layer].engram.table
        assert table.count_seen() == len(table.weight)
    settings = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = model.generate(input_ids=ids, **settings)
    model.train()
    assert torch.equal(model.generate(input_ids=ids, **settings), expected)


@pytest.mark.parametrize("size", [1, 4, 12])
@pytest.mark.parametrize(
    ("architecture", "window"), [("mistral", {"sliding_window": 6}), ("gemma3_text", {"sliding_window": 6}), ("qwen3", {})]
)
def test_case_4_windows_shorter_than_the_text_change_nothing(
    architecture: str, window: dict[str, int], size: int, grafted: Make, ids: Tensor
) -> None:
    model: Any = grafted(architecture, base=window)
    cache = DynamicCache(config=model.config)
    assert (in_chunks(model, ids, size, cache) - full(model, ids)).abs().max() <= 1e-5


def test_case_6_a_window_cache_that_records_its_past_can_be_rewound(grafted: Make, ids: Tensor) -> None:
    model: Any = grafted("mistral", base={"sliding_window": 6})
    cache = DynamicCache(config=model.config)
    in_chunks(model, ids[:, :16], 4, cache)
    cache.activate_past_recording()
    in_chunks(model, ids[:, :5], 5, cache)
    cache.crop(-5)
    assert (in_chunks(model, ids[:, 16:], 4, cache) - full(model, ids)[:, 16:]).abs().max() <= 1e-5


def test_a_cache_that_was_pickled_can_be_continued(grafted: Make, ids: Tensor) -> None:
    import pickle

    model = grafted()
    cache = DynamicCache()
    in_chunks(model, ids[:, :16], 16, cache)
    thawed = pickle.loads(pickle.dumps(cache))
    assert (in_chunks(model, ids[:, 16:], 4, thawed) - full(model, ids)[:, 16:]).abs().max() <= 1e-5


def test_case_7_beams_rows_repeated_and_selected_keep_their_own_past(grafted: Make, ids: Tensor) -> None:
    model = grafted()
    cache = DynamicCache()
    in_chunks(model, ids[:, :16], 16, cache)
    cache.batch_repeat_interleave(2)
    cache.reorder_cache(torch.tensor([2, 0, 3, 1]))
    cache.batch_select_indices(torch.tensor([0, 3]))
    rows = ids.repeat_interleave(2, 0)[torch.tensor([2, 0, 3, 1])][torch.tensor([0, 3])]
    assert (in_chunks(model, rows[:, 16:], 4, cache) - full(model, rows)[:, 16:]).abs().max() <= 1e-5


def test_right_padded_rows_decode_on_as_the_rows_alone(grafted: Make, ids: Tensor) -> None:
    """n-gram and convolution distances skip the padding between a row's prompt and what follows it."""
    model = grafted()
    padded, mask = ids.clone(), torch.ones_like(ids)
    padded[1, 10:16], mask[1, 10:16] = 3, 0
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    cache, parts = DynamicCache(), []
    with torch.no_grad():
        for at in range(0, 24, 8):
            now = slice(at, at + 8)
            given = {"attention_mask": mask[:, : at + 8], "position_ids": positions[:, now], "past_key_values": cache}
            parts.append(model(input_ids=padded[:, now], use_cache=True, **given).logits)
    found = torch.cat(parts, 1)
    alone = full(model, torch.cat([ids[1:, :10], ids[1:, 16:]], 1))
    assert (found[:1] - full(model, ids[:1])).abs().max() <= 1e-5
    assert (torch.cat([found[1:, :10], found[1:, 16:]], 1) - alone).abs().max() <= 1e-5


def test_case_9_documents_parted_by_a_4d_mask_equal_the_documents_apart(grafted: Make, ids: Tensor) -> None:
    model = grafted()
    row, second = ids[:1], torch.arange(24) >= 13
    blocks = (torch.ones(24, 24).tril().bool() & (second[:, None] == second[None]))[None, None]
    apart = torch.cat([full(model, row[:, :13]), full(model, row[:, 13:])], 1)
    assert (full(model, row, attention_mask=blocks) - apart).abs().max() <= 1e-5


def test_case_8_padding_in_a_4d_mask_is_seen_even_where_its_rows_are_unmasked(grafted: Make, ids: Tensor) -> None:
    model = grafted()
    mask = torch.ones_like(ids)
    mask[1, :9] = 0
    unmasked = (torch.ones(24, 24).tril().bool()[None, None] & mask.bool()[:, None, None, :]).clone()
    unmasked[1, 0, :9] = True  # what transformers does for SDPA: a row of padding sees everything
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    two, four = (full(model, ids, attention_mask=m, position_ids=positions) for m in (mask, unmasked))
    assert (two[1:, 9:] - four[1:, 9:]).abs().max() <= 1e-5 and (two[:1] - four[:1]).abs().max() <= 1e-5


def test_packed_documents_with_a_cache_are_refused_where_they_are_told_outright(grafted: Make, ids: Tensor) -> None:
    model = grafted()
    with pytest.raises(UserError, match="use_cache=False"):
        model(input_ids=ids, seq_idx=(torch.arange(24) >= 13).int()[None].expand(2, -1), use_cache=True)


def test_a_call_that_makes_its_own_cache_equals_one_that_is_given_one(grafted: Make, ids: Tensor) -> None:
    model: Any = grafted()
    jumping = torch.cat([torch.arange(12), torch.arange(100, 112)])[None].expand(2, -1)
    with torch.no_grad():
        own, given = (
            model(input_ids=ids, position_ids=jumping, use_cache=True, **c).logits
            for c in ({}, {"past_key_values": DynamicCache()})
        )
    assert torch.equal(own, given)


def test_a_cache_with_another_grafts_past_is_refused(grafted: Make, ids: Tensor) -> None:
    one, other, cache = grafted(), grafted(seed=0), DynamicCache()
    in_chunks(one, ids[:, :8], 8, cache)
    with pytest.raises(UserError, match="filled by another model"):
        in_chunks(other, ids[:, 8:], 8, cache)
    in_chunks(copy.deepcopy(one), ids[:, 8:], 8, cache)  # a copy of the model goes on


def test_gemma3_with_a_static_cache_chunked_prefill_and_left_padding(grafted: Make) -> None:
    types = ["sliding_attention", "full_attention"] * 2
    model: Any = grafted("gemma3_text", base={"sliding_window": 8, "layer_types": types})
    ids = torch.randint(2, 320, (2, 40), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(ids)
    mask[1, :9] = 0
    settings = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    settings |= {"output_logits": True, "return_dict_in_generate": True}
    plain = torch.stack(model.generate(input_ids=ids, **settings).logits)
    static = torch.stack(model.generate(input_ids=ids, **settings, prefill_chunk_size=7, cache_implementation="static").logits)
    assert (plain - static).abs().max() <= 1e-5
