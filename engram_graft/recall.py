"""The hooks that run memories: one on the decoder reads a call's ids, one on each layer adds what the layer's memories recall.

Hooks are plain functions that find the memories through the module they are called with: after a deepcopy the copy uses its own.
They sit on the decoder and its layers, where every wrapper and `generate` pass. Each memory of a layer reads the same stream and
what they recall is summed, by their names' order: in which they were attached is of no account, to the last bit.
"""

import inspect
import threading
import uuid
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from transformers.cache_utils import Cache

from engram_graft.config import EngramConfig
from engram_graft.context import IDS_KEYWORD, Context, build_context, find_cache, refuse_left_behind
from engram_graft.errors import UserError
from engram_graft.hashing import HashPlan, NgramHash
from engram_graft.layer import Engram

DEFAULT = "default"  # the name of a memory that was given none
_CONTEXTS = "engram_contexts"  # the keyword by which the decoder's hook hands a call's contexts to the layers' hooks
_PAGED = ("generate_batch", "init_continuous_batching")  # methods of the base that a memory stands in front of
_PAGED_ATTENTION = ("paged", "vllm", "sglang")  # implementations whose caches say nothing of past tokens
_calls = threading.local()  # contexts of running calls, for decoders that hand no keywords on


class Recall(NgramHash):
    """The addresses of one memory and the switches of its calls: the decoder's child `engram_hash`.

    Args:
        config, plan: what was attached.
        keywords: whether the decoder hands unknown keywords on to its layers.
        name: of the memory, where several are side by side.
    """

    def __init__(self, config: EngramConfig, plan: HashPlan, keywords: bool, name: str = DEFAULT):
        super().__init__(plan)
        self.config, self.keywords, self.name = config, keywords, name
        self.switched_off = 0  # how many blocks that switch it off are open
        self.owner = uuid.uuid4().hex  # what a cache says whose past it carries; a copy of the model shares it
        self.explicit_ids: Tensor | None = None  # see the context manager of this name
        self.silent: Tensor | None = None  # see `without_ngrams`
        self.decoder_parameters: tuple[str, ...] = ()
        self.mapped_tables: list[Any] = []  # those in files: rows are read ahead of their layers


def child(name: str, kind: str = "engram") -> str:
    """The attribute that holds a memory's part: of a layer, or, of `kind` "engram_hash", of the decoder."""
    return kind if name == DEFAULT else f"{kind}_pack_{name}"


def recalls(decoder: nn.Module) -> list[Recall]:
    """The memories of a decoder, in the order they were attached."""
    return [module for module in decoder.children() if isinstance(module, Recall)]


def put(decoder: nn.Module, layers: nn.ModuleList, recall: Recall, memories: Sequence[Engram]) -> None:
    """Make a memory's parts children of the decoder and its layers."""
    recall.decoder_parameters = tuple(inspect.signature(type(decoder).forward).parameters)[1:]
    for memory in memories:
        layers[memory.layer_id].add_module(child(recall.name), memory)
    decoder.add_module(child(recall.name, "engram_hash"), recall)


def install(model: nn.Module, decoder: nn.Module, layers: nn.ModuleList, keywords: bool) -> list[Any]:
    """Register the hooks, once for all memories; returns their handles."""
    hooks: list[Any] = [decoder.register_forward_pre_hook(_decoder_pre_hook, with_kwargs=True)]
    if not keywords:
        hooks.append(decoder.register_forward_hook(_decoder_post_hook, always_call=True))
    hooks += [layer.register_forward_pre_hook(_layer_pre_hook, with_kwargs=True) for layer in layers]
    for name in _PAGED:
        setattr(model, name, _refuse_paged)
    return hooks


def uninstall(model: nn.Module, handles: list[Any]) -> None:
    """Take the hooks off again."""
    for handle in handles:
        handle.remove()
    for name in _PAGED:
        delattr(model, name)


def _refuse_paged(*args: Any, **kwargs: Any) -> None:
    """Continuous batching packs requests into a paged cache that says nothing of their past tokens: refused before it starts."""
    raise UserError("continuous batching cannot carry a memory: use model.generate, or the base without its memory")


def _decoder_pre_hook(decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    contexts: dict[str, Context] = {}
    kwargs = dict(kwargs)
    here = recalls(decoder)
    on = sorted((recall for recall in here if recall.switched_off <= 0), key=lambda recall: recall.name)
    given = dict(zip(here[0].decoder_parameters, args, strict=False)) | kwargs
    implementation = str(getattr(decoder.config, "_attn_implementation", ""))
    if on and implementation.startswith(_PAGED_ATTENTION):
        raise UserError(f"attention {implementation!r} keeps a paged cache, which cannot carry a memory: use model.generate")
    caching = bool(getattr(decoder.config, "use_cache", False))
    for recall in on:
        context = contexts[recall.name] = build_context(recall, given, recall.owner, caching, recall.explicit_ids)
        context.silent = recall.silent
        for index, table in enumerate(recall.mapped_tables):
            if not table.training:  # the trainer reads a batch's rows earlier
                table.prefetch(context.rows[:, :, index])
    refuse_left_behind(given, {recall.owner for recall in on})
    kwargs.pop(IDS_KEYWORD, None)  # ours alone: the decoder must not see it
    if here[0].keywords:
        kwargs[_CONTEXTS] = contexts
    else:
        _calls.__dict__.setdefault("running", []).append(contexts)
    return args, kwargs


def _decoder_post_hook(decoder: nn.Module, args: Any, output: Any) -> None:
    if _calls.__dict__.get("running"):
        _calls.running.pop()


def _layer_pre_hook(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    kwargs = dict(kwargs)
    contexts = kwargs.pop(_CONTEXTS, None)  # on every layer: the layer itself must not see it
    memories = [module for module in layer.children() if isinstance(module, Engram)]
    if not memories:
        return args, kwargs
    if contexts is None and _calls.__dict__.get("running"):
        contexts = _calls.running[-1]
    if contexts is None:
        raise RuntimeError(
            f"layer {memories[0].layer_id} carries a memory but ran outside its decoder, without token ids: call the model, "
            "or wrap the call in disable_graft(model)"
        )
    hidden = args[0] if args else kwargs["hidden_states"]
    found, cache = hidden, _layer_cache(args, kwargs)
    for name, context in contexts.items():
        memory = getattr(layer, child(name), None)
        if memory is not None:
            found = found + _recall(memory, hidden, context, cache)
    return (found, *args[1:]) if args else args, kwargs if args else {**kwargs, "hidden_states": found}


def _layer_cache(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Cache | None:
    """The cache as a layer gets it: a decoder may have made it after its own hook ran."""
    cache = next((value for value in args[1:] if isinstance(value, Cache)), None)
    return find_cache(kwargs) if cache is None else cache  # an empty cache is falsy


def _recall(memory: Engram, hidden: Tensor, context: Context, cache: Cache | None) -> Tensor:
    """The memory's addend for `hidden`, with the cache's state read and written."""
    rows = context.rows[:, :, memory.index].to(hidden.device)
    silent = None if context.silent is None else context.silent.to(hidden.device)
    if cache is None:
        return memory(hidden, rows, context.window, silent=silent)[0]
    state = context.record(cache)
    addend, normed = memory(hidden, rows, context.window, state.normed.get(memory.index), silent)
    if normed is not None:
        state.normed[memory.index] = normed
    return addend
