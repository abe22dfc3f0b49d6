"""The picture of a run: how loss and recall went, and what each arm knows."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

INK, BLUE, ORANGE, GREY = "#222222", "#2b6cb0", "#dd6b20", "#a0aec0"


def plot(report: Mapping[str, Any], metrics: Path, target: Path) -> None:
    """Draw `report` (from `run_probes`), and the training curves if there is a metrics.jsonl, into the PNG `target`."""
    lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()] if metrics.is_file() else []
    figure, axes = plt.subplots(1, 2 if lines else 1, figsize=(10 if lines else 5, 3.6), squeeze=False, layout="constrained")
    if lines:
        _curves(axes[0][0], lines)
    _bars(axes[0][-1], report["arms"])
    figure.savefig(target, dpi=150)
    plt.close(figure)


def _curves(axis: Any, lines: list[dict[str, Any]]) -> None:
    axis.plot([line["step"] for line in lines], [line["loss"] for line in lines], color=GREY)
    axis.set(title="Training", xlabel="step", ylabel="loss (nats a token)", ylim=(0, None))
    measured = [line for line in lines if "recall" in line]
    if measured:
        recall = axis.twinx()
        recall.plot(
            [line["step"] for line in measured],
            [100 * line["recall"] for line in measured],
            color=BLUE,
            marker="o",
            markersize=3,
        )
        recall.set_ylabel("recall (%)", color=BLUE)
        recall.set_ylim(0, 103)
        recall.spines["top"].set_visible(False)
    axis.spines["top"].set_visible(False)


def _bars(axis: Any, arms: Mapping[str, Any]) -> None:
    names = list(arms)
    if "recall" in arms[names[0]]:
        parts = {"trained prompts": ("recall", BLUE), "held-out paraphrases": ("paraphrase", ORANGE)}
        parts = {label: part for label, part in parts.items() if part[0] in arms[names[0]]}
        for n, (label, (part, color)) in enumerate(parts.items()):
            width = 0.8 / len(parts)
            at = [x + (n - (len(parts) - 1) / 2) * width for x in range(len(names))]
            bars = axis.bar(at, [100 * arms[name][part]["greedy_exact"] for name in names], width, label=label, color=color)
            axis.bar_label(bars, fmt=lambda share: f"{share:.1f}".removesuffix(".0"), fontsize=8, color=INK)
        axis.set(title="Greedy recall by arm", ylabel="%", ylim=(0, 125), yticks=range(0, 101, 20))
        axis.legend(frameon=False, fontsize=8, loc="upper right", ncols=2)
    else:
        bars = axis.bar(names, [arms[name]["text"]["ce"] for name in names], color=BLUE)
        axis.bar_label(bars, fmt="%.3f", fontsize=8, color=INK)
        axis.set(title="Loss on the training text by arm", ylabel="nats a token")
    axis.set_xticks(range(len(names)), names)
    axis.spines[["top", "right"]].set_visible(False)
