"""Writing results so that a failure leaves no half of them: whole files, moved into place at the end."""

import contextlib
import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError

from engram_graft.errors import UserError, first_line

_UMASK = os.umask(0)  # it can only be read by setting it
os.umask(_UMASK)


def require_free(path: str | Path) -> None:
    """Raise `UserError` if `path` exists and is anything but an empty directory."""
    target = Path(path)
    try:
        taken = target.exists() and (not target.is_dir() or any(target.iterdir()))
    except (OSError, ValueError) as error:  # too long, a NUL, no right to look
        raise UserError(
            f"output {str(path)[:80]!r}: cannot be a directory ({getattr(error, 'strerror', None) or error})"
        ) from error
    if taken:
        raise UserError(f"output {path}: exists and is not empty; choose another directory or remove this one")


@contextlib.contextmanager
def new_directory(path: str | Path) -> Iterator[Path]:
    """A directory for a run's results. If the run fails it is as before, unless it holds a checkpoint to resume from.

    Raises:
        UserError: it exists and is not empty, or cannot be made; the disk is full.
    """
    directory = Path(path)
    require_free(directory)
    made = _make(directory)
    try:
        yield directory
        _readable(directory)
    except BaseException as error:
        if not any(directory.glob("checkpoint-*")):
            for child in directory.iterdir():
                shutil.rmtree(child) if child.is_dir() and not child.is_symlink() else child.unlink()
            _unmake(made)
        # each library has an error of its own for a full disk
        if not isinstance(error, UserError) and os.strerror(errno.ENOSPC) in str(error):
            raise UserError(f"output {path}: cannot be written ({os.strerror(errno.ENOSPC)})") from error
        raise


@contextlib.contextmanager
def all_or_nothing(directory: str | Path) -> Iterator[Path]:
    """A scratch directory whose files move into `directory` when the block ends, and vanish if it fails."""
    target = Path(directory)
    made = _make(target)
    try:
        scratch = Path(tempfile.mkdtemp(prefix=".writing-", dir=target))
    except OSError as error:
        raise UserError(f"output {directory}: cannot be written ({error.strerror})") from error
    try:
        try:
            yield scratch
        except (OSError, SafetensorError) as error:
            raise UserError(f"output {directory}: cannot be written ({first_line(error)})") from error
        _readable(scratch)
        for path in scratch.rglob("*"):
            sync(path)
        for path in sorted(scratch.iterdir()):
            if path.is_dir():
                shutil.rmtree(target / path.name, ignore_errors=True)
            os.replace(path, target / path.name)
        sync(target)
        made = []
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        _unmake(made)


def _readable(directory: Path) -> None:
    """Give files the rights that new files have: safetensors writes for their owner alone."""
    for path in directory.glob("*.safetensors"):
        path.chmod(0o666 & ~_UMASK)


def sync(path: Path) -> None:
    """Have a file, or the names in a directory, reach the disk: a rename can get there before what it renames."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _make(directory: Path) -> list[Path]:
    """Make a directory; returns what was not there before, innermost first."""
    try:
        missing = [path for path in (directory, *directory.parents) if not path.exists()]
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"output {directory}: cannot be made ({error.strerror})") from error
    return missing


def _unmake(made: list[Path]) -> None:
    for path in made:
        if any(path.iterdir()):
            break
        path.rmdir()
