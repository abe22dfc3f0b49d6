"""One forward call as the memory sees it: which ids, which of them are padding, where documents begin, what came before.

Built once per call by the decoder's hook and handed to the layers; nothing of a call is ever kept on the model.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from engram_graft.cache import DecodeState, find_state, seen_tokens, state_of
from engram_graft.errors import UserError
from engram_graft.hashing import NgramHash
from engram_graft.window import Window

IDS_KEYWORD = "engram_input_ids"  # ids beside inputs_embeds
_CACHE_NAMES = ("cache", "past_key_values", "layer_past", "cache_params", "state")


@dataclasses.dataclass
class Context:
    """Args:
    rows: int64 `[B, T, layers, orders*heads]`.
    window: the call's positions, with the cached ones before them.
    ids: compressed ids `[B, past + T]`.
    recorded: whether the cache's state has taken this call's columns in.
    """

    rows: Tensor
    window: Window
    ids: Tensor
    recorded: bool = False

    def record(self, cache: Cache) -> DecodeState:
        """The cache's state, holding this call's ids: the first grafted layer to run writes them."""
        state = state_of(cache)
        if not self.recorded:
            if state.length != self.window.past:
                raise RuntimeError(
                    f"the decoder's call saw {self.window.past} cached tokens, its layers' cache has {state.length}"
                )
            state.ids, state.valid, self.recorded = self.ids, self.window.valid, True
        return state


def build_context(
    ngram_hash: NgramHash, names: Sequence[str], explicit_ids: Tensor | None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Context:
    """Read a decoder call; `names` are its positional parameters, `explicit_ids` go with a call that has only embeddings.

    Raises `UserError` where the memory could not be right: no ids, a cache it has not followed."""
    given = dict(zip(names, args, strict=False)) | kwargs
    beside = kwargs.pop(IDS_KEYWORD, None)  # ours alone: the decoder must not see it
    input_ids = next((ids for ids in (given.get("input_ids"), beside, explicit_ids) if ids is not None), None)
    if input_ids is None:
        raise UserError(
            "the memory needs token ids and this call has only inputs_embeds: pass the ids beside them as "
            f"model(inputs_embeds=..., {IDS_KEYWORD}=ids), wrap generate in engram_graft.grafted.explicit_ids(model, ids), or run "
            "without memory inside disable_graft(model)"
        )
    cache = find_cache(given)
    past, state = 0, None
    if cache is not None:
        held, state = seen_tokens(cache), find_state(cache)
        past = state.length if state is not None else 0
        if held != past and not (held is None and past):
            raise UserError(
                f"the cache holds {'some' if held is None else held} tokens and the memory has followed {past} of them (it was off, "
                "or the cache was filled by another model): start from an empty cache"
            )
    embeds = given.get("inputs_embeds")
    if embeds is not None and given.get("input_ids") is None and input_ids.shape != embeds.shape[:2]:
        raise UserError(
            f"the ids beside inputs_embeds are {list(input_ids.shape)}, the embeddings {list(embeds.shape[:2])}: one id each"
        )
    length = input_ids.shape[1]
    compressed = ngram_hash.lookup[input_ids.to(ngram_hash.lookup.device)]
    valid = _valid(given.get("attention_mask"), length, past, cache)
    segment = _segments(given, input_ids) if cache is None and valid is None else None
    if state is not None and state.ids is not None:
        compressed = torch.cat([state.ids, compressed], 1)
        if valid is not None or state.valid is not None:
            before = torch.ones_like(state.ids, dtype=torch.bool) if state.valid is None else state.valid
            now = torch.ones_like(input_ids, dtype=torch.bool) if valid is None else valid
            valid = torch.cat([before, now.to(before.device)], 1)
    window = Window(past, length, valid, segment)
    return Context(ngram_hash(compressed, window), window, compressed)


def find_cache(given: Mapping[str, Any]) -> Cache | None:
    """The Hugging Face cache among the arguments of a call, under any of its names."""
    for name in _CACHE_NAMES:
        value = given.get(name)
        if isinstance(value, Cache):
            return value
        if value is not None:
            raise UserError(
                f"{name}={type(value).__name__}: the memory follows transformers' Cache classes; pass a DynamicCache, or use_cache=False"
            )
    return None


def _valid(mask: Any, length: int, past: int, cache: Cache | None) -> Tensor | None:
    """bool `[B, T]`, False at padding; None when nothing is padded. A 4D mask tells by its diagonal: a pad sees not even itself."""
    if isinstance(mask, Mapping):  # one mask for each kind of layer
        mask = mask.get("full_attention", next(iter(mask.values()), None))
    if mask is None:
        return None
    if mask.ndim == 2:
        valid = mask[:, -length:].bool()
    elif length == 1:
        return None  # a generated token
    else:
        offset = cache.get_mask_sizes(length, 0)[1] if cache is not None else 0
        t = torch.arange(length, device=mask.device)
        diagonal = mask[:, 0][:, t, t + past - offset]
        valid = diagonal if diagonal.dtype == torch.bool else diagonal >= 0
    return None if bool(valid.all()) else valid


def _segments(given: Mapping[str, Any], input_ids: Tensor) -> Tensor | None:
    """int `[B, T]`, the document of each position in a packed row; None when there is one document."""
    if given.get("seq_idx") is not None:
        return torch.as_tensor(given["seq_idx"], device=input_ids.device).expand_as(input_ids)
    if given.get("cu_seq_lens_q") is not None:
        starts = given["cu_seq_lens_q"].to(input_ids.device)
        t = torch.arange(input_ids.shape[1], device=input_ids.device)
        return torch.bucketize(t, starts[1:], right=True).expand_as(input_ids)
    positions = given.get("position_ids")
    if positions is None or positions.ndim != 2:
        return None
    jumps = (positions.diff(dim=-1, prepend=positions[:, :1] - 1) != 1).cumsum(-1)
    return jumps.to(input_ids.device).expand_as(input_ids) if bool(jumps[:, -1].any()) else None
