"""A checkpoint's training state, in safetensors and JSON, never a pickle; and directories that are there whole or not at all.

A checkpoint is written beside and renamed, so that a run that is killed at any moment leaves complete ones only.
"""

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers.trainer_utils import get_last_checkpoint

from engram_graft.errors import UserError, first_line
from engram_graft.integrity import file_hash
from engram_graft.output import sync
from engram_graft.sharding import whole

OPTIMIZER_FILE, RUN_FILE = "optimizer.safetensors", "run.json"
SCHEDULER_FILE, SCALER_FILE = "scheduler.json", "scaler.json"
_ADVICE = "remove this checkpoint and resume again"


def save_optimizer(optimizer: torch.optim.Optimizer, path: Path, lead: bool = True) -> None:
    """Write an optimizer's state: tensors by "parameter.name", the parameter groups as JSON in the header.

    Args:
        lead: whether this process writes. State of sharded parameters is gathered: then every process has to call this.
    """
    packed = optimizer.state_dict()
    tensors = {
        f"{index}.{key}": whole(value).contiguous() for index, entry in packed["state"].items() for key, value in entry.items()
    }
    if lead:
        try:
            save_file(tensors, path, metadata={"param_groups": json.dumps(packed["param_groups"])})
        except (OSError, SafetensorError) as error:
            raise UserError(f"{path}: cannot be written ({first_line(error)})") from error


def load_optimizer(optimizer: torch.optim.Optimizer, path: Path) -> None:
    """Give `optimizer` the state in a file that `save_optimizer` wrote. Raises `UserError` if it is missing or does not fit."""
    state: dict[int, dict[str, Any]] = {}
    try:
        with safe_open(path, framework="pt") as file:
            groups = json.loads(file.metadata()["param_groups"])
            for name in file.keys():  # noqa: SIM118 (a safetensors file is no dict)
                index, _, key = name.partition(".")
                state.setdefault(int(index), {})[key] = file.get_tensor(name)
        for group in groups:
            group["betas"] = tuple(group["betas"])
        optimizer.load_state_dict({"state": state, "param_groups": groups})
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: cannot be resumed from ({first_line(error)}); {_ADVICE}") from error


def save_numbers(state: Any, path: Path) -> None:
    """Write the state of what has a `state_dict` of plain numbers: a schedule, a gradient scaler."""
    try:
        path.write_text(json.dumps(state.state_dict()) + "\n", encoding="utf-8")
    except (OSError, TypeError, ValueError) as error:
        raise UserError(f"{path}: cannot be written ({first_line(error)})") from error


def load_numbers(state: Any, path: Path) -> None:
    """Give `state` what `save_numbers` wrote. Raises `UserError` if it is missing or does not fit."""
    try:
        state.load_state_dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: cannot be resumed from ({first_line(error)}); {_ADVICE}") from error


@contextlib.contextmanager
def written_beside(target: Path, barrier: Callable[[], None], lead: bool) -> Iterator[Path]:
    """A directory beside `target` to write one of its name in; renamed to `target` when the block ends, removed if it fails.

    Args:
        barrier: waits for all processes, each of which writes.
        lead: whether this process renames.
    """
    scratch = target.with_name(f".writing-{target.name}")
    if lead:
        shutil.rmtree(scratch, ignore_errors=True)
    barrier()
    try:
        yield scratch
        barrier()
        if lead:
            for path in [*scratch.rglob("*"), scratch]:
                sync(path)
            shutil.rmtree(target, ignore_errors=True)
            (scratch / target.name).rename(target)
            sync(target.parent)
        barrier()
    finally:
        if lead:
            shutil.rmtree(scratch, ignore_errors=True)


def last_checkpoint(directory: Path, clean: bool) -> Path | None:
    """The newest checkpoint of a run. With `clean` what a killed run left half-written is removed: one process of a run does that."""
    if not directory.is_dir():
        return None
    for path in directory.glob(".writing-*") if clean else ():
        shutil.rmtree(path, ignore_errors=True)
    found = get_last_checkpoint(str(directory))
    return None if found is None else Path(found)


def seal(checkpoint: Path, run: Mapping[str, Any]) -> None:
    """Note in a checkpoint what run it is of, and what its files are."""
    files = {path.name: file_hash(path) for path in sorted(checkpoint.iterdir()) if path.is_file()}
    (checkpoint / RUN_FILE).write_text(json.dumps({"run": run, "files": files}, indent=1) + "\n", encoding="utf-8")


def require_same_run(checkpoint: Path, run: Mapping[str, Any]) -> None:
    """Raise `UserError` unless a checkpoint is whole and of this run: to go on from any other would be neither run."""
    advice = "remove this checkpoint and resume again from the one before"
    try:
        sealed = json.loads((checkpoint / RUN_FILE).read_text(encoding="utf-8"))
        files, began = dict(sealed["files"]), dict(sealed["run"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{checkpoint / RUN_FILE}: missing or corrupt ({first_line(error)}); {advice}") from error
    for name, expected in files.items():
        if not (checkpoint / name).is_file() or file_hash(checkpoint / name) != expected:
            raise UserError(f"{checkpoint / name}: missing or corrupt; {advice}")
    now = json.loads(json.dumps(run))
    for name in sorted(began.keys() | now.keys()):
        if began.get(name) != now.get(name):
            raise UserError(
                f"{checkpoint}: the run began with {name}={began.get(name)!r}, this one has {now.get(name)!r}; resume it as it began"
            )
