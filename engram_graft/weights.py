"""The tensors of a checkpoint that somebody else wrote, read one by one from its safetensors files: what is not asked for is not read."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from engram_graft.errors import UserError
from engram_graft.shards import read_index

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
FLOATS = ("F32", "BF16", "F16")
PIECE = 2**18  # rows of a table that are read at a time


class Weights:
    """The weights in `directory`, in one file or listed by an index. Of the files listed, those that are read from have to be there.

    Raises:
        UserError: there are none, the index is corrupt, or names a file outside the directory.
    """

    def __init__(self, directory: Path):
        self.directory = directory
        self.files: dict[str, str] = {}  # of each tensor
        self._open: dict[str, Any] = {}
        if (directory / INDEX).is_file():
            self.files = read_index(directory / INDEX)
        elif (directory / SINGLE).is_file():
            self.files = dict.fromkeys(self._file(SINGLE).keys(), SINGLE)
        else:
            raise UserError(
                f"{directory}: neither {INDEX} nor {SINGLE} is here; give the directory of a checkpoint in safetensors"
            )

    def layers(self, part: str, wanted: Sequence[int]) -> list[dict[str, str]]:
        """For each layer wanted, the names of its tensors `...layers.{layer}.{part}.{leaf}` by leaf."""
        found: dict[str, dict[int, dict[str, str]]] = {}
        for name in self.files:
            if match := re.fullmatch(rf"((?:.+\.)?)layers\.(\d+)\.{part}\.(.+)", name):
                found.setdefault(match[1], {}).setdefault(int(match[2]), {})[match[3]] = name
        fitting = [layers for layers in found.values() if set(wanted) <= layers.keys()]
        if len(fitting) != 1:
            have = {f"{prefix}layers": sorted(layers) for prefix, layers in found.items()}
            raise UserError(
                f"{self.directory}: its config has a memory in front of layers {list(wanted)} (counted from 0), its tensors "
                f"'layers.N.{part}.*' are {have or 'none'}"
            )
        return [fitting[0][layer] for layer in wanted]

    def misfits(
        self, names: Mapping[str, str], shapes: Mapping[str, Sequence[int]], kinds: Mapping[str, Sequence[str]]
    ) -> list[str]:
        """What is wrong with tensors: those that are missing, and those of another shape, or of a dtype that is not among `kinds` of
        their leaf (by default `FLOATS`)."""
        faults = []
        for leaf, shape in shapes.items():
            if leaf not in names:
                faults.append(f"tensor {leaf} is missing")
                continue
            have, kind = self.shape(names[leaf]), self.kind(names[leaf])
            if have != list(shape):
                faults.append(f"{names[leaf]} is {have}, its config asks for {list(shape)}")
            if kind not in kinds.get(leaf, FLOATS):
                faults.append(f"{names[leaf]} is {kind}, this reads {' or '.join(kinds.get(leaf, FLOATS))}")
        return faults

    def shape(self, name: str) -> list[int]:
        return list(self._slice(name).get_shape())

    def rows(self, name: str) -> int:
        """Of a tensor, in its first dimension; none of a single number."""
        return next(iter(self.shape(name)), 0)

    def kind(self, name: str) -> str:
        """The dtype as the file has it: "F32", "F8_E4M3"."""
        return str(self._slice(name).get_dtype())

    def tensor(self, name: str) -> Tensor:
        return self._slice(name)[...]

    def pieces(self, name: str) -> Iterator[Tensor]:
        """The tensor's rows, `PIECE` at a time."""
        rows = self._slice(name)
        for start in range(0, rows.get_shape()[0], PIECE):
            yield rows[start : start + PIECE]

    def _slice(self, name: str) -> Any:
        try:
            return self._file(self.files[name]).get_slice(name)
        except SafetensorError as error:
            raise UserError(
                f"{self.directory / self.files[name]}: {INDEX} says that {name} is in it, it is not ({error})"
            ) from error

    def _file(self, file: str) -> Any:
        if file not in self._open:
            if not (self.directory / file).is_file():
                raise UserError(f"{self.directory / file}: missing; tensors of the memory are in it")
            try:
                self._open[file] = safe_open(self.directory / file, framework="pt")
            except (SafetensorError, OSError) as error:
                raise UserError(f"{self.directory / file}: corrupt or truncated ({error}); copy the checkpoint anew") from error
        return self._open[file]


def read_json(path: Path) -> dict[str, Any]:
    """An object in a JSON file. Raises `UserError` if it is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read ({error}); give the directory of a checkpoint") from error
    if not isinstance(found, dict):
        raise UserError(f"{path}: holds a {type(found).__name__}, not an object; copy the checkpoint anew")
    return found
