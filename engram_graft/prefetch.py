"""Reading the rows of the next batch while this one is trained: a data collator that asks for them as it makes the batch."""

from typing import Any

import torch
from torch import Tensor, nn

from engram_graft.grafted import find_graft, memories
from engram_graft.hashing import HashPlan
from engram_graft.optim import EngramAdamW
from engram_graft.read_ahead import in_background


class Prefetching:
    """A data collator that starts reading the rows of its batch, one batch before the batch is trained."""

    def __init__(self, collate: Any, trainer: Any):
        self.collate, self.trainer = collate, trainer
        self.plan = find_graft(trainer._model).plan

    def __call__(self, examples: Any) -> Any:
        batch = self.collate(examples)
        optimizer: Any = getattr(self.trainer.optimizer, "optimizer", self.trainer.optimizer)  # accelerate wraps it
        read_rows_ahead(self.trainer._model, self.plan, batch["input_ids"], optimizer)
        return batch

    def __reduce__(self) -> tuple[Any, ...]:
        return _unchanged, (self.collate,)  # a worker of a data loader has no model to read for


def _unchanged(collate: Any) -> Any:
    return collate


def read_rows_ahead(model: nn.Module, plan: HashPlan, input_ids: Tensor, optimizer: EngramAdamW | None) -> None:
    """Ask for the rows of a batch `[B, T]` that is yet to come, and, while training, for their state."""
    rows = torch.from_numpy(plan.rows(input_ids.cpu().numpy()))  # (B, T, L, heads)
    for memory in memories(model):
        of_layer = rows[:, :, memory.index].reshape(-1)
        memory.table.prefetch(of_layer)
        if optimizer is not None and memory.table.training and memory.table.storage.on_disk:
            in_background(optimizer.prefetch, memory.table.weight, of_layer)
