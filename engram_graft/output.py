"""Writing results so that a reader sees all of them or none."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from engram_graft.errors import UserError


@contextlib.contextmanager
def new_directory(path: str | Path) -> Iterator[Path]:
    """A directory for a run's results. If the run fails it is removed again, unless it holds a checkpoint to resume from.

    Raises:
        UserError: it exists and is not empty, or cannot be made.
    """
    directory = Path(path)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise UserError(f"output {path}: exists and is not empty; choose another directory or remove this one")
    existed = directory.exists()
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"output {path}: cannot be made ({error.strerror})") from error
    try:
        yield directory
    except BaseException:
        if not any(directory.glob("checkpoint-*")):
            shutil.rmtree(directory)
            if existed:
                directory.mkdir()
        raise


@contextlib.contextmanager
def all_or_nothing(directory: str | Path) -> Iterator[Path]:
    """A scratch directory whose files move into `directory` when the block ends, and vanish if it fails."""
    target = Path(directory)
    try:
        target.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=".writing-", dir=target))
    except OSError as error:
        raise UserError(f"output {directory}: cannot be written ({error.strerror})") from error
    try:
        yield scratch
        for path in sorted(scratch.iterdir()):
            if path.is_dir():
                shutil.rmtree(target / path.name, ignore_errors=True)
            os.replace(path, target / path.name)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
