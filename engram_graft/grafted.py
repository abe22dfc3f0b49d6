"""A grafted model: finding its memory, switching it and the adapters off, and what of it is trained."""

import contextlib
import threading
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from engram_graft.adapters import only_adapters
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
            "the model is grafted already: ungraft(model) first, load the base anew, or load this graft with a name of its own"
            if name == DEFAULT
            else f"the model has a memory {name!r} already: give this one another name, or remove_pack(model, {name!r}) first"
        )


@contextlib.contextmanager
def disable_graft(model: nn.Module, lora: bool = False) -> Iterator[nn.Module]:
    """Run `model` without its memories inside the `with`; with `lora=True` without PEFT adapters too, which is the base itself.

    The switch is the model's, not the thread's, like PEFT's own `disable_adapter`. A cache filled inside cannot be continued outside,
    nor one filled outside inside.
    """
    with only_memories(require_grafts(model)), disable_lora(model) if lora else contextlib.nullcontext():
        yield model


@contextlib.contextmanager
def only_memories(memories: Sequence[Graft], names: Collection[str] = ()) -> Iterator[None]:
    """Run calls inside the `with` with those of these memories that have the names, on even where they were off, and no others."""
    with _switch:  # steps rather than values: blocks of several threads may end in any order
        steps = [-memory.switched_off if memory.name in names else 1 for memory in memories]
        for memory, step in zip(memories, steps, strict=True):
            memory.switched_off += step
    try:
        yield
    finally:
        with _switch:
            for memory, step in zip(memories, steps, strict=True):
                memory.switched_off -= step


@contextlib.contextmanager
def explicit_ids(model: nn.Module, input_ids: Tensor) -> Iterator[nn.Module]:
    """The token ids `[B, T]` behind `inputs_embeds`, for calls inside the `with` that have no ids of their own: the first call of
    `generate(inputs_embeds=...)`, which takes no keyword of ours."""
    with contextlib.ExitStack() as stack:
        for memory in require_grafts(model):
            stack.callback(setattr, memory, "explicit_ids", memory.explicit_ids)
            memory.explicit_ids = input_ids
        yield model


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
    """Run `model` without its PEFT adapters; which parameters are trainable is as before."""
    with only_adapters(model, []):
        yield model


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
            f"the model carries the memories {', '.join(names)} and this works with one: remove_pack(model, name) the others, or load "
            "it alone"
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
