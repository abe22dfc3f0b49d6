"""The tables of a report. Each is None, or missing from its list, where the report has nothing for it."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from engram_graft.probes.labels import ARM_MEANINGS, arm_label, at, nats, number, percent, small

Report = Mapping[str, Any]
Column = tuple[str, str, Callable[[Any], str]]  # heading, path of the value in a row's scores, how it is written


@dataclasses.dataclass(frozen=True)
class Table:
    """Headings, and rows of text under them; the first cell of a row is its heading."""

    caption: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]


def table(caption: str, corner: str, rows: Iterable[tuple[str, Mapping[str, Any]]], columns: Sequence[Column]) -> Table | None:
    """A table of the columns and rows for which there is a value; None where there is none.

    Args:
        corner: what the rows' headings are.
        rows: heading and scores of each.
    """
    found = [(name, [at(scores, path) for _, path, _ in columns]) for name, scores in rows]
    found = [(name, values) for name, values in found if any(value is not None for value in values)]
    kept = [n for n in range(len(columns)) if any(values[n] is not None for _, values in found)]
    if not kept:
        return None
    cells = [[name, *("\u2013" if values[n] is None else columns[n][2](values[n]) for n in kept)] for name, values in found]
    return Table(caption, [corner, *(columns[n][0] for n in kept)], cells)


def arms_with(report: Report, part: str) -> list[tuple[str, Mapping[str, Any]]]:
    """The arms that have scores of `part`, the graft's own first, then the controls."""
    return [(arm, scores) for arm, scores in _ordered(report) if scores.get(part)]


def _ordered(report: Report) -> list[tuple[str, Mapping[str, Any]]]:
    return sorted(report["arms"].items(), key=lambda pair: pair[0] not in ARM_MEANINGS)


def _answers(part: str) -> list[Column]:
    return [
        ("greedy", f"{part}.greedy_exact", percent),
        ("new, greedy", f"{part}.new.greedy_exact", percent),
        ("forced", f"{part}.teacher_forced_exact", percent),
        ("answer CE", f"{part}.answer_ce", nats),
        ("rank", f"{part}.first_token_rank", number),
        ("prompts", f"{part}.n", number),
    ]


def _text(part: str) -> list[Column]:
    return [
        ("CE", f"{part}.ce", nats),
        ("perplexity", f"{part}.perplexity", number),
        ("bits a byte", f"{part}.bits_per_byte", nats),
        ("tokens", f"{part}.n", number),
    ]


SCORES: tuple[tuple[str, list[Column]], ...] = (
    ("Trained wordings", _answers("recall")),
    ("Unseen wordings", _answers("paraphrase")),
    ("Free answers", [("right", "task_exact.exact_match", percent), ("facts", "task_exact.n", number)]),
    ("Held-out text", _text("heldout")),
    ("Trained text", _text("text")),
    (
        "Verbatim",
        [
            ("trained: tokens", "verbatim.visited.token", percent),
            ("spans", "verbatim.visited.span", percent),
            ("of", "verbatim.visited.n", number),
            ("held out: tokens", "verbatim.held_out.token", percent),
            ("spans", "verbatim.held_out.span", percent),
            ("of", "verbatim.held_out.n", number),
        ],
    ),
    (
        "Edits",
        [
            ("efficacy", "efficacy.efficacy", percent),
            ("paraphrase", "efficacy.paraphrase", percent),
            ("neighbourhood", "efficacy.neighborhood", percent),
            ("score", "efficacy.score", percent),
            ("facts", "efficacy.n", number),
        ],
    ),
)
HARM: tuple[tuple[str, list[Column]], ...] = (
    (
        "Neutral text: distance from the base",
        [
            ("KL", "locality.kl", small),
            ("at hits", "locality.kl_hit", small),
            ("elsewhere", "locality.kl_miss", small),
            ("other top token", "locality.changed_argmax", percent),
            ("at hits", "locality.changed_argmax_hit", percent),
            ("elsewhere", "locality.changed_argmax_miss", percent),
        ],
    ),
    (
        "Neutral text: unchanged logits",
        [
            ("unchanged", "locality.unchanged_positions", percent),
            ("at hits", "locality.unchanged_hit", percent),
            ("elsewhere", "locality.unchanged_miss", percent),
            ("before the first hit", "locality.unchanged_before_hit", percent),
            ("hits", "locality.hits", percent),
            ("positions", "locality.n", number),
        ],
    ),
    (
        "Related prompts that were not trained",
        [
            ("KL", "neighborhood.kl", small),
            ("same answer", "neighborhood.same_answer", percent),
            ("prompts", "neighborhood.n", number),
        ],
    ),
)


