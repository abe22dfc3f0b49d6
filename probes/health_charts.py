"""Charts of the memories' health: how open the gates are, what they are open for, and how far the rows moved."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes

from engram_graft.probes.charts import BLUE, INK, LIGHT, ORANGE, SERIES, Chart, chart
from engram_graft.probes.labels import at


def histograms(layers: Mapping[str, Mapping[str, Any]]) -> list[Chart]:
    """How open each layer's gate is after training, against step 0."""
    measured = {layer: health for layer, health in layers.items() if "gate" in health}
    return [_histogram(f"gate-{n}", layer, one["gate"], one.get("gate_step0")) for n, (layer, one) in enumerate(measured.items())]


def _histogram(key: str, layer: str, gate: Mapping[str, Any], fresh: Mapping[str, Any] | None) -> Chart:

    def paint(axis: Axes) -> None:
        after: dict[str, Any] = {"fill": True, "color": LIGHT}
        before: dict[str, Any] = {"color": ORANGE, "linestyle": "--", "linewidth": 1.6}
        for name, scores, look in (("trained", gate, after), ("at step 0", fresh, before)):
            if scores:
                counts, total = scores["histogram"], max(1, sum(scores["histogram"]))
                edges = [n / len(counts) for n in range(len(counts) + 1)]
                axis.stairs([100 * count / total for count in counts], edges, label=name, **look)
        axis.set(xlabel="gate (0 closed, 1 open)", title="share of positions (%)", xlim=(0, 1), ylim=(0, None))

    told = {"after training": gate, "at step 0": fresh}
    alt = f"Gate of layer {layer}: " + "; ".join(
        f"mean {g['mean']:.2f}, sd {g['sd']:.2f} {when}" for when, g in told.items() if g
    )
    return chart(key, f"{alt}.", f"Gate of layer {layer}", 2.2, paint)


def hot_cold_curves(lines: Sequence[Mapping[str, Any]]) -> Chart:
    """Gate by layer, and loss, at hot and at cold n-grams over the steps whose line has "health"."""
    steps = [line["step"] for line in lines]
    layers = sorted((key for key in lines[-1]["health"] if key.isdigit()), key=int)

    def panel(title: str, path: str) -> Callable[[Axes], None]:
        def paint(axis: Axes) -> None:
            for name, color, look in (("hot", ORANGE, "-"), ("cold", BLUE, "--")):
                values = [at(line["health"], path + name) for line in lines]
                axis.plot(steps, [float("nan") if v is None else v for v in values], look, color=color, label=name)
            axis.set(title=title)
            if title == titles[-1]:
                axis.set_xlabel("step")

        return paint

    paths = {f"gate of layer {layer}": f"{layer}.gate_" for layer in layers}
    if "ce_hot" in lines[-1]["health"]:
        paths["loss (nats a token)"] = "ce_"
    titles = list(paths)
    panels = [panel(title, path) for title, path in paths.items()]
    alt = f"{', '.join(titles)} at hot and cold n-grams from step {steps[0]} to {steps[-1]}."
    return chart("hot-cold", alt, "Hot and cold n-grams over training", 0.7 + 1.2 * len(panels), *panels)


def hot_cold_bars(layers: Mapping[str, Mapping[str, Any]]) -> Chart:
    """Gate and loss at hot and at cold n-grams after training, a group a layer; a tick is the base's loss there."""

    def panel(title: str, key: str) -> Callable[[Axes], None]:
        def paint(axis: Axes) -> None:
            for n, (name, color) in enumerate((("hot", ORANGE), ("cold", BLUE))):
                places = [x + 0.4 * (n - 0.5) for x in range(len(layers))]
                axis.bar(places, [_or_gap(layer[name][key]) for layer in layers.values()], 0.36, label=name, color=color)
                if key == "ce":
                    base = [_or_gap(layer[name]["base_ce"]) for layer in layers.values()]
                    axis.hlines(base, [x - 0.19 for x in places], [x + 0.19 for x in places], INK, label="the base")
            axis.set_xticks(range(len(layers)), [f"layer {layer}" for layer in layers])
            axis.set(title=title)
            axis.grid(visible=False, axis="x")

        return paint

    def say(value: float | None) -> str:
        return "none" if value is None else f"{value:.2f}"

    told = "; ".join(
        f"layer {name} gate {say(layer['hot']['gate'])} hot and {say(layer['cold']['gate'])} cold, "
        f"loss {say(layer['hot']['ce'])} and {say(layer['cold']['ce'])}"
        for name, layer in layers.items()
    )
    panels = panel("mean gate", "gate"), panel("loss (nats a token)", "ce")
    return chart("hot-cold-bars", f"{told}.", "Hot and cold n-grams after training", 2.3, *panels, across=True)


def _or_gap(value: float | None) -> float:
    """A mean over no positions is nothing to draw, not 0."""
    return math.nan if value is None else value


def displacement(layers: Mapping[str, Sequence[Mapping[str, Any]]]) -> Chart:
    """How far rows moved from their initial values, by how often one pass of the training data looks them up."""
    groups = list(dict.fromkeys(group["touches"] for layer in layers.values() for group in layer))

    def paint(axis: Axes) -> None:
        width = 0.8 / len(layers)
        for n, (layer, found) in enumerate(layers.items()):
            places = [groups.index(group["touches"]) + (n - (len(layers) - 1) / 2) * width for group in found]
            axis.bar(places, [_or_gap(group["rms"]) for group in found], 0.9 * width, label=f"layer {layer}", color=SERIES[n % 6])
        axis.set_xticks(range(len(groups)), groups)
        axis.set(xlabel="look-ups in one pass of the training data", title="change of a row's channels (rms)")
        axis.grid(visible=False, axis="x")

    alt = "; ".join(
        f"layer {n}: " + ", ".join(f"{g['touches']} times {g['rms']:.3g}" for g in f if g["n"]) for n, f in layers.items()
    )
    return chart("displacement", f"Rows moved by: {alt}.", "How far rows moved, by how often they were looked up", 2.3, paint)
