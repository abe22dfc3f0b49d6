"""`engram-graft probe`: all arms of a trained graft, as a table, probes.json and a picture."""

from pathlib import Path
from typing import Annotated, Any

import typer

from engram_graft.cli.common import Device, Dtype, Json, emit, examples, open_graft, quiet, say
from engram_graft.errors import UserError

HELP_END = examples(
    "engram-graft probe runs/demo",
    "engram-graft probe runs/demo --data other-facts.jsonl --output runs/demo-on-other --json",
)


def command(
    directory: Annotated[str, typer.Argument(help="A graft directory.")],
    data: Annotated[str | None, typer.Option(help="Facts or text to probe. [default: what the graft was trained on]")] = None,
    output: Annotated[
        str | None, typer.Option(help="Where probes.json and report.png go. [default: the graft directory]")
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Prompts at a time; no score depends on it.")] = 64,
    show_examples: Annotated[int, typer.Option("--examples", help="Answers to show side by side.")] = 3,
    dtype: Dtype = None,
    device: Device = None,
    json: Json = False,
) -> None:
    """Show by causal ablation what the memory does: base, graft, memory off, shuffled addresses, LoRA off."""
    from engram_graft.data import load_data
    from engram_graft.recipe import ProbeOptions

    quiet()
    facts = load_data(data) if data else trained_on(directory)
    model, tokenizer = open_graft(directory, device, dtype)
    report = probe_into(model, tokenizer, facts, ProbeOptions(batch_size=batch_size), Path(output or directory), {})
    if json:
        emit(report)
    else:
        show(report, show_examples)


def trained_on(directory: str) -> Any:
    """The data that a graft's recipe names, split into trained and held-out prompts as it was in training."""
    from engram_graft.data import load_data
    from engram_graft.recipe import load_recipe

    path = Path(directory) / "recipe.yaml"
    if not path.is_file() or (recipe := load_recipe(path)).data is None:
        raise UserError(f"{directory}: no recipe.yaml that names its data; pass --data")
    return load_data(recipe.data).with_forms(recipe.train.forms)


def probe_into(model: Any, tokenizer: Any, data: Any, options: Any, output: Path, extra: dict[str, Any]) -> dict[str, Any]:
    """Run the probes and write probes.json, report.png and the model card's numbers; results that are there already are kept."""
    import json

    from rich.console import Console

    from engram_graft.card import model_card
    from engram_graft.checkpoint import CONFIG_FILE
    from engram_graft.output import all_or_nothing
    from engram_graft.probes.plot import plot
    from engram_graft.probes.suite import run_probes

    before = json.loads(path.read_text()) if (path := output / "probes.json").is_file() else {}
    kept = {key: before[key] for key in ("identity", "decoding") if key in before}
    if (path := output / "identity.json").is_file():
        kept["identity"] = json.loads(path.read_text())
    with Console(stderr=True).status("probing") as status:
        report = run_probes(model, tokenizer, data, options, lambda arm: status.update(f"probing {arm}"))
    report = {**report, **kept, **extra}
    if "identity" in report:
        report["identity"] = {key: report["identity"][key] for key in ("bitwise", "logits")}
    with all_or_nothing(output) as files:
        (files / "probes.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        plot(report, output / "metrics.jsonl", files / "report.png")
    if (output / CONFIG_FILE).is_file():
        described = json.loads((output / CONFIG_FILE).read_text(encoding="utf-8"))
        (output / "README.md").write_text(model_card(output, described), encoding="utf-8")
    return report


def show(report: dict[str, Any], examples: int) -> None:
    """The table of arms and a few answers side by side."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table()
    facts = "recall" in report["arms"]["base"]
    columns = ("arm", "recall", "paraphrase", "free", "answer CE") if facts else ("arm", "loss on the text")
    for column in (*columns, "KL", "unchanged"):
        table.add_column(column, justify="left" if column == "arm" else "right")
    for arm, scores in report["arms"].items():
        recall, paraphrase, task = scores.get("recall"), scores.get("paraphrase"), scores.get("task_exact")
        cells = [arm]
        if facts:
            cells += [_share(recall, "greedy_exact"), _share(paraphrase, "greedy_exact"), _share(task, "exact_match")]
            cells += [f"{recall['answer_ce']:.3f}"]
        else:
            cells += [f"{scores['text']['ce']:.3f}"]
        cells += [f"{scores['locality']['kl']:.5f}", f"{scores['locality']['unchanged_positions']:.1%}"]
        table.add_row(*cells)
    console.print(table)
    if facts:
        say("          recall: greedy, on trained prompts; paraphrase: held-out forms; free: the whole free answer is right")
        say(
            "          answer CE: nats a token; KL: to the base on neutral text; unchanged: positions there that are bit-identical"
        )
        counts = {
            part: report["arms"]["base"][part]["n"]
            for part in ("recall", "paraphrase", "task_exact")
            if part in report["arms"]["base"]
        }
        say(f"          n: {counts}; the base knew {report['known']} of the trained prompts before")
    chosen = sorted(report.get("examples", []), key=lambda e: e["graft"] != e["answer"])[
        :: max(1, len(report.get("examples", [])) // 3)
    ]
    for example in chosen[:examples]:
        console.print(
            f"\n[bold]{example['prompt']}[/bold]\n  base:  {example['base']!r}\n  graft: {example['graft']!r}",
            highlight=False,
        )
    console.print()


def _share(scores: dict[str, Any] | None, key: str) -> str:
    return "" if scores is None else f"{scores[key]:.1%}"
