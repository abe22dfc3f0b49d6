"""Grafts side by side: a row a metric, a column a graft, and whether they were asked the same."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from engram_graft.probes import charts
from engram_graft.probes.charts import Chart
from engram_graft.probes.labels import at, bare_percent, nats, number, percent, small
from engram_graft.probes.page import page
from engram_graft.probes.tables import Report, Table
from engram_graft.probes.verdict import verdict

Metric = tuple[
    str, str, Callable[[Any], str], Callable[..., Any] | None
]  # name, path in "arms", how it is written, which is best
METRICS: tuple[Metric, ...] = (
    ("trained wordings, greedy", "graft.recall.greedy_exact", percent, max),
    ("unseen wordings, greedy", "graft.paraphrase.greedy_exact", percent, max),
    ("free answers, greedy", "graft.task_exact.exact_match", percent, max),
    ("answer CE, teacher-forced", "graft.recall.answer_ce", nats, min),
    ("trained wordings: base", "base.recall.greedy_exact", percent, None),
    ("trained wordings: memory off", "memory_off.recall.greedy_exact", percent, None),
    ("trained wordings: shuffled addresses", "shuffled.recall.greedy_exact", percent, None),
    ("trained wordings: LoRA off", "lora_off.recall.greedy_exact", percent, None),
    ("trained prompts", "graft.recall.n", number, None),
    ("held-out text: loss", "graft.heldout.ce", nats, min),
    ("held-out text: base", "base.heldout.ce", nats, None),
    ("held-out text: memory off", "memory_off.heldout.ce", nats, None),
    ("held-out text: LoRA off", "lora_off.heldout.ce", nats, None),
    ("trained text: loss", "graft.text.ce", nats, min),
    ("edits: score", "graft.efficacy.score", percent, max),
    ("neighbourhood: same answer", "graft.neighborhood.same_answer", percent, max),
    ("neutral text: KL", "graft.locality.kl", small, min),
    ("neutral text: KL at hits", "graft.locality.kl_hit", small, min),
    ("neutral text: KL elsewhere", "graft.locality.kl_miss", small, min),
    ("neutral text: unchanged", "graft.locality.unchanged_positions", percent, max),
)


def compare(reports: Mapping[str, Report]) -> dict[str, Any]:
    """The reports (as in probes.json) of several grafts, by the grafts' names.

    Returns:
        {"grafts": [name], "verdicts": [sentence], "rows": [{"metric", "path", "values": a graft's each, None where it has none}],
        "same_data": bool, None where a report does not say what it was probed on, "note": that in words}.
    """
    grafts = list(reports)
    values = {path: [at(report["arms"], path) for report in reports.values()] for _, path, _, _ in METRICS}
    rows = [
        {"metric": name, "path": f"arms.{path}", "values": values[path]}
        for name, path, _, _ in METRICS
        if any(value is not None for value in values[path])
    ]
    same, note = _data(reports)
    return {
        "grafts": grafts,
        "verdicts": [report.get("verdict") or verdict(report) for report in reports.values()],
        "rows": rows,
        "same_data": same,
        "note": note,
    }


def _data(reports: Mapping[str, Report]) -> tuple[bool | None, str]:
    sums = {name: at(report, "data.sha256") for name, report in reports.items()}
    known = {value for value in sums.values() if value}
    if len(known) > 1:
        asked = ", ".join(f"{name}: {at(report, 'data.source') or 'unknown'}" for name, report in reports.items())
        return (
            False,
            f"These grafts were probed on different data ({asked}): their scores are not comparable, except on neutral text.",
        )
    if unknown := [name for name, value in sums.items() if not value]:
        return None, f"It is not recorded what was probed for {', '.join(unknown)}: whether the data is the same is not known."
    return True, "All were probed on the same data."


def render_compare(reports: Mapping[str, Report]) -> str:
    """The page of `compare(reports)`; in a row whose direction is clear the best value is marked."""
    found = compare(reports)
    written = {f"arms.{path}": (write, best) for _, path, write, best in METRICS}
    rows, marks = [], []
    for row in found["rows"]:
        write, best = written[row["path"]]
        values = [value for value in row["values"] if value is not None]
        top = best(values) if best and found["same_data"] and len(set(values)) > 1 else None
        rows.append([row["metric"], *("\u2013" if value is None else write(value) for value in row["values"])])
        marks.append([value is not None and value == top for value in row["values"]])
    table = Table("Metrics of the graft as a whole, and of its arms", ["metric", *found["grafts"]], rows)
    return page("compare.html.jinja", **found, table=table, marks=marks, chart=_chart(found))


def write_compare(reports: Mapping[str, Report], target: Path) -> None:
    """Write the page of `compare(reports)` to `target`."""
    target.write_text(render_compare(reports), encoding="utf-8")


def _chart(found: Mapping[str, Any]) -> Chart | None:
    parts = {"trained wordings": "recall.greedy_exact", "unseen wordings": "paraphrase.greedy_exact"}
    values = {row["path"]: row["values"] for row in found["rows"]}
    series = {name: values[path] for name, part in parts.items() if (path := f"arms.graft.{part}") in values}
    if not series:
        return None
    names = [name if len(name) <= 28 else f"\u2026{name[-27:]}" for name in found["grafts"]]
    alt = f"Right answers. {charts.told(names, series, percent)}"
    return charts.bars("recall", alt, "Right answers by graft, greedy", names, series, bare_percent, "right answers (%)")
