"""Decode state: what a memory remembers of the columns already in a Hugging Face cache.

It sits on the cache's own first layer, whose class is replaced by a subclass that hands every cache operation (beam reorder, crop,
repeat, select, reset) on to it. An extra layer, an attribute on the cache, or state on the model were each seen to go silently
wrong in some mode of decoding. One entry a cached column, so that the cache's own arithmetic holds for it unchanged.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from transformers.cache_utils import Cache


class DecodeState:
    """Columns so far: compressed ids and validity `[B, S]` once, normed values `[B, S, G, D]` for each grafted layer."""

    def __init__(self) -> None:
        self.ids: Tensor | None = None
        self.valid: Tensor | None = None
        self.normed: dict[int, Tensor] = {}

    @property
    def length(self) -> int:
        return 0 if self.ids is None else self.ids.shape[1]

    def _each(self, change: Callable[[Tensor], Tensor]) -> None:
        if self.ids is not None:
            self.ids = change(self.ids)
        if self.valid is not None:
            self.valid = change(self.valid)
        self.normed = {layer: change(values) for layer, values in self.normed.items()}

    # One method for each operation of a cache layer, under the operation's own name.

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._each(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._each(lambda x: x.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._each(lambda x: x[indices])

    def crop(self, tokens_to_remove: int) -> None:
        # transformers before 5.2x: a positive number is the length to keep; since then: minus the number to remove
        keep = tokens_to_remove if tokens_to_remove > 0 else self.length + tokens_to_remove
        self._each(lambda x: x[:, : max(keep, 0)])

    def reset(self) -> None:
        self.__init__()  # type: ignore[misc]


_OPERATIONS = ("reorder_cache", "batch_repeat_interleave", "batch_select_indices", "crop", "reset")
_carriers: dict[type, type] = {}


def _forward(layer_class: type, name: str) -> Callable[..., Any]:
    of_layer = getattr(layer_class, name)

    def operation(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = of_layer(self, *args, **kwargs)
        for state in self.engram.values():
            getattr(state, name)(*args, **kwargs)
        return result

    return operation


def _carrier(layer_class: type) -> type:
    """The subclass of a cache layer's class that carries each memory's `DecodeState` along."""
    if layer_class not in _carriers:
        body: dict[str, Any] = {n: _forward(layer_class, n) for n in _OPERATIONS if hasattr(layer_class, n)}
        body["_layer_type"] = None  # or transformers would register the subclass as the default for its layer type
        body["__reduce_ex__"] = lambda self, protocol: (_rebuild, (layer_class,), self.__dict__)
        _carriers[layer_class] = type(f"Engram{layer_class.__name__}", (layer_class,), body)
    return _carriers[layer_class]


def _rebuild(layer_class: type) -> Any:
    return object.__new__(_carrier(layer_class))


def find_state(cache: Cache, owner: str) -> DecodeState | None:
    """The state of the memory `owner` that `cache` carries, if any."""
    states = cache.layers[0].__dict__.get("engram", {}) if cache.layers else {}
    return cast("DecodeState | None", states.get(owner))


def followers(cache: Cache) -> set[str]:
    """The memories whose past `cache` carries."""
    states = cache.layers[0].__dict__.get("engram", {}) if cache.layers else {}
    return {owner for owner, state in states.items() if state.length}


def state_of(cache: Cache, owner: str) -> DecodeState:
    """The state of the memory `owner` that `cache` carries; an empty one is attached if there is none."""
    state = find_state(cache, owner)
    if state is None:
        if not cache.layers:  # DynamicCache() makes its layers at their first update
            assert cache.layer_class_to_replicate is not None
            cache.layers.append(cache.layer_class_to_replicate())
        layer: Any = cache.layers[0]
        if "engram" not in layer.__dict__:
            layer.__class__ = _carrier(type(layer))
            layer.engram = {}
        state = layer.engram[owner] = DecodeState()
    return state


def seen_tokens(cache: Cache) -> int | None:
    """Columns the cache holds; None where it has states but does not count (all layers linear, as in Mamba)."""
    try:
        length = cache.get_seq_length()
    except ValueError:  # what transformers raises when no layer keeps a length
        return None if cache.has_previous_state() else 0
    # static caches keep the number in a tensor
    return int(length.item()) if isinstance(length, torch.Tensor) else int(length)
