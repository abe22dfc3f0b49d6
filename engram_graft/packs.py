"""Memory packs: several grafts side by side on one base, by name; switched for a call, and taken off without a trace.

What the memories of a layer recall is added up, and so is what their LoRA adapters, which have the packs' names, change.
"""

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from torch import nn

from engram_graft.adapters import adapter_configs, only_adapters, remove_adapter, require_switchable
from engram_graft.errors import UserError
from engram_graft.grafted import find_graft, only_memories, require_grafts
from engram_graft.hooks import ungraft
from engram_graft.recall import DEFAULT

PACK_NAME = r"[A-Za-z0-9_-]+"
Directories = str | Path | Sequence[str | Path] | Mapping[str, str | Path]


@contextlib.contextmanager
def use_packs(model: nn.Module, names: Sequence[str]) -> Iterator[nn.Module]:
    """Run `model` with these packs alone inside the `with`: their memories and their adapters, on even where they were switched off.

    With none, `[]`, it is the base, bit for bit. The switch is the model's, not the thread's. A cache that was filled with other packs
    is refused.

    Raises:
        UserError: there is no pack of a name, or an adapter has changed the base's own weights (merged, or of PiSSA's kind).
    """
    memories = require_grafts(model)
    wanted = sorted({names} if isinstance(names, str) else set(names))
    for name in wanted:
        find_graft(model, name)
    require_switchable(model)
    with only_memories(memories, wanted), only_adapters(model, [name for name in wanted if name in adapter_configs(model)]):
        yield model


def remove_pack(model: nn.Module, name: str) -> nn.Module:
    """Take a pack off, its adapter too, and free what it held. Without any pack left the base is as it was before the first.

    Returns:
        The same model; the bare base when the last adapter went.

    Raises:
        UserError: there is no pack of this name, or an adapter has changed the base's own weights (merged, or of PiSSA's kind).
    """
    find_graft(model, name)
    require_switchable(model)
    ungraft(model, name)
    return remove_adapter(model, name) if name in adapter_configs(model) else model


def name_packs(directory: Directories, name: str = DEFAULT) -> dict[str, Path]:
    """The directories to load, by the names of their memories: one, several named after their directories, or named in a dict."""
    if isinstance(directory, str | Path):
        packs = {name: Path(directory)}
    elif name != DEFAULT:
        raise UserError(f"name={name!r} is of one directory: to name several, pass a dict, {{{name!r}: directory, ...}}")
    elif isinstance(directory, Mapping):
        packs = {given: Path(path) for given, path in directory.items()}
    else:
        packs = {}
        for path in map(Path, directory):
            if (own := path.absolute().name) in packs:
                raise UserError(
                    f"{packs[own]} and {path} are both named {own!r}: name them in a dict, {{{own!r}: {str(packs[own])!r}, "
                    f"'another': {str(path)!r}}}"
                )
            packs[own] = path
    if not packs:
        raise UserError("no directory to load: give one, a list or a dict of them")
    for given in packs:
        if not re.fullmatch(PACK_NAME, given):
            raise UserError(
                f"pack name {given!r}: letters, digits, _ and - only; give another as a dict's key, {{'name': directory}}"
            )
    return packs
