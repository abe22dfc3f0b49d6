"""What `train` and `probe` print of a report: the table of arms, answers side by side, the verdict; and grafts side by side."""

import textwrap
from typing import Any

from engram_graft.cli.common import say

INDENT = " " * 10
_COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("recall", "recall.greedy_exact", ".1%"),
    ("paraphrase", "paraphrase.greedy_exact", ".1%"),
    ("free", "task_exact.exact_match", ".1%"),
    ("CE", "recall.answer_ce", ".3f"),
    ("text CE", "text.ce", ".3f"),
    ("held-out CE", "heldout.ce", ".3f"),
    ("verbatim", "verbatim.visited.span", ".1%"),
    ("edits", "efficacy.score", ".1%"),
    ("near", "neighborhood.same_answer", ".1%"),
    ("KL", "locality.kl", ".5f"),
    ("unchanged", "locality.unchanged_positions", ".1%"),
)
_MEANINGS = {
    "recall": "greedy, on the prompts",
    "paraphrase": "held-out forms",
    "free": "the whole free answer is right",
    "CE": "nats a token of the answers",
    "text CE": "nats a token of the trained text",
    "verbatim": "trained spans of 16 tokens continued exactly",
    "edits": "CounterFact's score",
    "near": "related prompts answered as the base does",
    "KL": "to the base on neutral text, nats a token",
    "unchanged": "positions there that are bit-identical",
}


def show(report: dict[str, Any], examples: int) -> None:
    """The table of arms, a few answers side by side, and what the report says in words."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    from engram_graft.probes.labels import at

    arms = report["arms"]
    columns = [column for column in _COLUMNS if any(at(scores, column[1]) is not None for scores in arms.values())]
    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)  # seven scores and an arm's name have 80 columns
    for title in ("arm", *(title for title, _, _ in columns)):
        table.add_column(title, justify="left" if title == "arm" else "right", no_wrap=True)
    for arm, scores in arms.items():
        values = [(at(scores, path), form) for _, path, form in columns]
        table.add_row(arm, *("" if value is None else format(value, form) for value, form in values))
    console = Console()
    console.print(table)
    meanings = "; ".join(f"{title}: {_MEANINGS[title]}" for title, _, _ in columns if title in _MEANINGS)
    say(textwrap.fill(meanings, 110, initial_indent=INDENT, subsequent_indent=INDENT))
    base = arms["base"]
    prompts = "trained prompts" if report["data"]["trained"] else "prompts, none of them trained"
    counts = {prompts: "recall", "held-out paraphrases": "paraphrase", "free answers": "task_exact"}
    if asked := ", ".join(f"{base[part]['n']} {what}" for what, part in counts.items() if part in base):
        say(f"          {asked}; the base knew {report.get('known', 0)} of the prompts before")
    for forms, row in report.get("by_forms", {}).items():
        unseen = "" if row["unseen"] is None else f", {row['unseen']:.1%} in others"
        say(
            f"          {row['facts']} facts trained in {forms} wording{'s' * (forms != '1')}: {row['trained']:.1%} in those{unseen}"
        )
    rows = sorted(report.get("examples", []), key=lambda row: not row["right"])
    for row in rows[:: max(1, len(rows) // max(1, examples))][:examples]:
        print(f"\n{row['prompt']}\n  base:  {row['base']!r}\n  graft: {row['graft']!r}")
    print("\n" + textwrap.fill(report["verdict"], 110), flush=True)
    if taught := report["data"].get("teachers"):
        say(f"          {taught} invented facts taught the wordings of paraphrase; these facts were not trained in them")
    for sentence in report["warnings"]:
        say(textwrap.fill(f"warning   {sentence}", 110, subsequent_indent=INDENT))


def show_comparison(compared: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table()
    table.add_column("score")
    for name in compared["grafts"]:
        table.add_column(escape(name), justify="right")
    for row in compared["rows"]:
        table.add_row(row["metric"], *("" if value is None else f"{value:.4g}" for value in row["values"]))
    Console().print(table)
    if compared["note"]:
        say(f"          {compared['note']}")
    for name, sentence in zip(compared["grafts"], compared["verdicts"], strict=True):
        print(f"{name}: {sentence}")
