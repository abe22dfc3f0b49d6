"""`engram-graft probe`: all arms of a trained graft, as a table, probes.json and a picture."""

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer

from engram_graft.cli.common import Device, Json, RecordedDtype, TableDir, TableTier, emit, examples, open_graft, quiet, say
from engram_graft.errors import UserError

HELP_END = examples(
    "engram-graft probe runs/demo",
    "engram-graft probe runs/demo --data other-facts.jsonl --output runs/demo-on-other --json",
)


def command(
    directory: Annotated[str, typer.Argument(help="A graft directory.")],
    data: Annotated[
        str | None, typer.Option(help="Facts or text to probe.", show_default="what the graft was trained on")
    ] = None,
    output: Annotated[
        str | None, typer.Option(help="Where probes.json and report.png go.", show_default="the graft directory")
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Prompts at a time; no score depends on it.", show_default="the recipe's")
    ] = None,
    show_examples: Annotated[int, typer.Option("--examples", help="Answers to show side by side.")] = 3,
    dtype: RecordedDtype = None,
    table_tier: TableTier = None,
    table_dir: TableDir = None,
    device: Device = None,
    json: Json = False,
) -> None:
    """Show by causal ablation what the memory does: base, graft, memory off, shuffled addresses, LoRA off."""
    from engram_graft.data import load_data
    from engram_graft.probes import Subject
    from engram_graft.recipe import Recipe, load_recipe

    quiet()
    if data and not output:
        raise UserError("--data needs --output: the graft's own probes.json is about the data it was trained on")
    own = Path(directory) / "recipe.yaml"
    recipe = load_recipe(own) if own.is_file() else Recipe()
    options = recipe.probe
    options = dataclasses.replace(
        options, batch_size=options.batch_size if batch_size is None else batch_size, examples=show_examples
    )
    facts = load_data(data) if data else trained_on(directory)
    model, tokenizer = open_graft(directory, device, dtype, table_tier, table_dir)
    subject = Subject(model, tokenizer, facts, options, recipe.train, trained=data is None)
    report = probe_into(subject, Path(directory), Path(output or directory), {})
    if json:
        emit(report)
    else:
        show(report, options.examples)


def trained_on(directory: str) -> Any:
    """The data that a graft's recipe names, split into trained and held-out prompts as it was in training."""
    from engram_graft.data import load_data
    from engram_graft.recipe import load_recipe

    path = Path(directory) / "recipe.yaml"
    if not path.is_file() or (recipe := load_recipe(path)).data is None:
        raise UserError(f"{directory}: no recipe.yaml that names its data; pass --data")
    return load_data(recipe.data).with_forms(recipe.train.forms)


def probe_into(subject: Any, graft: Path, output: Path, checks: dict[str, Any]) -> dict[str, Any]:
    """Run the probes and write probes.json and report.png into `output`, with the checks and curves that the directory `graft` has."""
    import json

    from engram_graft.card import model_card
    from engram_graft.files import CONFIG_FILE
    from engram_graft.output import all_or_nothing
    from engram_graft.probes import run_probes
    from engram_graft.probes.plot import plot

    try:
        before = json.loads(path.read_text()) if (path := graft / "probes.json").is_file() else {}
        kept = {key: before[key] for key in ("identity", "decoding") if key in before}
        if (path := graft / "identity.json").is_file():
            kept["identity"] = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise UserError(f"{path}: not JSON ({error.msg}); remove it and probe again") from error
    report = run_probes(subject, started=lambda name: say(f"probe     {name}"))
    report = {**report, **kept, **checks}
    if "identity" in report:
        report["identity"] = {key: report["identity"][key] for key in ("bitwise", "logits")}
    with all_or_nothing(output) as files:
        (files / "probes.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        plot(report, graft / "metrics.jsonl", files / "report.png")
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
        base = report["arms"]["base"]
        counts = {"trained prompts": "recall", "held-out paraphrases": "paraphrase", "free answers": "task_exact"}
        say("          " + ", ".join(f"{base[part]['n']} {what}" for what, part in counts.items() if part in base))
        say(f"          the base knew {report['known']} of the trained prompts before")
    rows = sorted(report.get("examples", []), key=lambda row: row["graft"] != row["answer"])
    for row in rows[:: max(1, len(rows) // max(1, examples))][:examples]:
        print(f"\n{row['prompt']}\n  base:  {row['base']!r}\n  graft: {row['graft']!r}")
    print(flush=True)


def _share(scores: dict[str, Any] | None, key: str) -> str:
    return "" if scores is None else f"{scores[key]:.1%}"
