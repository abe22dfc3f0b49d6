"""One forward call as the memory sees it: which ids, which of them are padding, where documents begin, what came before.

Built once per call by the decoder's hook and handed to the layers; nothing of a call is ever kept on the model.
"""

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from engram_graft.cache import DecodeState, find_state, followers, seen_tokens, state_of
from engram_graft.errors import UserError
from engram_graft.hashing import NgramHash
from engram_graft.window import Window

IDS_KEYWORD = "engram_input_ids"  # ids beside inputs_embeds
_CACHE_NAMES = ("cache", "past_key_values", "layer_past", "cache_params", "state")


class Context:
    """No dataclass: FSDP in mixed precision hands each layer its own copy of one, and `recorded` has to be the call's.

    Args:
        rows: int64 `[B, T, layers, orders*heads]`.
        window: the call's positions, with the cached ones before them.
        ids: compressed ids `[B, past + T]`.
        owner: the memory's mark.
        silent: bool `[B, T, orders]`, n-grams that this call leaves out; None: none.
    """

    def __init__(self, rows: Tensor, window: Window, ids: Tensor, owner: str):
        self.rows, self.window, self.ids, self.owner = rows, window, ids, owner
        self.silent: Tensor | None = None
        self.recorded = False  # whether the cache's state has taken this call's columns in

    def record(self, cache: Cache) -> DecodeState:
        """The cache's state, holding this call's ids: the first grafted layer to run writes them."""
        state = state_of(cache, self.owner)
        if not self.recorded:
            if state.length != self.window.past:
                raise RuntimeError(
                    f"the decoder's call saw {self.window.past} cached tokens, its layers' cache has {state.length}"
                )
            state.ids, state.valid, self.recorded = self.ids, self.window.valid, True
        return state


def build_context(
    ngram_hash: NgramHash, given: Mapping[str, Any], owner: str, caching: bool, explicit_ids: Tensor | None = None
) -> Context:
    """Read a decoder call. Raises `UserError` where the memory could not be right: no ids, a cache it has not followed.

    Args:
        given: the call's arguments by name.
        owner: the memory's mark; a cache whose past is not its own is refused.
        caching: whether the decoder makes a cache when the call does not say.
        explicit_ids: ids of a call that has only embeddings.
    """
    input_ids = next((ids for ids in (given.get("input_ids"), given.get(IDS_KEYWORD), explicit_ids) if ids is not None), None)
    if input_ids is None:
        raise UserError(
            "the memory needs token ids and this call has only inputs_embeds: pass the ids beside them as "
            f"model(inputs_embeds=..., {IDS_KEYWORD}=ids). For generate, and to run without memory, engram-graft has "
            "engram_graft.grafted.explicit_ids(model, ids) and disable_graft(model)"
        )
    embeds = given.get("inputs_embeds")
    if embeds is not None and given.get("input_ids") is None:
        if embeds.shape[0] % input_ids.shape[0] == 0:  # generate has repeated each row for its beams
            input_ids = input_ids.repeat_interleave(embeds.shape[0] // input_ids.shape[0], 0)
        if input_ids.shape != embeds.shape[:2]:
            raise UserError(
                f"the ids beside inputs_embeds are {list(input_ids.shape)}, the embeddings {list(embeds.shape[:2])}: one id each"
            )
    cache = find_cache(given)
    past, state = 0, None
    if cache is not None:
        held, state = seen_tokens(cache), find_state(cache, owner)
        past = state.length if state is not None else 0
        if held != past and not (held is None and past):
            raise UserError(
                f"the cache holds {'some' if held is None else held} tokens and the memory has followed {past} of them "
                "(it was off, or the cache was filled by another model): start from an empty cache"
            )
    length = input_ids.shape[1]
    compressed = ngram_hash.lookup[input_ids.to(ngram_hash.lookup.device)]
    valid, segment = read_mask(given.get("attention_mask"), length, past, cache)
    told = _segments(given, input_ids)
    if cache is not None or (caching if given.get("use_cache") is None else given["use_cache"]):
        # as the base: with a cache, positions that jump do not part documents; what says so outright cannot be right
        if segment is not None or (told is not None and _outright(given)):
            raise UserError("packed documents cannot be run with a cache, which carries no boundaries: pass use_cache=False")
    else:
        segment = told if segment is None else segment
    if state is not None and state.ids is not None:
        compressed = torch.cat([state.ids, compressed], 1)
        if valid is not None or state.valid is not None:
            before = torch.ones_like(state.ids, dtype=torch.bool) if state.valid is None else state.valid
            now = torch.ones_like(input_ids, dtype=torch.bool) if valid is None else valid
            valid = torch.cat([before, now.to(before.device)], 1)
    window = Window(past, length, valid, segment)
    return Context(ngram_hash(compressed, window), window, compressed, owner)


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


def refuse_left_behind(given: Mapping[str, Any], owners: Collection[str]) -> None:
    """Raise `UserError` if a call's cache carries the past of a memory that is none of `owners`, who run: its keys and values are
    those of a text that was read with that memory."""
    cache = next((value for name in _CACHE_NAMES if isinstance(value := given.get(name), Cache)), None)
    if cache is not None and not followers(cache) <= set(owners):
        raise UserError(
            "the cache was filled with a memory that is off now: start from an empty cache, or switch on what was on when it was begun"
        )


def read_mask(mask: Any, length: int, past: int, cache: Cache | None) -> tuple[Tensor | None, Tensor | None]:
    """What an attention mask says of the call's T columns: which are tokens, and which document each is in.

    Returns:
        bool `[B, T]`, False at padding (None: no padding); int `[B, T]` (None: one document). A 2D mask marks padding. In a 4D mask
        padding is a column that no later row sees (rows that see the future are padding's own, unmasked for SDPA), and a document
        begins where a row does not see the one before it.
    """
    kind = "full_attention"
    if isinstance(mask, Mapping):  # one mask for each kind of layer
        kind = kind if mask.get(kind) is not None else next(iter(mask), kind)
        mask = mask.get(kind)
    if mask is None:
        return None, None
    if mask.ndim == 2:
        valid = mask[:, -length:].bool()
        return (None if bool(valid.all()) else valid), None
    if length == 1:
        return None, None  # a generated token
    first = past
    if cache is not None:
        sliding = list(cache.is_sliding)
        layer = next((n for n, slides in enumerate(sliding) if slides != (kind == "full_attention")), 0)
        first -= cache.get_mask_sizes(length, layer)[1]
    sees = mask[:, 0, :, first : first + length]  # (B, T, T)
    sees = sees if sees.dtype == torch.bool else sees >= 0
    causal = ~sees.triu(1).any(-1)  # (B, T)
    linked = sees.diagonal(-1, 1, 2)  # (B, T - 1): the next row sees this column
    last = sees.diagonal(0, 1, 2) & causal  # sees itself, and below: no next row sees it, so it ends its document
    last = torch.cat([last[:, :-1] & ~linked, last[:, -1:]], 1)
    valid = (sees.tril(-1) & causal[:, :, None]).any(1) | last
    begins = torch.zeros_like(valid)
    begins[:, 1:] = ~linked & valid[:, 1:] & valid[:, :-1]
    return (None if bool(valid.all()) else valid), (begins.cumsum(1) if bool(begins.any()) else None)


def _outright(given: Mapping[str, Any]) -> bool:
    return given.get("seq_idx") is not None or given.get("cu_seq_lens_q") is not None


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
