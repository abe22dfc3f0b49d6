"""`engram-graft export`: one Hugging Face directory with LoRA merged and the memory beside the base."""

from typing import Annotated

import typer

from engram_graft.cli.common import Device, Json, RecordedDtype, emit, examples, open_graft, quiet

HELP_END = examples(
    "engram-graft export runs/demo --output runs/demo-merged",
    "engram-graft export runs/demo --output m --dtype bfloat16 --json",
)


def command(
    directory: Annotated[str, typer.Argument(help="A graft directory.")],
    output: Annotated[str, typer.Option(help="Directory to make; must not exist or be empty.")],
    dtype: RecordedDtype = None,
    max_shard_size: Annotated[str, typer.Option(help="Largest safetensors file.")] = "5GB",
    device: Device = None,
    json: Json = False,
) -> None:
    """Export merged safetensors, reload them and compare; a failed check leaves no directory behind."""
    from engram_graft.export import export_merged
    from engram_graft.output import require_free

    quiet()
    require_free(output)
    model, tokenizer = open_graft(directory, device, dtype)
    report = export_merged(model, tokenizer, output, max_shard_size)
    if json:
        emit(report)
        return
    print(f"written   {output}: {report['bytes'] / 1e6:.0f} MB")
    print(f"reloaded  every tensor bit for bit; max logit difference to the unmerged model {report['max_difference']:.2g}")
    print(f"flips     {report['flips']} of {report['positions']} positions have another most likely token")
    print(
        f'load      engram_graft.load_graft("{output}"); AutoModelForCausalLM opens it as the base with LoRA merged, without memory'
    )
