"""The report of a graft as one HTML page: the verdict, what it rests on, and what each number means.

Each part is there only where probes.json or metrics.jsonl has something for it.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from engram_graft.errors import UserError
from engram_graft.probes import charts, health_charts, tables
from engram_graft.probes.charts import Chart
from engram_graft.probes.labels import ARM_MEANINGS, DEFINITIONS, arm_label, at, bare_percent, nats, percent, small
from engram_graft.probes.page import page
from engram_graft.probes.tables import Report, arms_with
from engram_graft.probes.task_exact import normalised
from engram_graft.probes.verdict import verdict

WRONG, RIGHT = 30, 10  # answers that are shown of each kind, the wrong ones first


def write_report(report: Report, metrics: Path, target: Path) -> None:
    """Write the page of `report` (as in probes.json), with the training curves if there is a metrics.jsonl, to `target`."""
    target.write_text(render(report, read_metrics(metrics)), encoding="utf-8")


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl; none where there is no file.

    Raises:
        UserError: a line is not JSON.
    """
    lines = []
    for n, line in enumerate(path.read_text(encoding="utf-8").splitlines() if path.is_file() else [], start=1):
        try:
            lines.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise UserError(f"{path}, line {n}: not JSON ({error.msg}); remove that line and probe again") from error
    return lines


def render(report: Report, lines: Sequence[Mapping[str, Any]]) -> str:
    """The page of `report`, and of the training whose metrics `lines` are."""
    layers = report.get("health", {}).get("layers", {})
    lines = [line for line in lines if line.get("loss") is not None]
    meanings = {arm: ARM_MEANINGS.get(arm) or at(report, f"controls.{arm}.about") for arm in report["arms"]}
    scores = list(report["arms"].values())
    return page(
        "report.html.jinja",
        verdict=report.get("verdict") or verdict(report),
        warnings=report.get("warnings", []),
        data=report.get("data", {}),
        tiles=list(_tiles(report)),
        arms=[(arm_label(arm), meaning) for arm, meaning in meanings.items() if meaning],
        known=(report["known"], at(report["arms"], "graft.recall.n")) if "known" in report else None,
        answers=[one for one in (_recall(report), _loss(report)) if one],
        scores=tables.by_arm(report, tables.SCORES),
        controls=tables.controls(report),
        forms=tables.forms(report),
        curves=[one for one in (charts.training(lines) if lines else None, _hot_cold_curves(lines)) if one],
        gates=health_charts.histograms(layers),
        gate_table=tables.gates(layers),
        hot_cold=_hot_cold(layers),
        buckets=tables.buckets(layers),
        displacement=_displacement(layers),
        residual=tables.residual(layers),
        heads=tables.heads(layers),
        harm=tables.by_arm(report, tables.HARM),
        examples=_examples(report.get("examples", [])),
        identity=report.get("identity"),
        decoding=tables.decoding(report),
        seen_filter=report.get("seen_filter"),
        definitions=[told for path, *told in DEFINITIONS if any(at(arm, path) is not None for arm in scores)],
    )


def _tiles(report: Report) -> Iterator[tuple[str, str, str]]:
    """The few numbers that a reader looks for: value, what it is, what to see it beside."""
    arms = report["arms"]
    graft, base, off = (arms.get(arm, {}) for arm in ("graft", "base", "memory_off"))
    wanted: tuple[tuple[str, str, Callable[[float], str]], ...] = (
        ("recall.greedy_exact", "of the trained wordings", percent),
        ("paraphrase.greedy_exact", "of unseen wordings", percent),
        ("heldout.ce", "nats a token on held-out text", nats),
        ("text.ce", "nats a token on trained text", nats),
    )
    for path, what, write in wanted:
        if (value := at(graft, path)) is not None:
            beside = {"base": at(base, path), "memory off": at(off, path)}
            yield write(value), what, ", ".join(f"{name} {write(v)}" for name, v in beside.items() if v is not None)
    if (kl := at(graft, "locality.kl")) is not None:
        same = at(graft, "locality.unchanged_positions")
        yield small(kl), "nats a token of drift on neutral text", "" if same is None else f"{percent(same)} of it unchanged"


def _recall(report: Report) -> Chart | None:
    arms = arms_with(report, "recall")
    if not arms:
        return None
    paths = {
        "trained wordings": "recall.greedy_exact",
        "unseen wordings": "paraphrase.greedy_exact",
        "free answers": "task_exact.exact_match",
    }
    found = {name: [at(scores, path) for _, scores in arms] for name, path in paths.items()}
    series = {name: values for name, values in found.items() if any(v is not None for v in values)}
    rows = [arm_label(arm) for arm, _ in arms]
    own = sum(arm in ARM_MEANINGS for arm, _ in arms)
    split = own if 0 < own < len(arms) else None
    caption = "Right answers by arm, greedy" + ("; controls below the line" if split else "")
    alt = f"Right answers. {charts.told(rows, series, percent)}"
    return charts.bars("recall", alt, caption, rows, series, bare_percent, "right answers (%)", split)


def _loss(report: Report) -> Chart | None:
    parts = {name: part for name, part in (("held-out text", "heldout"), ("trained text", "text")) if arms_with(report, part)}
    arms = dict.fromkeys(arm for part in parts.values() for arm, _ in arms_with(report, part))
    if not parts:
        return None
    rows = [arm_label(arm) for arm in arms]
    series = {name: [at(report["arms"][arm], f"{part}.ce") for arm in arms] for name, part in parts.items()}
    alt = f"Loss in nats a token. {charts.told(rows, series, nats)}"
    return charts.against("loss", alt, "Loss by arm, teacher-forced; dotted: the base", rows, series, "nats a token")


def _hot_cold_curves(lines: Sequence[Mapping[str, Any]]) -> Chart | None:
    measured = [line for line in lines if line.get("health")]
    return health_charts.hot_cold_curves(measured) if measured else None


def _hot_cold(layers: Mapping[str, Any]) -> Chart | None:
    both = {n: layer for n, layer in layers.items() if "hot" in layer and "cold" in layer}
    return health_charts.hot_cold_bars(both) if both else None


def _displacement(layers: Mapping[str, Any]) -> Chart | None:
    found = {n: layer["displacement"] for n, layer in layers.items() if layer.get("displacement")}
    return health_charts.displacement(found) if found else None


def _examples(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The answers that are shown, wrong ones first, and how many of each kind there are and are not shown."""
    if not rows:
        return None
    right = [row.get("right", normalised(row["graft"]) == normalised(row["answer"])) for row in rows]
    judged = {kind: [{**row, "right": kind} for row, ok in zip(rows, right, strict=True) if ok == kind] for kind in (False, True)}
    shown = [*judged[False][:WRONG], *judged[True][:RIGHT]]
    left = {"wrong": max(0, len(judged[False]) - WRONG), "right": max(0, len(judged[True]) - RIGHT)}
    return {"shown": shown, "right": len(judged[True]), "wrong": len(judged[False]), "left": left}
