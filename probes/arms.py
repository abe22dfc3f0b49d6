"""The arms of every report: the same model with one part taken away, so that an answer can be traced to what gave it."""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import torch
from torch import nn

from engram_graft.grafted import disable_graft, disable_lora, find_graft, memories
from engram_graft.params import adapter_names

Arm = Callable[[nn.Module], AbstractContextManager[object]]


@contextlib.contextmanager
def shuffled(model: nn.Module, seed: int = 0) -> Iterator[None]:
    """Every seen row is read as another seen row of its head: same tables, same gates, same filter, only the addresses wrong."""
    ngram_hash = find_graft(model)
    generator = torch.Generator().manual_seed(seed)
    tables = [memory.table for memory in memories(model)]
    for table, starts, sizes in zip(tables, ngram_hash.offsets.tolist(), ngram_hash.primes.tolist(), strict=True):
        rows = table.seen_rows().cpu()
        target = rows.clone()
        for start, size in zip(starts, sizes, strict=True):
            head = ((rows >= start) & (rows < start + size)).nonzero()[:, 0]
            order = head[torch.randperm(len(head), generator=generator)]
            target[order] = rows[order.roll(1)]  # one cycle: no row stays where it was
        table.redirect = (rows.to(table.weight.device), target.to(table.weight.device))
    try:
        yield
    finally:
        for table in tables:
            table.redirect = None


@contextlib.contextmanager
def gate_open(model: nn.Module) -> Iterator[None]:
    """Every look-up is let in whole: what the gate decides is taken away, not what the tables hold."""
    before = [(memory, vars(memory).get("gate")) for memory in memories(model)]  # who listens to the gate stands in front of it
    for memory, _ in before:
        vars(memory)["gate"] = lambda embeddings, hidden: hidden.new_ones(*hidden.shape[:-1], 1)
    try:
        yield
    finally:
        for memory, own in before:
            del vars(memory)["gate"]  # the class's own is found again
            if own is not None:
                vars(memory)["gate"] = own


ARMS: dict[str, Arm] = {
    "base": lambda model: disable_graft(model, lora=True),
    "graft": lambda model: contextlib.nullcontext(),
    "memory_off": disable_graft,
    "shuffled": shuffled,
    "gate_open": gate_open,
    "lora_off": disable_lora,
}


def arms_of(model: nn.Module) -> dict[str, Arm]:
    """The arms that mean something for this model: without adapters there is no `lora_off`."""
    return {name: arm for name, arm in ARMS.items() if name != "lora_off" or adapter_names(model)}
