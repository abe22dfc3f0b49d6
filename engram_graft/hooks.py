"""Graft and ungraft: attach a memory to the layers of a frozen Hugging Face model, and take it off.

The memory of layer i is the child `engram` of that layer and the addresses are the child `engram_hash` of the decoder, so moving,
copying and saving the model take them along. Hooks are plain functions that find both through the module they are called with:
after a deepcopy the copy uses its own. They sit on the decoder and its layers, where every wrapper and `generate` pass.
"""

import inspect
import threading
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase
from transformers.cache_utils import Cache

from engram_graft.compress import TokenMap, compress, extend_lookup
from engram_graft.config import EngramConfig
from engram_graft.context import IDS_KEYWORD, Context, build_context, find_cache
from engram_graft.errors import UserError
from engram_graft.grafted import Graft, find_graft, require_bare
from engram_graft.hashing import HashPlan, plan_hashes
from engram_graft.layer import Engram
from engram_graft.locate import Located, dry_run, embedding_weight, locate
from engram_graft.params import adapter_names, base_name
from engram_graft.storage import Mapped, Resident

_KEYWORD = "engram_context"  # how the decoder's hook hands a call's context to the layers' hooks
_OFF = object()  # in place of a context: the memory is switched off for this call
_PAGED = ("generate_batch", "init_continuous_batching")  # methods of the base that a graft stands in front of
_calls = threading.local()  # contexts of running calls, for decoders that hand no keywords on


