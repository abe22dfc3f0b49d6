"""A grafted model: finding its memory, switching it and the adapters off, and what of it is trained."""

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from engram_graft.compress import TokenMap
from engram_graft.config import EngramConfig
from engram_graft.errors import UserError
from engram_graft.hashing import HashPlan
from engram_graft.layer import Engram
from engram_graft.locate import locate
from engram_graft.params import adapter_names, is_memory
from engram_graft.recall import DEFAULT, Recall, child, recalls
from engram_graft.sharding import is_sharded

_switch = threading.Lock()


class Graft(Recall):
    """A memory of a model, and what has to be remembered of the model to take it off again."""

    def __init__(self, config: EngramConfig, plan: HashPlan, token_map: TokenMap, keywords: bool, name: str = DEFAULT):
        super().__init__(config, plan, keywords, name)
        self.token_map = token_map
        self.was_trainable: list[str] = []  # parameters of the base that were trainable before
        self.handles: list[Any] = []  # of the hooks; the first memory of a model holds them for all


def require_bare(model: nn.Module, name: str = DEFAULT) -> None:
    """Raise `UserError` if the model carries a memory of this name, or is sharded, so that its layers cannot be tried one by one."""
    if is_sharded(model):
        raise UserError("FSDP shards the model: graft it first, then shard it")
    if any(found.name == name for found in grafts(model)):
        raise UserError(
            "the model is grafted already: ungraft(model) first, or load the base anew"
            if name == DEFAULT
            else f"the model has a memory {name!r} already: give this one another name, or ungraft(model, {name!r}) first"
        )


@contextlib.contextmanager
def disable_graft(model: nn.Module, lora: bool = False) -> Iterator[nn.Module]:
    """Run `model` without its memories inside the `with`; with `lora=True` without PEFT adapters too, which is the base itself.

    The switch is the model's, not the thread's, like PEFT's own `disable_adapter`. A cache filled inside cannot be continued outside.
    """
    with switched_off(require_grafts(model)), disable_lora(model) if lora else contextlib.nullcontext():
        yield model


@contextlib.contextmanager
def switched_off(memories: Sequence[Graft]) -> Iterator[None]:
    """Run calls inside the `with` without these memories."""
    with _switch:
        for memory in memories:
            memory.switched_off += 1
    try:
        yield
    finally:
        with _switch:
            for memory in memories:
                memory.switched_off -= 1


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


def grafts(model: nn.Module) -> list[Graft]:
    """The memories that `model` carries, in the order they were attached."""
    return [found for found in recalls(locate(model).decoder) if isinstance(found, Graft)]


def require_grafts(model: nn.Module) -> list[Graft]:
    """The memories that `model` carries. Raises `UserError` if it carries none."""
    found = grafts(model)
    if not found:
        raise UserError("the model has no memory: graft(model, tokenizer) or load_graft(directory) first")
    return found


def find_graft(model: nn.Module, name: str | None = None) -> Graft:
    """The memory of this name; without one, the only memory of `model`. Raises `UserError` if there is none, or several."""
    found = require_grafts(model)
    names = [memory.name for memory in found]
    if name is None and len(found) > 1:
        raise UserError(
            f"the model carries the memories {', '.join(names)}: this works with one; ungraft(model, name) the others"
        )
    if name is not None and name not in names:
        raise UserError(f"the model has no memory {name!r}; it carries {', '.join(names)}")
    return found[0] if name is None else found[names.index(name)]


def memories(model: nn.Module, name: str | None = None) -> list[Engram]:
    """The layers' parts of a memory, in the order of its config's `layer_ids`."""
    layers: Any = locate(model).layers
    memory = find_graft(model, name)
    return [getattr(layers[layer_id], child(memory.name)) for layer_id in memory.config.layer_ids]


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
