"""A memory's large arrays in files, which the operating system pages in and out."""

import contextlib
import json
import math
import mmap
import os
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engram_graft.errors import UserError
from engram_graft.lock import DirectoryLock
from engram_graft.output import sync
from engram_graft.storage import Resident

PAGE = mmap.PAGESIZE
STAMP = "tables.json"  # what the files of a directory hold, once they hold all of it


class Mapped(Resident):
    """Arrays in files of a directory, mapped into memory, on the CPU. Space on the disk is taken when an array is made.

    Args:
        directory: made if need be; one run at a time may use it.
        source: what the arrays will be filled with, as a text that is equal when the contents are. Files that were filled from the
            same source before are mapped again, copy on write, and `filled` is True: they may be read-only.

    Raises:
        UserError: the directory cannot be written, or is in use, or a file is shorter than it was.
    """

    on_disk = True

    def __init__(self, directory: str | Path, source: str | None = None):
        self.directory, self.source = Path(directory), source
        self.sizes: dict[str, int] = {}  # bytes of each file by its name
        self.filled = False
        self._files: dict[str, _Handle] = {}
        if not hasattr(os, "posix_fallocate"):
            raise UserError(f"table directory {directory}: tables in files need Linux; keep them in memory here")
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"table directory {directory}: cannot be made ({error.strerror}); give another") from error
        self._lock = DirectoryLock(self.directory)
        self._lock.take(exclusive=False)
        with _explained(self.directory / STAMP):
            text = (self.directory / STAMP).read_text() if (self.directory / STAMP).is_file() else ""
        with contextlib.suppress(ValueError, TypeError, KeyError):  # no stamp, or one that is none of ours
            stamp = json.loads(text)
            if source is not None and stamp["source"] == source:
                self.sizes, self.filled = dict(stamp["sizes"]), True
        if not self.filled:
            self._lock.take(exclusive=True)
            with _explained(self.directory):
                (self.directory / STAMP).unlink(missing_ok=True)
                for path in self.directory.glob("optimizer*.bin"):  # of an earlier run
                    path.unlink()

    def empty(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        path, size = self.directory / f"{name}.bin", math.prod(shape) * dtype.itemsize
        if not self.filled:
            self._files.pop(name, None)
            with _explained(path):
                path.unlink(missing_ok=True)  # an older mapping of it stays what it was
            try:
                array = _map(path, shape, dtype, os.O_RDWR | os.O_CREAT)
            except UserError:
                for made in self.sizes:  # the others are of no use without this one
                    (self.directory / f"{made}.bin").unlink(missing_ok=True)
                raise
            self.sizes[name] = size
            return array
        if name not in self.sizes:
            raise UserError(
                f"{self.directory}: its files hold a loaded graft and are only read; to train it, load it with trainable=True"
            )
        found = path.stat().st_size if path.is_file() else 0
        if self.sizes.get(name) != size or found != size:
            raise UserError(
                f"{path}: {found:,} bytes, the table has {size:,}: truncated or of another graft; delete {self.directory} and it is "
                "filled anew"
            )
        return _map(path, shape, dtype, os.O_RDONLY)

    zeros = empty  # a new file reads as zeros

    def grown(self, name: str, array: Tensor, length: int) -> Tensor:
        if not len(array):  # a new file
            return self.empty(name, (length, *array.shape[1:]), array.dtype, array.device)
        path = self.directory / f"{name}.bin"
        self.sizes[name] = length * math.prod(array.shape[1:]) * array.dtype.itemsize
        return _map(path, (length, *array.shape[1:]), array.dtype, os.O_RDWR | os.O_CREAT)

    def prefetch(self, name: str, index: Tensor, itemsize: int) -> None:
        file = self._files.get(name)
        if file is None:
            file = self._files[name] = _Handle(os.open(self.directory / f"{name}.bin", os.O_RDONLY))
        first = index.reshape(-1) * itemsize
        pages = torch.cat([first // PAGE, (first + itemsize - 1) // PAGE]).unique()
        for page in pages.tolist():
            os.posix_fadvise(file.number, page * PAGE, PAGE, os.POSIX_FADV_WILLNEED)

    def scratch(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        with _explained(self.directory):
            handle, path = tempfile.mkstemp(prefix="scratch-", dir=self.directory)
            os.close(handle)
        try:
            return _map(Path(path), shape, dtype, os.O_RDWR)
        finally:
            os.unlink(path)  # the space is given back with the array

    def settle(self) -> None:
        """Note that the files hold their source, so that they are used again; from here on they are only read."""
        if self.source is not None and not self.filled:
            stamp = self.directory / f".{STAMP}"
            with _explained(self.directory):
                stamp.write_text(json.dumps({"source": self.source, "sizes": self.sizes}))
                for path in [*(self.directory / f"{name}.bin" for name in self.sizes), stamp]:
                    sync(path)
                stamp.replace(self.directory / STAMP)
            self.filled = True
            self._lock.take(exclusive=False)

    def twin(self) -> "Resident":
        return _Unnamed(self)


class _Unnamed(Resident):
    """Arrays in files that have no name and go when nobody uses them."""

    on_disk = True

    def __init__(self, named: Mapped):
        self.named = named

    def empty(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        return self.named.scratch(shape, dtype, device)

    zeros = empty

    def grown(self, name: str, array: Tensor, length: int) -> Tensor:
        new = self.named.scratch((length, *array.shape[1:]), array.dtype, array.device)
        new[: len(array)] = array
        return new


class _Handle:
    """A file descriptor that is closed with its owner."""

    def __init__(self, number: int):
        self.number = number
        weakref.finalize(self, os.close, number)


def _map(path: Path, shape: tuple[int, ...], dtype: torch.dtype, flags: int) -> Tensor:
    size = math.prod(shape) * dtype.itemsize
    if not size:
        return torch.empty(shape, dtype=dtype)
    writable = bool(flags & os.O_RDWR)
    with _explained(path, size):
        handle = os.open(path, flags, 0o644)
        try:
            if writable:  # all of it now: a disk that fills up later would kill the process in the middle of a store
                os.posix_fallocate(handle, 0, size)
            pages = mmap.mmap(handle, size, access=mmap.ACCESS_WRITE if writable else mmap.ACCESS_COPY)
        except OSError:
            if flags & os.O_CREAT:
                path.unlink(missing_ok=True)
            raise
        finally:
            os.close(handle)
    pages.madvise(mmap.MADV_RANDOM)  # neighbours in a table have nothing to do with each other
    return torch.frombuffer(pages, dtype=dtype).view(shape)


@contextlib.contextmanager
def _explained(path: Path, size: int = 0) -> Any:
    try:
        yield
    except OSError as error:
        free = shutil.disk_usage(path.parent).free
        need = f"; {size / 1e6:,.1f} MB are needed, {free / 1e6:,.1f} MB are free" if size else ""
        raise UserError(f"{path}: {error.strerror}{need}") from error
