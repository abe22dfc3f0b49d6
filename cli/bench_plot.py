"""The picture of a bench: decoding against the base, a training step and memory against the tables' rows, files against memory."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from engram_graft.probes.charts import BLUE, GREY, INK, ORANGE


def plot(report: Mapping[str, Any], target: Path) -> None:
    """Draw the report of `engram-graft bench` into the PNG `target`."""
    panels = [_step, _memory, _ratios]
    figure, axes = plt.subplots(1, len(panels), figsize=(13, 3.6), layout="constrained")
    for axis, panel in zip(axes, panels, strict=True):
        panel(axis, report)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(target, dpi=150)
    plt.close(figure)


def _step(axis: Any, report: Mapping[str, Any]) -> None:
    sizes = report["training"]["sizes"]
    steps = [size["step_ms"] for size in sizes]
    axis.plot([size["rows"] for size in sizes], steps, color=BLUE, marker="o")
    axis.set(
        title="Training step, 512 tokens", xscale="log", xlabel="rows of all tables", ylabel="ms", ylim=(0, 1.2 * max(steps))
    )


def _memory(axis: Any, report: Mapping[str, Any]) -> None:
    sizes = report["training"]["sizes"]
    rows = [size["rows"] for size in sizes]
    axis.plot(
        rows, [size["table_bytes"] / 1e6 for size in sizes], color=GREY, marker="o", label="tables, if every row were touched"
    )
    axis.plot(
        rows,
        [max(size["memory_bytes"], 1e5) / 1e6 for size in sizes],
        color=BLUE,
        marker="o",
        label="memory taken beyond the base",
    )
    axis.set(title="Memory", xscale="log", yscale="log", xlabel="rows of all tables", ylabel="MB")
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_formatter("")
    axis.legend(frameon=False, fontsize=8)


def _ratios(axis: Any, report: Mapping[str, Any]) -> None:
    bars = {
        "decode step,\nall n-grams known": report["step"]["ratio"],
        "decode step,\nnone known": report["step"]["silent_ratio"],
        "prefill,\nall known": report["prefill"]["ratio"],
        "prefill,\nnone known": report["prefill"]["silent_ratio"],
    }
    colors = [ORANGE] * len(bars)
    for part in ("training", "inference", "decoding") if "tiers" in report else ():
        bars[f"{part}: time in\nfiles / in memory"] = 1 / report["tiers"][part]["ratio"]
        colors.append(BLUE)
    drawn = axis.barh(list(bars), list(bars.values()), color=colors)
    axis.bar_label(drawn, fmt="%.3f", fontsize=8, color=INK, padding=2)
    axis.axvline(1, color=GREY, linewidth=1)
    axis.invert_yaxis()
    axis.tick_params(axis="y", labelsize=8)
    axis.set(title="Time, as a multiple", xlim=(0, max(bars.values()) * 1.2))
