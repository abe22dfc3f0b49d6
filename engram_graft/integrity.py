"""What a directory says of its own files, checked before any of them is used."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from engram_graft.errors import UserError
from engram_graft.shards import check_index, require_inside

CONFIG_FILE, CODE_FILE = "engram_config.json", "modeling_engram.py"
READ_OF_MERGED = ("config.json", "model*.safetensors", "*.index.json", CODE_FILE, "adapter_model.*", "adapter_config.json")


def file_hash(path: Path) -> str:
    """sha256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_description(directory: Path, described: Mapping[str, Any]) -> None:
    """Write `engram_config.json`, with the sha256 of its own contents."""
    text = json.dumps({**described, "sha256": _digest(described)}, indent=1)
    (directory / CONFIG_FILE).write_text(text + "\n", encoding="utf-8")


def read_description(directory: Path) -> dict[str, Any]:
    """The contents of `engram_config.json`, as they were written.

    Raises:
        UserError: it is missing, no JSON, or other than it was written.
    """
    path = directory / CONFIG_FILE
    if not path.is_file():
        raise UserError(
            f"{directory}: no graft here ({CONFIG_FILE} is missing); give a directory that train, save_graft or export wrote"
        )
    try:
        described = json.loads(path.read_text(encoding="utf-8"))
        written = described.pop("sha256", None)
    except (ValueError, AttributeError, TypeError, RecursionError) as error:
        raise UserError(f"{path}: corrupt ({type(error).__name__}: {error}); copy the graft anew") from error
    if written != _digest(described):
        raise UserError(f"{path}: corrupt or edited (its sha256 is not the one it names); copy the graft anew")
    return dict(described)


def check_files(directory: Path, files: Mapping[str, str]) -> None:
    """Raise `UserError` unless each file lies in the directory and has the sha256 that `files` gives for it."""
    for name, expected in files.items():
        require_inside(directory, name, CONFIG_FILE)
        if not (directory / name).is_file():
            raise UserError(f"{directory / name}: missing; {CONFIG_FILE} lists it")
        if file_hash(directory / name) != expected:
            raise UserError(f"{directory / name}: corrupt (its sha256 is not the one in {CONFIG_FILE}); copy the graft anew")
    check_index(directory)


def check_listed(directory: Path, files: Mapping[str, str], kinds: Sequence[str]) -> None:
    """Raise `UserError` if a file of one of these kinds, which opening the directory would read, is not among `files`."""
    there = {path.name for kind in kinds for path in directory.glob(kind)}
    if unlisted := sorted(there - files.keys()):
        raise UserError(
            f"{directory / unlisted[0]}: {CONFIG_FILE} does not list it, so it is not of this graft; remove it, or copy the graft anew"
        )


def _digest(described: Mapping[str, Any]) -> str:
    """Of all but the base's name: where it lies may be corrected by hand, and its fingerprint tells whether it is the one."""
    base = described.get("base")
    if isinstance(base, Mapping):
        described = {**described, "base": {key: value for key, value in base.items() if key != "name"}}
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode("utf-8", "surrogatepass")).hexdigest()
