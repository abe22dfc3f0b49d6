"""The integers of a memory's addresses as files have them: read back, never drawn again, and checked before a table is made by them."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from engram_graft.config import EngramConfig
from engram_graft.errors import UserError
from engram_graft.hashing import HashPlan

_INTEGERS = ("lookup", "multipliers", "primes", "offsets", "pad")


def stored_plan(directory: Path, config: EngramConfig, tensors: Mapping[str, Tensor]) -> HashPlan:
    """The integers among `tensors` (canonical names).

    Raises:
        UserError: one is missing, no int64, of another shape than `config` says, or leads to rows that no table has.
    """
    missing = [f"hash.{name}" for name in _INTEGERS if f"hash.{name}" not in tensors]
    if missing:
        raise UserError(
            f"{directory}: the graft lacks {', '.join(missing)}, without which its rows cannot be found; copy the graft anew"
        )
    found = {name: tensors[f"hash.{name}"] for name in _INTEGERS}
    layers = len(config.layer_ids)
    shapes: dict[str, tuple[int, ...]] = {
        "lookup": (found["lookup"].numel(),),
        "multipliers": (layers, config.max_ngram_size),
        "primes": (layers, config.heads),
        "offsets": (layers, config.heads),
        "pad": (),
    }
    for name, shape in shapes.items():
        if tuple(found[name].shape) != shape or found[name].dtype != torch.int64:
            raise UserError(
                f"{directory}: hash.{name} has shape {list(found[name].shape)} of {found[name].dtype}, the config asks for "
                f"{list(shape)} of torch.int64; copy the graft anew"
            )
    arrays = {name: tensor.numpy() for name, tensor in found.items()}
    for name, array in arrays.items():
        least, lowest = 1 if name in ("multipliers", "primes") else 0, int(array.min(initial=2**62))
        if lowest < least:
            raise UserError(f"{directory}: hash.{name} goes down to {lowest}, it starts at {least}; copy the graft anew")
    pad = int(arrays.pop("pad"))
    plan = HashPlan(**arrays, pad=pad, resets=config.resets)
    for layer, total in enumerate(plan.primes.astype(object).sum(1)):  # exact: in int64 large ones would wrap around
        ends = plan.offsets[layer].astype(object) + plan.primes[layer].astype(object)
        if total >= np.iinfo(np.int64).max or max(ends) > total:
            raise UserError(
                f"{directory}: hash.offsets and hash.primes of layer {config.layer_ids[layer]} end at row {max(ends)}, its table has "
                f"{total}; copy the graft anew"
            )
    if plan.pad > (largest := int(plan.lookup.max(initial=0))):
        raise UserError(f"{directory}: hash.pad is {plan.pad}, hash.lookup goes up to {largest}; copy the graft anew")
    return plan
