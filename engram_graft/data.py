"""Training data: facts (a prompt, its answer), chats and plain text, read from the files that people have."""

import csv
import dataclasses
import io
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from datasets import Dataset, load_dataset

from engram_graft.errors import UserError, first_line
from engram_graft.formats import TEACHER, Chat, Fact, read_record

__all__ = ["TEACHER", "Chat", "Data", "Fact", "load_data"]

_TEXT_SUFFIXES = (".txt", ".md", ".rst")
_LIST_FIELDS = ("aliases", "paraphrases")


@dataclasses.dataclass(frozen=True)
class Data:
    """What was read: facts, documents of plain text, or chats; the others are empty."""

    facts: tuple[Fact, ...] = ()
    texts: tuple[str, ...] = ()
    chats: tuple[Chat, ...] = ()

    def with_forms(self, forms: int | None) -> "Data":
        """The same data with the first `forms` prompts of each fact to train; its other prompts become held-out paraphrases.

        Teachers keep theirs.
        """
        if forms is None:
            return self
        facts = (
            f
            if f.split == TEACHER
            else dataclasses.replace(f, prompts=f.prompts[:forms], paraphrases=(*f.prompts[forms:], *f.paraphrases))
            for f in self.facts
        )
        return dataclasses.replace(self, facts=tuple(facts))


def load_data(source: str) -> Data:
    """Read facts, chats or text from a JSONL, JSON, CSV or parquet file, a text file or folder, or a Hugging Face dataset id.

    Records may be of any shape in `engram_graft.formats.FORMATS`; a file holds one kind of content.

    Raises:
        UserError: nothing there, nothing in it, or a record that cannot be used; with file and line.
    """
    path = Path(source)
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.suffix.lower() in _TEXT_SUFFIXES and p.is_file())
        if not files:
            raise UserError(f"{source}: no {', '.join(_TEXT_SUFFIXES)} files in this folder")
        return _texts(source, (_read(p) for p in files))
    if path.is_file():
        if path.suffix.lower() in _TEXT_SUFFIXES:
            return _texts(source, [_read(path)])
        readers = {".jsonl": _jsonl, ".json": _json, ".csv": _csv, ".parquet": _parquet}
        if path.suffix.lower() not in readers:
            raise UserError(
                f"{source}: cannot read {path.suffix or 'a file without ending'}; use .jsonl, .json, .csv, .parquet or .txt"
            )
        return _records(source, readers[path.suffix.lower()](path))
    if path.suffix or source.count("/") != 1:
        raise UserError(f"{source}: no such file or folder (a hub dataset id has the form owner/name)")
    try:
        dataset = load_dataset(source, split="train")
    except Exception as error:  # the hub's errors have no common class
        raise UserError(
            f"{source}: no such file or folder, and the hub did not give a dataset of this name ({first_line(error)})"
        ) from error
    return _records(source, ((f"row {n}", row) for n, row in enumerate(dataset, 1)))


def _read(path: Path) -> str:
    try:
        text = path.read_bytes().decode("utf-8-sig")  # Excel opens its files with a byte order mark
        return text.replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text (byte {error.start})") from error


def _jsonl(path: Path) -> Iterable[tuple[str, Any]]:
    for number, line in enumerate(_read(path).split("\n"), 1):
        if line.strip():
            try:
                yield f"line {number}", json.loads(line)
            except json.JSONDecodeError as error:
                raise UserError(f"{path}, line {number}: not JSON ({error.msg}, column {error.colno})") from error


def _json(path: Path) -> Iterable[tuple[str, Any]]:
    try:
        records = json.loads(_read(path))
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":  # more than one value: lines of JSON under this ending, as TOFU's files are
            return _jsonl(path)
        raise UserError(f"{path}, line {error.lineno}: not JSON ({error.msg}, column {error.colno})") from error
    if isinstance(records, dict):
        records = [records]  # a file of JSON lines that has one
    if not isinstance(records, list):
        raise UserError(f"{path}: must be a JSON array of records, found {type(records).__name__}")
    return ((f"record {number}", record) for number, record in enumerate(records, 1))


def _csv(path: Path) -> Iterable[tuple[str, Any]]:
    csv.field_size_limit(2**31 - 1)  # a document may be a cell
    reader = csv.DictReader(io.StringIO(_read(path), newline=""))
    for row in reader:
        if None in row:
            raise UserError(f"{path}, line {reader.line_num}: more cells than the header has; quote a cell that holds a comma")
        record: dict[str, Any] = {key: value for key, value in row.items() if key and value}
        for field in ("prompt", *_LIST_FIELDS):
            if field in record:
                record[field] = [part.strip() for part in record[field].split("|") if part.strip()]
        yield f"line {reader.line_num}", record


def _parquet(path: Path) -> Iterable[tuple[str, Any]]:
    try:
        dataset = Dataset.from_parquet(str(path))
    except Exception as error:  # pyarrow's and datasets' errors have no common class
        raise UserError(f"{path}: not a parquet file ({first_line(error)})") from error
    return ((f"row {number}", row) for number, row in enumerate(dataset, 1))


def _texts(source: str, documents: Iterable[str]) -> Data:
    texts = tuple(text for text in documents if text.strip())
    if not texts:
        raise UserError(f"{source}: empty")
    return Data(texts=texts)


def _records(source: str, records: Iterable[tuple[str, Any]]) -> Data:
    facts: list[Fact] = []
    texts: list[str] = []
    chats: list[Chat] = []
    for where, record in records:
        where = f"{source}, {where}"
        if not isinstance(record, dict):
            raise UserError(f"{where}: must be an object, found {type(record).__name__}")
        try:
            json.dumps(record, ensure_ascii=False, default=str).encode()
        except UnicodeEncodeError as error:
            raise UserError(f"{where}: holds half of a character ({error.object[error.start]!r}), which is no text") from error
        content = read_record(where, record)
        if isinstance(content, Fact):
            facts.append(content if content.id else dataclasses.replace(content, id=f"fact-{len(facts) + 1}"))
        elif isinstance(content, str):
            texts.append(content)
        elif content is not None:
            chats.append(content)
        kinds = [kind for kind, found in (("facts", facts), ("documents", texts), ("chats", chats)) if found]
        if len(kinds) > 1:
            raise UserError(f"{where}: {' and '.join(kinds)} in one file; keep them in two")
    if facts or chats:
        return Data(facts=tuple(facts), chats=tuple(chats))
    return _texts(source, texts)
