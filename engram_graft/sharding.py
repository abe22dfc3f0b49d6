"""A base that FSDP2 shards between processes, its parameters DTensors; the memory beside it stays whole on each process."""

import torch.distributed as dist
from torch import Tensor, nn


def is_sharded(model: nn.Module) -> bool:
    """Whether FSDP2 shards parts of the model. Its modules say so, not its parameters: between two passes some of those are whole."""
    if not dist.is_available():
        return False
    from torch.distributed.fsdp import FSDPModule

    return any(isinstance(module, FSDPModule) for module in model.modules())


def reshard(model: nn.Module) -> None:
    """Put the shards back in place of parameters that a forward pass left whole: what is written to those would be lost."""
    for module in model.modules():
        if callable(again := getattr(module, "reshard", None)):
            again()


def sharded(tensor: Tensor) -> bool:
    """Whether this process has only a part of it."""
    return hasattr(tensor, "full_tensor")


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor. Of a sharded one every process has to ask."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def sharded_as(like: Tensor, tensor: Tensor) -> Tensor:
    """The `tensor`, which every process has whole, sharded as `like` is."""
    if not sharded(like) or sharded(tensor):
        return tensor
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(like, DTensor)
    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
