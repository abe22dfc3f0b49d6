"""Charts as inline SVG: small enough for a phone, with their text as text, one palette, and the same bytes for the same numbers."""

import dataclasses
import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from markupsafe import Markup, escape
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# dark, middle, light: told apart by any eye, and in grey print by their lightness
INK, BLUE, ORANGE, LIGHT, GREY = "#222222", "#15518f", "#e08214", "#a6c8e4", "#8a939e"
SERIES = (BLUE, ORANGE, LIGHT, GREY, "#5aa88f", "#7b3f73")
WIDTH = 4.6  # inches
_STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "engram-graft",
    "text.parse_math": False,  # a name with two dollar signs is a name
    "font.family": "sans-serif",
    "font.size": 9.5,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
    "axes.labelcolor": INK,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e3e6ea",
    "grid.linewidth": 0.7,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "legend.frameon": False,
    "legend.handlelength": 1.1,
    "legend.columnspacing": 1.2,
    "lines.linewidth": 1.6,
}


@dataclasses.dataclass(frozen=True)
class Chart:
    """An SVG element with its alternative text inside, and the line below it."""

    svg: Markup
    caption: str


def chart(key: str, alt: str, caption: str, height: float, *panels: Callable[[Axes], None], across: bool = False) -> Chart:
    """Paint `panels` below one another (or `across`) into a figure of `height` inches; `key` is its own in a page."""
    with style.context(["default", _STYLE]):
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        shape = (1, len(panels)) if across else (len(panels), 1)
        axes = list(figure.subplots(*shape, sharex=not across, squeeze=False).flat)
        for axis, paint in zip(axes, panels, strict=True):
            paint(axis)
        handles = {label: handle for axis in axes for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
        if len(handles) > 1:
            figure.legend(handles.values(), handles.keys(), loc="outside upper left", ncols=3)
        text = io.StringIO()
        figure.savefig(text, format="svg", transparent=True, metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    return Chart(_inline(text.getvalue(), key, alt), caption)


def _inline(svg: str, key: str, alt: str) -> Markup:
    """The element without what only a file needs; ids are made the chart's own, since a page has one space of them."""
    svg = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>\s*", "", svg[svg.index("<svg") :], count=1, flags=re.DOTALL)
    svg = re.sub(r'( id="|url\(#|href="#)', rf"\g<1>{key}-", svg)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1), count=1)
    return Markup(svg.replace("<svg", f'<svg role="img" aria-label="{escape(alt)}"', 1).strip())


def told(rows: Sequence[str], series: Mapping[str, Sequence[float | None]], write: Callable[[float], str]) -> str:
    """What a chart shows, in words."""
    each = [[f"{name} {write(v)}" for name, values in series.items() if (v := values[n]) is not None] for n in range(len(rows))]
    return "; ".join(f"{row}: {', '.join(values)}" for row, values in zip(rows, each, strict=True)) + "."


def bars(
    key: str,
    alt: str,
    caption: str,
    rows: Sequence[str],
    series: Mapping[str, Sequence[float | None]],
    label: Callable[[float], str],
    axis_label: str,
    split: int | None = None,
) -> Chart:
    """Lying bars of shares on an axis from 0 to 100 %, one group a row, with their values written on them.

    Args:
        split: rows from this one on stand below a line.
    """
    thick = 0.8 / len(series)

    def paint(axis: Axes) -> None:
        for n, (name, values) in enumerate(series.items()):
            places = [(row - 0.4 + (n + 0.5) * thick, value) for row, value in enumerate(values) if value is not None]
            drawn = axis.barh(
                [y for y, _ in places], [100 * value for _, value in places], 0.9 * thick, label=name, color=SERIES[n]
            )
            axis.bar_label(drawn, [label(value) for _, value in places], padding=2, fontsize=8.5)
        axis.set_yticks(range(len(rows)), rows)
        axis.set(xlabel=axis_label, xlim=(0, 112), xticks=range(0, 101, 20), ylim=(len(rows) - 0.5, -0.5))
        axis.grid(visible=False, axis="y")
        axis.spines["left"].set_visible(False)
        if split:
            axis.axhline(split - 0.5, color=GREY, linewidth=0.8)

    height = 0.75 + len(rows) * (0.12 + 0.165 * len(series))
    return chart(key, alt, caption, height, paint)


def against(
    key: str, alt: str, caption: str, rows: Sequence[str], series: Mapping[str, Sequence[float | None]], axis_label: str
) -> Chart:
    """Dots with their values, joined to the first row's: what changed is the line's length, so the axis need not begin at 0."""

    def paint(axis: Axes) -> None:
        for n, (name, values) in enumerate(series.items()):
            places = [(row + 0.34 * (n - (len(series) - 1) / 2), value) for row, value in enumerate(values) if value is not None]
            start = places[0][1]
            axis.axvline(start, color=SERIES[n], linewidth=0.8, linestyle=":")
            axis.hlines([y for y, _ in places], [min(start, v) for _, v in places], [max(start, v) for _, v in places], SERIES[n])
            axis.plot([value for _, value in places], [y for y, _ in places], "o", color=SERIES[n], markersize=5, label=name)
            for y, value in places:
                side = -1 if value < start else 1
                where: dict[str, Any] = {"xytext": (6 * side, 0), "textcoords": "offset points", "va": "center", "fontsize": 8.5}
                axis.annotate(f"{value:.3f}", (value, y), ha="right" if side < 0 else "left", **where)
        axis.set_yticks(range(len(rows)), rows)
        axis.set(xlabel=axis_label, ylim=(len(rows) - 0.5, -0.5))
        axis.margins(x=0.2)
        axis.grid(visible=False, axis="y")

    return chart(key, alt, caption, 0.75 + len(rows) * (0.14 + 0.2 * len(series)), paint)


def thinned(lines: Sequence[Mapping[str, Any]], most: int = 300) -> Iterator[tuple[int, float]]:
    """(step, loss) of at most `most` points, each the mean of as many steps and at the last of them."""
    size = -(-len(lines) // most)
    for start in range(0, len(lines), size):
        part = lines[start : start + size]
        yield part[-1]["step"], sum(line["loss"] for line in part) / len(part)


def training(lines: Sequence[Mapping[str, Any]]) -> Chart:
    """Loss, and recall where it was measured, over the steps of metrics.jsonl."""
    measured = [line for line in lines if line.get("recall") is not None]

    def loss(axis: Axes) -> None:
        axis.plot(*zip(*thinned(lines), strict=True), color=BLUE)
        axis.set(title="loss (nats a token)", ylim=(0, None))

    def recall(axis: Axes) -> None:
        axis.plot(
            [line["step"] for line in measured],
            [100 * line["recall"] for line in measured],
            color=ORANGE,
            marker="o",
            markersize=3.5,
        )
        axis.set(title="recall of trained prompts (%)", ylim=(0, 105))

    def labelled(axis: Axes) -> None:
        (recall if measured else loss)(axis)
        axis.set(xlabel="step", xlim=(0, None))

    alt = f"Loss from {lines[0]['loss']:.3f} at step {lines[0]['step']} to {lines[-1]['loss']:.3f} at step {lines[-1]['step']}"
    alt += f"; recall from {100 * measured[0]['recall']:.1f} to {100 * measured[-1]['recall']:.1f} %." if measured else "."
    panels = [loss, labelled] if measured else [labelled]
    return chart("training", alt, "Training: loss" + (" and recall" if measured else ""), 0.5 + 1.4 * len(panels), *panels)
