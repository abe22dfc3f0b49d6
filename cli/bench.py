"""`engram-graft bench`: what a memory costs on this machine, as a table, bench.json and a picture."""

import json as json_
from pathlib import Path
from typing import Annotated, Any

import typer

from engram_graft.cli.common import Device, Dtype, Json, emit, examples, parse_layers, pick_device, quiet, say
from engram_graft.errors import UserError

HELP_END = examples(
    "engram-graft bench --base smollm2 --layers 2,6",
    "engram-graft bench --base smollm2 --rows 100000,100000000 --rounds 9 --json",
    "engram-graft bench --base smollm2 --table-dir /scratch/tables --mapped-rows 1000000000 --output runs/bench",
)


def command(
    base: Annotated[str, typer.Option(help="Hub id, directory, .gguf file or alias.")],
    layers: Annotated[str, typer.Option(help="Layers that get a memory, counted from 0.")] = "2,6",
    rows: Annotated[
        str, typer.Option(help="Table sizes whose training steps are compared: rows of all tables together.")
    ] = "100000,1000000,10000000,100000000",
    table_dir: Annotated[
        str | None, typer.Option(help="Also compare tables in files, made here and deleted at the end, with tables in memory.")
    ] = None,
    mapped_rows: Annotated[
        int | None, typer.Option(help="Rows of the tables in files.", show_default="the largest of --rows")
    ] = None,
    rounds: Annotated[int, typer.Option(help="Times that the sides take turns.")] = 5,
    output: Annotated[str | None, typer.Option(help="Directory for bench.json and bench.png.")] = None,
    dtype: Dtype = None,
    device: Device = None,
    json: Json = False,
) -> None:
    """Time decoding, hashing and training steps, and weigh the tables: ratios of turns taken in one run, medians."""
    if rounds < 1:
        raise UserError(f"--rounds {rounds}: must be 1 or more")
    try:
        sizes = [int(float(size)) for size in rows.split(",")]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 1000:
        raise UserError(f"--rows {rows!r}: give numbers of 1000 or more with commas between, e.g. 100000,1e8")
    if mapped_rows is not None and (table_dir is None or mapped_rows < 1000):
        raise UserError(f"--mapped-rows {mapped_rows}: must be 1000 or more, with --table-dir")
    quiet()
    from engram_graft.bases import load_base
    from engram_graft.cli import bench_timing as timing

    model: Any
    model, tokenizer = load_base(base, dtype or "float32")
    model.to(pick_device(device))
    places = parse_layers(layers)
    report: dict[str, Any] = {"base": base, "rounds": rounds, "prompt_tokens": timing.PROMPT_TOKENS}
    say("decoding  grafted and bare in turns")
    report |= timing.overhead(model, tokenizer, places, rounds)
    report["hashing"] = timing.hashing(model, tokenizer, places, rounds)
    say("training  steps of 512 tokens on tables of each size in turns")
    report["training"] = timing.steps_by_rows(model, tokenizer, places, sizes, rounds)
    if table_dir is not None:
        say("files     filling tables in files, then files and memory in turns")
        mapped = mapped_rows or max(sizes)
        report["tiers"] = timing.tiers(model, tokenizer, places, min(mapped, max(sizes)), mapped, Path(table_dir), rounds)
    if output is not None:
        from engram_graft.cli.bench_plot import plot
        from engram_graft.output import all_or_nothing

        with all_or_nothing(output) as files:
            (files / "bench.json").write_text(json_.dumps(report, indent=1) + "\n", encoding="utf-8")
            plot(report, files / "bench.png")
        say(f"written   {output}: bench.json, bench.png")
    if json:
        emit(report)
    else:
        _show(report)


def _show(report: dict[str, Any]) -> None:
    for part, what in (("step", "one decode step"), ("prefill", f"prefill of {report['prompt_tokens']} tokens")):
        row = report[part]
        print(f"{what:<26}base {row['base_ms']:8.2f} ms")
        for side, of, key in (("graft", "every n-gram known", "ratio"), ("silent", "no n-gram known", "silent_ratio")):
            print(f"{'  ' + of:<26}graft{row[side + '_ms']:8.2f} ms   graft/base {row[key]:.3f}")
    hashing = report["hashing"]
    print(
        f"hashing, one thread       {hashing['us_per_token']:.3f} us a token for {hashing['rows_per_token']} rows "
        f"(host path {hashing['host_us_per_token']:.3f})"
    )
    print("training step, 512 tokens, rows of 8 channels")
    for size in report["training"]["sizes"]:
        print(
            f"  {size['rows']:>13,} rows      {size['step_ms']:8.0f} ms   tables {size['table_bytes'] / 1e6:8,.0f} MB, memory beyond the "
            f"base {size['memory_bytes'] / 1e6:8,.0f} MB, {size['rows_touched']:,} rows touched"
        )
    print(f"  slowest/fastest         {report['training']['ratio']:.3f}")
    if tiers := report.get("tiers"):
        print(
            f"tables in files           {_size(tiers['mapped_bytes'])}, in memory {_size(tiers['resident_bytes'])}; tokens a second"
        )
        for part in ("training", "inference", "decoding"):
            entry = tiers[part]
            print(
                f"  {part:<24}files {entry['mapped']:8.1f}   memory {entry['resident']:8.1f}   speed, files/memory {entry['ratio']:.3f}"
            )


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
