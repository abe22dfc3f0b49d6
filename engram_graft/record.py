"""A record of a data file, whose fields are read by name and checked as they are read."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from engram_graft.errors import UserError


@dataclasses.dataclass(frozen=True)
class Record:
    """Fields by name; one that is in another has a dotted name. Every error is a `UserError` that says where the record is.

    Args:
        where: file and line, for messages.
    """

    where: str
    fields: Mapping[str, Any]

    def get(self, name: str) -> Any:
        """The value of a field; None where it, or what it is in, is missing."""
        if name in self.fields:
            return self.fields[name]
        value: Any = self.fields
        for part in name.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value

    def wrong(self, message: str) -> UserError:
        """The error for this record."""
        return UserError(f"{self.where}: {message}")

    def text(self, name: str) -> str:
        """A text that must be there."""
        value = self.get(name)
        if not isinstance(value, str) or not value.strip():
            found = "missing" if value is None else repr(value)
            raise self.wrong(f"{name} is {found}; every record of this shape needs one text there")
        return value

    def optional(self, name: str) -> str | None:
        """A text without space around it; None where it is missing or empty."""
        return None if self.get(name) in (None, "") else self.text(name).strip()

    def texts(self, name: str, one: bool = False) -> tuple[str, ...]:
        """A list of texts, or with `one` a text alone; empty where it is missing."""
        value = self.get(name) or []
        values = [value] if one and isinstance(value, str) else value
        if not isinstance(values, list) or not all(isinstance(v, str) and v.strip() for v in values):
            raise self.wrong(f"{name} must be {'a text or ' if one else ''}a list of texts, none empty; found {value!r:.60}")
        return tuple(values)

    def prompts(self, name: str = "prompt") -> tuple[str, ...]:
        """One or more texts that must be there."""
        if not (prompts := self.texts(name, one=True)):
            raise self.wrong(f"{name} must be a text or a list of texts, none empty")
        return prompts

    def first(self, name: str) -> str | None:
        """The first text of a text, or of lists of texts in lists (the spellings of one answer); None where there is none."""
        value = self.get(name)
        leaves = _leaves(value)
        if not all(isinstance(leaf, str) for leaf in leaves):
            raise self.wrong(f"{name} is {value!r}; must be a text or a list of texts")
        return next((leaf.strip() for leaf in leaves if leaf.strip()), None)

    def objects(self, name: str) -> "list[Record]":
        """A list of objects, or one object, or one whose every field is a list, as columns keep it; empty where it is missing."""
        value = self.get(name) or []
        if isinstance(value, Mapping):
            columns = list(value.values())
            if not all(isinstance(column, list) for column in columns):
                value = [value]
            elif len(set(map(len, columns))) == 1:
                value = [dict(zip(value, row, strict=True)) for row in zip(*columns, strict=True)]
        if not isinstance(value, list) or not all(isinstance(entry, Mapping) for entry in value):
            raise self.wrong(f"{name} must be a list of objects; found {value!r:.60}")
        return [Record(f"{self.where}, {name} {number}", entry) for number, entry in enumerate(value, 1)]


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, list):
        return [leaf for part in value for leaf in _leaves(part)]
    return [] if value is None else [value]
