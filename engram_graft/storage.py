"""Where a memory's large arrays live: here in memory; in files, `mapped.Mapped`.

Either way an array is reserved at its full size and costs the pages that are touched. Which of the two holds a table changes no bit
of any result: the code that reads and writes it is the same.
"""

import math
import mmap

import torch
from torch import Tensor

from engram_graft.errors import UserError


class Resident:
    """Arrays in memory, on any device."""

    on_disk = filled = False

    def empty(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """An array of arbitrary contents. Raises `UserError` when there is not enough memory."""
        try:
            return torch.empty(shape, dtype=dtype, device=device)
        except RuntimeError as error:
            size = math.prod(shape) * dtype.itemsize / 1e9
            raise UserError(
                f"{name}: {size:.1f} GB do not fit in the memory of {device}; choose a smaller engram_vocab_size, or keep tables "
                "in files: --table-tier mmap --table-dir DIR"
            ) from error

    def zeros(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """An array of zeros. On the CPU it costs no memory where it stays zero."""
        size = math.prod(shape) * dtype.itemsize
        if device.type != "cpu" or not size:
            return torch.zeros(shape, dtype=dtype, device=device)
        try:
            pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise UserError(f"{name}: {size / 1e9:.1f} GB do not fit in memory ({error.strerror})") from error
        return torch.frombuffer(pages, dtype=dtype).view(shape)

    def grown(self, name: str, array: Tensor, length: int) -> Tensor:
        """The array, made at least `length` long; what is new is zero."""
        new = array.new_zeros(length, *array.shape[1:])
        new[: len(array)] = array
        return new

    def scratch(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """An array for passing use."""
        return torch.empty(shape, dtype=dtype, device=device)

    def prefetch(self, name: str, index: Tensor, itemsize: int) -> None:
        """Ask for the items `index` of an array, each `itemsize` bytes, to be read; does not wait."""

    def settle(self) -> None:
        """Called once the arrays hold all that they were made for."""

    def twin(self) -> "Resident":
        """Where a copy of an array lives."""
        return self