def by_arm(report: Report, parts: Sequence[tuple[str, list[Column]]]) -> list[Table]:
    """One table for each of `parts` that some arm has scores of."""
    made = [
        table(caption, "arm", [(arm_label(arm), scores) for arm, scores in _ordered(report)], columns)
        for caption, columns in parts
    ]
    return [one for one in made if one]


def controls(report: Report) -> Table | None:
    """What each control is made of."""
    columns: list[Column] = [("parameters", "parameters", number), ("rank", "rank", number), ("\u03bb", "lambda", number)]
    known = {"about", *(path for _, path, _ in columns)}
    rows = [(arm_label(name), notes) for name, notes in report.get("controls", {}).items()]
    more = dict.fromkeys(
        key for _, notes in rows for key, value in notes.items() if isinstance(value, int | float) and key not in known
    )
    columns += [(key.replace("_", " "), key, number) for key in more]
    return table("Controls", "control", rows, [*columns, ("what it is", "about", str)])


def forms(report: Report) -> Table | None:
    """Recall by how many wordings of a fact were trained."""
    rows = sorted(report.get("by_forms", {}).items(), key=lambda pair: int(pair[0]))
    columns: list[Column] = [("facts", "facts", number), ("trained", "trained", percent), ("unseen", "unseen", percent)]
    return table("Recall by the number of trained wordings, greedy", "wordings", rows, columns)


def buckets(layers: Mapping[str, Any]) -> list[Table]:
    """For each layer, the loss where its gate had a value between two bounds."""
    columns: list[Column] = [("positions", "n", number), ("loss", "ce", nats), ("hot", "hot", percent)]
    made = [
        table(
            f"Layer {layer}, by gate" + ("" if (auc := health.get("utility_auc")) is None else f" (utility AUC {auc:.2f})"),
            "gate",
            [(f"{b['from']:.2g}\u2013{b['to']:.2g}", b) for b in health.get("buckets", [])],
            columns,
        )
        for layer, health in layers.items()
    ]
    return [one for one in made if one]


def gates(layers: Mapping[str, Any]) -> Table | None:
    """The distribution of each layer's gate in figures, after training and at step 0."""
    whens = (("gate", ""), ("gate_step0", ", step 0"))
    rows = [(f"{layer}{when}", health[key]) for layer, health in layers.items() for key, when in whens if key in health]
    short = lambda value: f"{value:.2f}"  # noqa: E731
    columns: list[Column] = [(name, name, short) for name in ("mean", "sd")]
    columns += [(name, path, short) for name, path in (("1 %", "q01"), ("median", "q50"), ("99 %", "q99"))]
    columns += [("below .05", "below_05", percent), ("above .95", "above_95", percent)]
    return table("Gate by layer", "layer", rows, columns)


def residual(layers: Mapping[str, Any]) -> Table | None:
    """How large what each memory adds is beside the residual stream."""
    rows = [(layer, health) for layer, health in layers.items()]
    columns: list[Column] = [(what, f"residual.{what}", percent) for what in ("total", "direct", "conv")]
    return table("What is added, beside the residual stream (rms)", "layer", rows, columns)


def heads(layers: Mapping[str, Any]) -> list[Table]:
    """For each layer, how full each head's table is and how many n-grams share a row."""
    columns: list[Column] = [
        ("rows", "rows", number),
        ("seen", "seen", number),
        ("coverage", "coverage", percent),
        ("collisions", "collisions", percent),
        ("expected", "expected_collisions", percent),
    ]
    made = [
        table(f"Layer {n}", "order, head", [(f"{head['order']}-gram, {head['head']}", head) for head in layer["heads"]], columns)
        for n, layer in layers.items()
        if "heads" in layer
    ]
    return [one for one in made if one]


def decoding(report: Report) -> Table | None:
    """Largest difference of a logit between the full forward pass and each other way to run the graft, and of the bare base."""
    ways = [(way, entry) for way, entry in report.get("decoding", {}).items() if isinstance(entry, Mapping)]
    columns: list[Column] = [
        ("graft", "max_difference", "{:.1e}".format),
        ("base", "base", "{:.1e}".format),
        ("holds", "ok", lambda ok: "yes" if ok else "no"),
    ]
    return table("Largest difference of a logit from the full forward pass", "run", ways, columns)
