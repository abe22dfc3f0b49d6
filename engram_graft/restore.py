"""Giving stored tensors to a model: a memory attached and filled, adapters filled. Strict: every tensor has its place."""

from collections.abc import Mapping
from pathlib import Path

import torch
from peft import get_peft_model_state_dict
from safetensors.torch import load_file
from torch import Tensor, nn

from engram_graft.adapters import find_peft
from engram_graft.compress import TokenMap
from engram_graft.config import EngramConfig
from engram_graft.errors import UserError
from engram_graft.files import ADAPTER_FILE, memory_parts
from engram_graft.grafted import memories
from engram_graft.hashing import HashPlan
from engram_graft.hooks import attach, ungraft
from engram_graft.locate import locate
from engram_graft.recall import DEFAULT
from engram_graft.sharding import reshard, sharded_as
from engram_graft.storage import Resident


def restore(
    model: nn.Module,
    config: EngramConfig,
    plan: HashPlan,
    token_map: TokenMap,
    tensors: Mapping[str, Tensor],
    trainable: bool,
    storage: Resident | None = None,
    name: str = DEFAULT,
) -> None:
    """Attach a memory to `model` and give it these tensors. Strict: every tensor is there, none is over, shapes and dtypes are equal."""
    memory = attach(locate(model), config, plan, token_map, storage or Resident(), name)
    try:
        fill(model, tensors, stored=storage is not None and storage.filled, name=name)
    except BaseException:
        ungraft(model, name)
        raise
    for part in (memory, *memories(model, name)):
        part.requires_grad_(trainable)


@torch.no_grad()
def fill(model: nn.Module, tensors: Mapping[str, Tensor], stored: bool = False, name: str | None = None) -> None:
    """Give the memory of `model` (of this name) these tensors (canonical names), its rows unless they are `stored` in its files already.

    Raises:
        UserError: a key is missing, over, or does not fit; each is named.
    """
    tables = {f"layers.{memory.layer_id}.table": memory.table for memory in memories(model, name)}
    dense = {
        f"{part}.{key}": tensor
        for part, module in memory_parts(model, name).items()
        for key, tensor in [*module.named_parameters(), *module.named_buffers()]
        if not key.startswith("table.")
    }
    own = dense.keys() | {f"{table}.{leaf}" for table in tables for leaf in ("rows", "values")}
    faults = [f"missing {key}" for key in own - tensors.keys()] + [f"unexpected {key}" for key in tensors.keys() - own]
    for key in dense.keys() & tensors.keys():
        have, want = tensors[key], dense[key]
        if have.shape != want.shape or have.dtype != want.dtype:
            faults.append(f"{key} is {have.dtype} {list(have.shape)}, not {want.dtype} {list(want.shape)}")
    if faults:
        raise UserError(f"the graft's tensors do not fit its config: {'; '.join(sorted(faults))}")
    for key, table in tables.items():
        try:
            table.load_rows(tensors[f"{key}.rows"], tensors[f"{key}.values"], stored)
        except UserError as error:
            raise UserError(f"the graft's tensors do not fit its config: {key}: {error}") from error
    for key, tensor in dense.items():
        tensor.copy_(tensors[key])


@torch.no_grad()
def fill_adapters(model: nn.Module, directory: Path) -> None:
    """Give the model's adapter the tensors in `directory`; of one that FSDP2 shards each process takes its part.

    Raises:
        UserError: a tensor is missing, over, or of another shape; a few are named.
    """
    reshard(model)
    peft = find_peft(model)
    assert peft is not None
    own = get_peft_model_state_dict(peft, adapter_name=peft.active_adapters[0], save_embedding_layers=False)
    stored = load_file(directory / ADAPTER_FILE)
    shapes, stored_shapes = ({(name, tensor.shape) for name, tensor in tensors.items()} for tensors in (own, stored))
    if odd := sorted({name for name, _ in shapes ^ stored_shapes}):
        raise UserError(f"{directory / ADAPTER_FILE}: does not fit the model's adapters: {', '.join(odd[:4])}")
    for name, tensor in own.items():
        tensor.copy_(sharded_as(tensor, stored[name]))
