"""Running a model for its answers: a mode for the duration of a block, gradients off."""

import contextlib
from collections.abc import Iterator

import torch
from torch import nn


@contextlib.contextmanager
def no_learning(model: nn.Module, training: bool = False) -> Iterator[None]:
    """Without gradients, in eval mode (or in train mode, for checks); afterwards each module's own mode is as before."""
    before = {module: module.training for module in model.modules()}
    model.train(training)
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in before.items():
            module.training = mode
