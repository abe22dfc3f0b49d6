"""`engram-graft probe`: all arms of a trained graft, as a table, probes.json and report.html; or several grafts side by side."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from engram_graft.cli.common import (
    Device,
    Json,
    RecordedDtype,
    TableDir,
    TableTier,
    emit,
    examples,
    local,
    open_graft,
    quiet,
    say,
)
from engram_graft.cli.show import show, show_comparison
from engram_graft.errors import UserError

HELP_END = examples(
    "engram-graft probe runs/demo",
    "engram-graft probe runs/demo --controls",
    "engram-graft probe runs/demo --data other-facts.jsonl --output runs/demo-on-other --json",
    "engram-graft probe runs/demo runs/memory-only --compare",
    "engram-graft probe --list",
)


def command(
    directories: Annotated[list[str] | None, typer.Argument(help="A graft directory; with --compare, several.")] = None,
    data: Annotated[
        str | None, typer.Option(help="Facts, chats or text to probe.", show_default="what the graft was trained on")
    ] = None,
    output: Annotated[
        str | None, typer.Option(help="Where probes.json and report.html go.", show_default="the graft directory")
    ] = None,
    only: Annotated[
        str | None, typer.Option(help="Names from --list with commas between; needs --output.", show_default="all probes")
    ] = None,
    controls: Annotated[
        bool,
        typer.Option("--controls", help="Also train and probe controls by the graft's recipe: hours where the run took hours."),
    ] = False,
    control: Annotated[list[str] | None, typer.Option(help="One control of --list; may be given again.")] = None,
    compare: Annotated[bool, typer.Option("--compare", help="Lay the probes.json of several grafts side by side.")] = False,
    listing: Annotated[bool, typer.Option("--list", help="List the probes and controls.")] = False,
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
    """Show by causal ablation what the memory does: base, graft, memory off, shuffled addresses, open gates, LoRA off."""
    quiet()
    given = directories or []
    if listing:
        _list(json)
        return
    if compare:
        for option, value in (("--data", data), ("--only", only), ("--controls", controls), ("--control", control)):
            if value:
                raise UserError(
                    f"{option} with --compare: that reads what earlier probes wrote; probe each graft with {option} first"
                )
        _compare(given, output, json)
        return
    if len(given) != 1:
        raise UserError(f"{len(given)} directories: name one graft directory to probe, or several with --compare")
    from engram_graft.hub import on_hub
    from engram_graft.integrity import CONFIG_FILE

    if on_hub(given[0]) and output is None:
        raise UserError(f"{given[0]} is on the hub: name a directory here for its report with --output")
    directory = local(given[0])

    target = Path(output or directory)
    if target.resolve() != Path(directory).resolve() and (target / CONFIG_FILE).exists():
        raise UserError(f"--output {output}: is another graft, whose results these would replace; choose a directory of its own")
    for option, value in (("--data", data), ("--only", only)):
        if value and target.resolve() == Path(directory).resolve():
            raise UserError(
                f"{option} needs --output DIR: the graft's own probes.json has all probes of the data it was trained on"
            )
    from engram_graft.data import load_data
    from engram_graft.examples import training_data
    from engram_graft.probes import CONTROLS, Subject, pick_probes

    recipe = trained_by(directory) if data is None else recorded_recipe(directory)
    probes = pick_probes([name.strip() for name in only.split(",")] if only else None)
    names = list(CONTROLS) if controls else control or []
    if unknown := [name for name in names if name not in CONTROLS]:
        raise UserError(f"--control {unknown[0]!r}: there is none; the controls are {', '.join(CONTROLS)}")
    options = recipe.probe
    options = dataclasses.replace(
        options, batch_size=options.batch_size if batch_size is None else batch_size, examples=show_examples
    )
    facts = load_data(data) if data else training_data(recipe)
    if names and data:
        training_data(trained_by(directory))  # what the controls are trained on has to be there
    model, tokenizer = open_graft(directory, device, dtype, table_tier, table_dir)
    subject = Subject(model, tokenizer, facts, options, recipe.train, trained=data is None)
    report = probe_into(subject, Path(directory), target, {}, data or recipe.data, probes, recipe if names else None, names)
    if json:
        emit(report)
    else:
        show(report, options.examples)
        say(f"report    {target / 'report.html'}")


def recorded_recipe(directory: str) -> Any:
    """The recipe that lies in a graft directory; the default one where there is none."""
    from engram_graft.recipe import Recipe, load_recipe

    path = Path(directory) / "recipe.yaml"
    return load_recipe(path) if path.is_file() else Recipe()


def trained_by(directory: str) -> Any:
    """The recipe in a graft directory, which has to name its data."""
    recipe = recorded_recipe(directory)
    if recipe.data is None:
        raise UserError(f"{directory}: no recipe.yaml that names its data; pass --data")
    return recipe


def _list(json: bool) -> None:
    from engram_graft.probes import CONTROLS, PROBES

    parts = {
        "probes": {probe.name: probe.about for probe in PROBES},
        "controls": {name: control.about for name, control in CONTROLS.items()},
    }
    if json:
        emit(parts)
        return
    for part, lines in parts.items():
        print(part)
        for name, about in lines.items():
            print(f"  {name:<14}{about}")


def _compare(directories: Sequence[str], output: str | None, json: bool) -> None:
    """Print, and write into `output`, what several probes.json say of the same things."""
    import json as json_format

    from engram_graft.output import all_or_nothing
    from engram_graft.probes.compare import compare, write_compare

    if len({Path(directory).resolve() for directory in directories}) < max(2, len(directories)):
        raise UserError(f"--compare {' '.join(directories)}: name two or more grafts, each once")
    reports = {}
    for directory in directories:
        path = Path(directory) / "probes.json"
        if not path.is_file():
            raise UserError(f"{path}: not there; probe the graft first (engram-graft probe {directory})")
        try:
            reports[directory] = json_format.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise UserError(f"{path}: not JSON ({error}); probe the graft again") from error
        arms = reports[directory].get("arms") if isinstance(reports[directory], dict) else None
        if not isinstance(arms, dict) or not all(isinstance(arms.get(arm), dict) for arm in ("base", "graft")):
            raise UserError(f"{path}: no report of engram-graft (no scores of the arms base and graft); probe the graft again")
    compared = compare(reports)
    if output is not None:
        with all_or_nothing(Path(output)) as files:
            (files / "compare.json").write_text(json_format.dumps(compared, indent=1) + "\n", encoding="utf-8")
            write_compare(reports, files / "compare.html")
    if json:
        emit(compared)
    else:
        show_comparison(compared)
        if output is not None:
            say(f"report    {Path(output) / 'compare.html'}")


def probe_into(
    subject: Any,
    graft: Path,
    output: Path,
    checks: dict[str, Any],
    source: str | None,
    probes: Sequence[Any] | None = None,
    recipe: Any = None,
    controls: Sequence[str] = (),
) -> dict[str, Any]:
    """Run the probes, and the controls of `recipe`, and write probes.json and report.html into `output`, with the checks and curves
    that the directory `graft` has."""
    import json

    from engram_graft.probes import PROBES, run_controls, run_probes

    try:
        before = json.loads(path.read_text()) if (path := graft / "probes.json").is_file() else {}
        kept = {key: before[key] for key in ("identity", "decoding") if key in before}
        if (path := graft / "identity.json").is_file():
            kept["identity"] = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise UserError(f"{path}: not JSON ({error.msg}); remove it and probe again") from error
    probes = PROBES if probes is None else probes
    report = run_probes(subject, probes, lambda name: say(f"probe     {name}")) | kept | checks
    report["data"]["source"] = source
    if "identity" in report:
        report["identity"] = {key: report["identity"][key] for key in ("bitwise", "logits")}
    _write(report, graft, output)
    if controls:  # they take as long as training did: what was measured until here is safe
        arms, report["controls"] = run_controls(subject, recipe, probes, controls, lambda name: say(f"control   {name}"))
        report["arms"] |= arms
        _write(report, graft, output)
    return report


def _write(report: dict[str, Any], graft: Path, output: Path) -> None:
    """probes.json, report.html and, of a graft, its model card; the report gets its verdict and warnings."""
    import json

    from engram_graft.card import model_card
    from engram_graft.integrity import CONFIG_FILE, read_description
    from engram_graft.output import all_or_nothing
    from engram_graft.probes import conclude
    from engram_graft.probes.report import write_report

    conclude(report)
    with all_or_nothing(output) as files:
        (files / "probes.json").write_text(json.dumps(report, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        write_report(report, graft / "metrics.jsonl", files / "report.html")
    if (output / CONFIG_FILE).is_file():
        (output / "README.md").write_text(model_card(output, read_description(output)), encoding="utf-8")
