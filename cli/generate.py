"""`engram-graft generate`: grafts and their base side by side on a prompt, as they speak."""

import contextlib
import functools
import json as json_format
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from engram_graft.cli.common import Device, Json, RecordedDtype, TableDir, TableTier, emit, examples, open_graft, quiet
from engram_graft.errors import UserError

HELP_END = examples(
    'engram-graft generate runs/demo --prompt "The capital of Velmora is"',
    'engram-graft generate runs/demo --prompt "…" --json',
    'engram-graft generate runs/facts style=runs/other/out --prompt "…"',
)


def command(
    directory: Annotated[
        list[str],
        typer.Argument(help="A graft or merged directory; several, as DIR or NAME=DIR, are loaded side by side on one base."),
    ],
    prompt: Annotated[list[str], typer.Option(help="Text to continue; may be given several times.")],
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to add at most.")] = 24,
    stream: Annotated[
        bool | None,
        typer.Option("--stream/--no-stream", help="Show tokens as they are made.", show_default="on a terminal"),
    ] = None,
    dtype: RecordedDtype = None,
    table_tier: TableTier = None,
    table_dir: TableDir = None,
    device: Device = None,
    json: Json = False,
) -> None:
    """Continue a prompt greedily with the graft and with the bare base; of several grafts with each, with all together, and with none."""
    from engram_graft.grafted import disable_graft
    from engram_graft.packs import use_packs
    from engram_graft.scoring import greedy

    if any(not text.strip() for text in prompt):
        raise UserError("--prompt is empty: give a text to continue")
    if max_new_tokens < 1:
        raise UserError(f"--max-new-tokens {max_new_tokens}: must be 1 or more")
    if json and stream:
        raise UserError("--stream shows tokens as they are made, --json prints the result and nothing else: give one of them")
    packs = _named(directory) if len(directory) > 1 else {}
    quiet()
    model, tokenizer = open_graft(packs or directory[0], device, dtype, table_tier, table_dir)

    speakers: dict[str, Callable[[], Any]] = {name: functools.partial(use_packs, model, [name]) for name in packs}
    speakers["all together" if packs else "graft"] = contextlib.nullcontext
    speakers["base"] = functools.partial(disable_graft, model, lora=True)

    def answers(speaker: str, texts: Sequence[str], streamer: "_Streamer | None" = None) -> list[str]:
        with speakers[speaker]():
            said = greedy(model, tokenizer, texts, max_new_tokens, streamer=streamer)
        return [str(tokenizer.decode(ids, skip_special_tokens=True)) for ids in said]

    width = max(map(len, speakers)) + 1
    if (sys.stdout.isatty() if stream is None else stream) and not json:
        for text in prompt:
            print(text)
            for speaker in speakers:
                streamer = _Streamer(tokenizer)
                print(f'  {speaker + ":":{width}} "', end="", flush=True)
                streamer.finish(answers(speaker, [text], streamer)[0])
        return
    said = {speaker: answers(speaker, prompt) for speaker in speakers}
    rows = [{speaker: texts[at] for speaker, texts in said.items()} for at in range(len(prompt))]
    if json:
        emit({"answers": [{"prompt": text, **_by_kind(row, packs)} for text, row in zip(prompt, rows, strict=True)]})
        return
    for text, row in zip(prompt, rows, strict=True):
        print(text)
        for speaker, answer in row.items():
            print(f'  {speaker + ":":{width}} "{_escaped(answer)}"')


def _named(directories: Sequence[str]) -> dict[str, str]:
    """Each directory by the name that it is given or has."""
    from engram_graft.packs import PACK_NAME

    packs: dict[str, str] = {}
    for given in directories:
        name, named, path = given.partition("=")
        if not named or Path(given).exists():
            name, path = Path(given).absolute().name, given
        if name in packs:
            raise UserError(f"{packs[name]} and {path} are both named {name!r}: name one, e.g. another={path}")
        if not re.fullmatch(PACK_NAME, name):
            raise UserError(f"{path} is named {name!r}: letters, digits, _ and - only; give it a name, e.g. pack={path}")
        if name in ("all together", "base"):
            raise UserError(f"{path} is named {name!r}, as what it is compared with: give it a name, e.g. pack={path}")
        packs[name] = path
    return packs


def _by_kind(row: dict[str, str], packs: dict[str, str]) -> dict[str, Any]:
    """A prompt's answers as JSON has them."""
    if not packs:
        return row
    return {"packs": {name: row[name] for name in packs}, "together": row["all together"], "base": row["base"]}


def _escaped(text: str) -> str:
    """On one line, quotes marked; the same whether it is written at once or piece by piece."""
    return json_format.dumps(text, ensure_ascii=False)[1:-1]


class _Streamer:
    """Prints an answer as its tokens come. What the next token may still change is held back: a character cut in two, a last space."""

    def __init__(self, tokenizer: Any):
        self.tokenizer, self.shown, self.prompted = tokenizer, "", False
        self.ids: list[int] = []

    def put(self, ids: Any) -> None:
        if not self.prompted:  # generate hands over the prompt first
            self.prompted = True
            return
        self.ids += [token for token in ids.tolist() if token != self.tokenizer.eos_token_id]
        text = str(self.tokenizer.decode(self.ids, skip_special_tokens=True)).rstrip("\ufffd \n\t")
        if text.startswith(self.shown):
            self._show(text)

    def end(self) -> None:
        """The whole answer is shown by `finish`."""

    def finish(self, answer: str) -> None:
        if not answer.startswith(self.shown):  # a tokenizer that tidies up what it wrote before
            print('" tidied up: "', end="")
            self.shown = ""
        self._show(answer)
        print('"')

    def _show(self, text: str) -> None:
        print(_escaped(text[len(self.shown) :]), end="", flush=True)
        self.shown = text
