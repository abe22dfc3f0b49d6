"""A grafted model: finding its memory, switching it and the adapters off, and what of it is trained."""

import contextlib
import threading
import uuid
from collections.abc import Iterator
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from engram_graft.compress import TokenMap
from engram_graft.config import EngramConfig
from engram_graft.errors import UserError
from engram_graft.hashing import HashPlan, NgramHash
from engram_graft.layer import Engram
from engram_graft.locate import locate
from engram_graft.params import adapter_names, is_memory
from engram_graft.sharding import is_sharded
from engram_graft.table import EngramTable

_switch = threading.Lock()


class Graft(NgramHash):
    """A grafted model's addresses, and what the graft has to remember of the model: the decoder's child `engram_hash`."""

    def __init__(self, config: EngramConfig, plan: HashPlan, token_map: TokenMap, keywords: bool):
        super().__init__(plan)
        self.config, self.token_map, self.keywords = config, token_map, keywords
        self.switched_off = 0  # how many disable_graft blocks are open
        self.owner = uuid.uuid4().hex  # what a cache says whose past it carries; a copy of the model shares it
        self.explicit_ids: Tensor | None = None  # see the context manager of this name
        self.silent: Tensor | None = None  # see `without_ngrams`
        self.decoder_parameters: tuple[str, ...] = ()
        self.was_trainable: list[str] = []  # parameters of the base that were trainable before
        self.mapped_tables: list[EngramTable] = []  # those in files: rows are read ahead of their layers
        self.handles: list[torch.utils.hooks.RemovableHandle] = []


def require_bare(model: nn.Module) -> None:
    """Raise `UserError` if the model carries a graft, or is sharded, so that its layers cannot be tried one by one."""
    if is_sharded(model):
        raise UserError("FSDP shards the model: graft it first, then shard it")
    if hasattr(locate(model).decoder, "engram_hash"):
        raise UserError("the model is grafted already: ungraft(model) first, or load the base anew")


@contextlib.contextmanager
def disable_graft(model: nn.Module, lora: bool = False) -> Iterator[nn.Module]:
    """Run `model` without its memory inside the `with`; with `lora=True` without PEFT adapters too, which is the base itself.

    The switch is the model's, not the thread's, like PEFT's own `disable_adapter`. A cache filled inside cannot be continued outside.
    """
    ngram_hash = find_graft(model)
    with _switch:
        ngram_hash.switched_off += 1
    try:
        with disable_lora(model) if lora else contextlib.nullcontext():
            yield model
    finally:
        with _switch:
            ngram_hash.switched_off -= 1


@contextlib.contextmanager
def explicit_ids(model: nn.Module, input_ids: Tensor) -> Iterator[nn.Module]:
    """The token ids `[B, T]` behind `inputs_embeds`, for calls inside the `with` that have no ids of their own: the first call of
    `generate(inputs_embeds=...)`, which takes no keyword of ours."""
    ngram_hash = find_graft(model)
    before, ngram_hash.explicit_ids = ngram_hash.explicit_ids, input_ids
    try:
        yield model
    finally:
        ngram_hash.explicit_ids = before


@contextlib.contextmanager
def without_ngrams(model: nn.Module, silent: Tensor | None) -> Iterator[nn.Module]:
    """Leave the n-grams `silent` (bool `[B, T, orders]`) out of the calls inside the `with`, as if they were unknown: they add nothing
    and are not learned. The switch is the model's, for one call at a time."""
    ngram_hash = find_graft(model)
    before, ngram_hash.silent = ngram_hash.silent, silent
    try:
        yield model
    finally:
        ngram_hash.silent = before


@contextlib.contextmanager
def disable_lora(model: nn.Module) -> Iterator[nn.Module]:
    """Run `model` without its PEFT adapters; which parameters are trainable afterwards is as before."""
    trainable = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    with contextlib.ExitStack() as stack:
        if isinstance(model, PeftModel):
            stack.enter_context(model.disable_adapter())
        else:  # adapters added by transformers' own add_adapter
            for module in model.modules():
                if isinstance(module, BaseTunerLayer) and not module.disable_adapters:
                    module.enable_adapters(False)
                    stack.callback(module.enable_adapters, True)
        try:
            yield model
        finally:
            stack.close()
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(trainable[name])


def find_graft(model: nn.Module) -> Graft:
    """The graft that `model` carries. Raises `UserError` if it carries none."""
    found = getattr(locate(model).decoder, "engram_hash", None)
    if not isinstance(found, Graft):
        raise UserError("the model has no memory: graft(model, tokenizer) or load_graft(directory) first")
    return found


def memories(model: nn.Module) -> list[Engram]:
    """The memories of a grafted model, in the order of its config's `layer_ids`."""
    layers: Any = locate(model).layers
    return [layers[layer_id].engram for layer_id in find_graft(model).config.layer_ids]


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """What training changes: the memory's parameters and those of the active adapters, by name.

    Makes it so as well: `get_peft_model` on a grafted model leaves the memory frozen, loading leaves both; this thaws them.
    Raises `UserError` if the model has no memory.
    """
    find_graft(model)
    adapters = adapter_names(model, active=True)
    trainable = {name: parameter for name, parameter in model.named_parameters() if is_memory(name) or name in adapters}
    for parameter in trainable.values():
        parameter.requires_grad_(True)
    return trainable
