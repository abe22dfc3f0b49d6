"""`engram-graft export`: one Hugging Face directory with LoRA merged and the memory beside the base, or the memory alone."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from engram_graft.cli.common import Device, Json, TableDir, TableTier, emit, examples, local, open_graft, quiet, say
from engram_graft.errors import UserError

if TYPE_CHECKING:
    from engram_graft.encode import Question

HELP_END = examples(
    "engram-graft export runs/demo --output runs/demo-merged",
    "engram-graft export runs/demo --output m --dtype bfloat16 --table-dtype float8 --json",
    "engram-graft export runs/demo --output pack --adapter-only",
    "engram-graft export runs/qwen --output ple --layout qwen4_exp",
)


def command(
    directory: Annotated[str, typer.Argument(help="A graft directory, or a hub id.")],
    output: Annotated[str, typer.Option(help="Directory to make; must not exist or be empty.")],
    dtype: Annotated[
        str | None, typer.Option(help="Of the base's weights: float32, bfloat16 or float16; by default as they are.")
    ] = None,
    max_shard_size: Annotated[str, typer.Option(help="Largest safetensors file.")] = "5GB",
    tables: Annotated[str, typer.Option(help="sparse: the learned rows; dense: every row.")] = "sparse",
    table_dtype: Annotated[str | None, typer.Option(help="Of the tables: float32, bfloat16, float16 or float8.")] = None,
    layout: Annotated[
        str | None, typer.Option(help="Only the memory, as checkpoints of qwen4_exp or deepseek_v41 have it.")
    ] = None,
    adapter_only: Annotated[bool, typer.Option(help="The memory and LoRA without the base, as a graft directory.")] = False,
    table_tier: TableTier = None,
    table_dir: TableDir = None,
    device: Device = None,
    json: Json = False,
) -> None:
    """Export safetensors, reopen them and compare, with the facts the graft was trained on if they are there; a failed check leaves
    no directory behind."""
    from engram_graft.output import require_free

    quiet()
    require_free(output)
    directory = local(directory)
    if layout is not None:
        others = {"dtype": dtype, "table_dtype": table_dtype, "adapter_only": adapter_only, "tables": tables != "sparse"}
        others |= {"max_shard_size": max_shard_size != "5GB", "table_tier": table_tier, "table_dir": table_dir, "device": device}
        _refuse_beside("--layout", **others)
        _as_layout(directory, layout, output, json)
        return
    if adapter_only:
        _refuse_beside("--adapter-only", dtype=dtype, tables=tables != "sparse", max_shard_size=max_shard_size != "5GB")
        report = _memory_alone(directory, output, table_dtype, device, table_tier, table_dir)
    else:
        report = _merged(directory, output, dtype, max_shard_size, tables, table_dtype, device, table_tier, table_dir)
    if json:
        emit(report)
        return
    tables_mb = f"{report['table_bytes'] / 1e6:.1f} MB of them tables"
    print(f"written   {output}: {report['bytes'] / 1e6:.1f} MB, {tables_mb}; every tensor read back bit for bit")
    if "max_difference" in report:
        print_difference(report)
    print(f"open      {_call(output, adapter_only)}")


def _refuse_beside(option: str, **others: Any) -> None:
    for name, given in others.items():
        if given:
            raise UserError(f"--{name.replace('_', '-')} has no meaning with {option}: leave one of them out")


def _as_layout(directory: str, layout: str, output: str, json: bool) -> None:
    from engram_graft.layouts import write_layout

    report = write_layout(directory, layout, output)
    if json:
        emit(report)
        return
    print(
        f"written   {output}: {report['bytes'] / 1e6:.1f} MB, layers {report['layers']}, {report['rows']:,} rows as {layout} has them"
    )
    print(f"rounding  {report['rounding']:.2g} at most of a number written")
    if report["adapter"]:
        print("lora      not written: the layout holds the memory alone")


def print_difference(report: dict[str, Any]) -> None:
    """How far what was written is from the graft."""
    print(
        f"compared  with the graft: logits differ by up to {report['max_difference']:.2g}, {report['flips']} of {report['positions']} "
        f"most likely tokens differ, KL {report['kl']:.2g}"
    )
    if "questions" in report:
        print(
            f"asked     {report['questions']} facts: {report['same_answers']} answers of the same tokens, recall "
            f"{report['recall_before']:.1%} before, {report['recall_after']:.1%} after"
        )


def _call(output: str, adapter_only: bool) -> str:
    if adapter_only:
        return f'engram_graft.load_graft("{output}")'
    return (
        f'AutoModelForCausalLM.from_pretrained("{output}", trust_remote_code=True); without that flag the base with LoRA merged'
    )


def _merged(directory: str, output: str, dtype: Any, size: str, tables: str, table_dtype: Any, *where: Any) -> dict[str, Any]:
    from engram_graft.export import export_merged

    device, table_tier, table_dir = where
    model, tokenizer = open_graft(directory, device, None, table_tier, table_dir)
    return export_merged(
        model,
        tokenizer,
        output,
        size,
        dtype=dtype,
        tables=tables,
        table_dtype=table_dtype,
        questions=_questions(directory),
        results=directory,
    )


def _memory_alone(directory: str, output: str, table_dtype: str | None, *where: Any) -> dict[str, Any]:
    """The memory apart; where its tables are coded, what that changes."""
    from engram_graft.agreement import difference, measure
    from engram_graft.files import read_graft
    from engram_graft.output import new_directory
    from engram_graft.repack import repack
    from engram_graft.restore import fill

    if table_dtype is None:
        return repack(directory, output)
    device, table_tier, table_dir = where
    model, tokenizer = open_graft(directory, device, None, table_tier, table_dir)
    questions = _questions(directory)
    before = measure(model, tokenizer, questions)
    with new_directory(output):
        report: dict[str, Any] = dict(repack(directory, output, table_dtype))
        fill(model, read_graft(Path(output))[2])
        return report | difference(before, measure(model, tokenizer, questions))


def _questions(directory: str) -> "list[Question]":
    """A prompt of each fact that the graft was trained on, and its answer; none where its recipe names no data, or they are gone."""
    from engram_graft.cli.probe import recorded_recipe
    from engram_graft.examples import fact_questions, training_data

    recipe = recorded_recipe(directory)
    if recipe.data is None:
        return []
    try:
        return fact_questions(training_data(recipe))
    except UserError as error:
        say(f"facts     not asked: {error}")
        return []
