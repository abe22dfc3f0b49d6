"""Several processes, one memory: the gradients of rows are exchanged as rows, so that tables stay sparse everywhere.

Under FSDP2 the memory stays whole on each process, for a row that only some look up cannot lie with another; `fully_shard` has to be
told so (`ignored_params=set(memory_parameters(model))`), and then leaves its gradients to `exchange_gradients`.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from engram_graft.errors import UserError
from engram_graft.grafted import memories
from engram_graft.sharding import sharded
from engram_graft.table import EngramTable


def memory_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that are whole on each process: what `fully_shard` has to ignore.

    Raises:
        UserError: they are sharded already.
    """
    parameters = [parameter for memory in memories(model) for parameter in memory.parameters()]
    if any(sharded(parameter) for parameter in parameters):
        raise UserError(
            "FSDP shards the memory, whose rows have to be whole on each process: give every fully_shard "
            "ignored_params=set(engram_graft.exchange.memory_parameters(model)); torch 2.7 or newer can"
        )
    return parameters


def exchange_gradients(model: nn.Module) -> None:
    """Replace every gradient that FSDP2 does not reduce itself by its mean over all processes: after the backward pass of a step,
    before clipping."""
    memory_parameters(model)
    tables = [memory.table for memory in memories(model)]
    exchange_rows(tables)
    rows = {id(table.weight) for table in tables}
    for parameter in model.parameters():
        if parameter.requires_grad and id(parameter) not in rows and not sharded(parameter):
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.contiguous()
            dist.all_reduce(gradient)
            parameter.grad = gradient.div_(dist.get_world_size())


def exchange_rows(tables: Sequence[EngramTable]) -> None:
    """Replace each table's gradient by its mean over all processes; rows that only others looked up count as looked up here too.

    Every process adds the same numbers in the same order, so tables that were equal stay equal bit for bit.
    """
    for table in tables:
        weight = table.weight
        own_rows, own_values = weight.new_zeros(0, dtype=torch.int64), weight.new_zeros(0, weight.shape[1])
        if weight.grad is not None:
            gradient = weight.grad.coalesce()
            own_rows, own_values = gradient.indices()[0], gradient.values()
        rows = torch.cat(_gather(own_rows))
        values = torch.cat(_gather(own_values.float())) / dist.get_world_size()
        table.touch(rows)
        total = torch.sparse_coo_tensor(rows[None], values, weight.shape, check_invariants=False).coalesce()
        weight.grad = torch.sparse_coo_tensor(
            total.indices(), total.values().to(weight.dtype), weight.shape, is_coalesced=True, check_invariants=False
        )


def _gather(own: Tensor) -> list[Tensor]:
    """The tensors of all processes, in the order of their ranks; they may differ in length."""
    home = own.device
    own = own.cuda() if dist.get_backend() == "nccl" else own  # tables in files are on the CPU, NCCL speaks between GPUs
    lengths = [torch.zeros(1, dtype=torch.int64, device=own.device) for _ in range(dist.get_world_size())]
    dist.all_gather(lengths, torch.tensor([len(own)], device=own.device))
    longest = max(int(length) for length in lengths)
    padded = own.new_zeros(longest, *own.shape[1:])
    padded[: len(own)] = own
    received = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(received, padded)
    return [tensor[: int(length)].to(home) for tensor, length in zip(received, lengths, strict=True)]