def graft(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    config: EngramConfig | None = None,
    table_dir: str | Path | None = None,
) -> nn.Module:
    """Attach a fresh memory to `model`, in place, and freeze the base. Not one bit of any logit changes.

    Any causal language model of transformers will do, bare or with PEFT adapters, which stay trainable.

    Args:
        model: from `AutoModelForCausalLM.from_pretrained` or `get_peft_model`.
        tokenizer: the base's; its vocabulary decides the addresses.
        config: what to attach, `EngramConfig()` by default.
        table_dir: keep the tables, and their optimizer state, in files of this directory, for tables larger than memory; the results
            are the same bit for bit. By default they are in memory.

    Returns:
        The same model.

    Raises:
        UserError: the model is grafted already, has no such layer, or is no causal language model; the tables do not fit.

    Source: arXiv 2601.07372; what differs is the frozen base and the zero initialisation.
    """
    config = EngramConfig() if config is None else config
    if not isinstance(config, EngramConfig):
        raise UserError(f"config is a {type(config).__name__}: pass an EngramConfig, e.g. EngramConfig(layer_ids=[2, 6])")
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise UserError(f"tokenizer is a {type(tokenizer).__name__}: pass the base's, from AutoTokenizer.from_pretrained")
    located = locate(model)
    token_map = compress(tokenizer)
    lookup = extend_lookup(token_map, embedding_weight(model).shape[0])
    pads = (config.pad_id, tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    pad_id = next(pad for pad in pads if pad is not None)
    if pad_id >= len(lookup):
        raise UserError(f"pad_id={pad_id}: the tokenizer and the model know ids 0 to {len(lookup) - 1}")
    storage = Resident() if table_dir is None else Mapped(table_dir)
    attach(located, config, plan_hashes(config, lookup, token_map.size, pad_id), token_map, storage)
    return model


def attach(located: Located, config: EngramConfig, plan: HashPlan, token_map: TokenMap, storage: Resident) -> Graft:
    """Attach a memory whose integers are known, its tables in `storage`: what `graft` and `load_graft` share."""
    require_bare(located.base)
    for options in getattr(located.base, "peft_config", {}).values():
        if getattr(options, "bias", "none") != "none":
            raise UserError(f"LoRA with bias={options.bias!r} trains biases of the base, which a graft freezes: use bias='none'")
    count = len(located.layers)
    for layer_id in config.layer_ids:
        if layer_id >= count:
            raise UserError(f"layer {layer_id} does not exist: this model has layers 0 to {count - 1} (counted from 0)")
    stream = dry_run(located)
    if stream.streams != config.hc_mult:
        raise UserError(f"hc_mult={config.hc_mult}: this model has {stream.streams} residual streams, set hc_mult to that")
    ngram_hash = Graft(config, plan, token_map, stream.keywords)
    ngram_hash.decoder_parameters = tuple(inspect.signature(type(located.decoder).forward).parameters)[1:]
    memories = []
    for index, layer_id in enumerate(config.layer_ids):
        layer = located.layers[layer_id]
        # of a layer that accelerate keeps on disk, only the hook knows where it runs
        device = getattr(getattr(layer, "_hf_hook", None), "execution_device", None) or next(layer.parameters()).device
        memory = Engram(config, index, plan.table_rows[index], stream.width, torch.device(device), storage)
        memories.append(memory.train(layer.training))
    # all of it is made by now: what follows cannot fail half way
    adapters = adapter_names(located.base)
    for name, parameter in located.base.named_parameters():
        if parameter.requires_grad and name not in adapters:
            parameter.requires_grad_(False)
            ngram_hash.was_trainable.append(base_name(name))
    for memory in memories:
        located.layers[memory.layer_id].engram = memory
    located.decoder.engram_hash = ngram_hash.to(embedding_weight(located.base).device)
    hooks: Any = [located.decoder.register_forward_pre_hook(_decoder_pre_hook, with_kwargs=True)]
    if not stream.keywords:
        hooks.append(located.decoder.register_forward_hook(_decoder_post_hook, always_call=True))
    hooks += [layer.register_forward_pre_hook(_layer_pre_hook, with_kwargs=True) for layer in located.layers]
    ngram_hash.handles = hooks
    ngram_hash.mapped_tables = [memory.table for memory in memories] if storage.on_disk else []
    for name in _PAGED:
        setattr(located.base, name, _refuse_paged)
    return ngram_hash


def ungraft(model: nn.Module) -> nn.Module:
    """Take the memory off, in place; the base is as it was, `requires_grad` included. Raises `UserError` if there is none."""
    located = locate(model)
    ngram_hash = find_graft(model)
    for handle in ngram_hash.handles:
        handle.remove()
    for layer_id in ngram_hash.config.layer_ids:
        del located.layers[layer_id].engram
    del located.decoder.engram_hash
    for name in _PAGED:
        delattr(located.base, name)
    for name, parameter in located.base.named_parameters():
        if base_name(name) in ngram_hash.was_trainable:
            parameter.requires_grad_(True)
    return model


def _refuse_paged(*args: Any, **kwargs: Any) -> None:
    """Continuous batching packs requests into a paged cache that says nothing of their past tokens: refused before it starts."""
    raise UserError("continuous batching cannot carry a memory: use model.generate, or ungraft(model) first")


def _decoder_pre_hook(decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    ngram_hash = decoder.engram_hash
    assert isinstance(ngram_hash, Graft)
    context: object = _OFF
    kwargs = dict(kwargs)
    if not ngram_hash.switched_off:
        caching = bool(getattr(decoder.config, "use_cache", False))
        given = dict(zip(ngram_hash.decoder_parameters, args, strict=False)) | kwargs
        context = build_context(ngram_hash, given, ngram_hash.owner, caching, ngram_hash.explicit_ids)
        context.silent = ngram_hash.silent
        kwargs.pop(IDS_KEYWORD, None)  # ours alone: the decoder must not see it
        for index, table in enumerate(ngram_hash.mapped_tables):
            if not table.training:  # the trainer reads a batch's rows earlier
                table.prefetch(context.rows[:, :, index])
    if ngram_hash.keywords:
        kwargs[_KEYWORD] = context
    else:
        _calls.__dict__.setdefault("running", []).append(context)
    return args, kwargs


def _decoder_post_hook(decoder: nn.Module, args: Any, output: Any) -> None:
    if _calls.__dict__.get("running"):
        _calls.running.pop()


def _layer_pre_hook(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    kwargs = dict(kwargs)
    context = kwargs.pop(_KEYWORD, None)  # on every layer: the layer itself must not see it
    memory = getattr(layer, "engram", None)
    if memory is None:
        return args, kwargs
    if context is None and _calls.__dict__.get("running"):
        context = _calls.running[-1]
    if context is _OFF:
        return args, kwargs
    if not isinstance(context, Context):
        raise RuntimeError(
            f"layer {memory.layer_id} carries a memory but ran outside its decoder, without token ids: call the model, "
            "or wrap the call in disable_graft(model)"
        )
    hidden = args[0] if args else kwargs["hidden_states"]
    hidden = hidden + _recall(memory, hidden, context, _layer_cache(args, kwargs))
    return (hidden, *args[1:]) if args else args, kwargs if args else {**kwargs, "hidden_states": hidden}


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
