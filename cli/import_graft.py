"""`engram-graft import`: the memory of a checkpoint, put on a base as a graft directory."""

from pathlib import Path
from typing import Annotated, Any

import typer

from engram_graft.cli.common import Dtype, Json, TableDir, emit, examples, parse_layers, quiet
from engram_graft.errors import UserError

HELP_END = examples(
    "engram-graft import Qwen4-Exp --base my-base --output runs/qwen",
    "engram-graft import DeepSeek-V4.1 --base my-base --layers 2,6 --table-dir tables --output runs/deepseek",
    "engram-graft import runs/merged --output runs/again",
)


def command(
    checkpoint: Annotated[
        str, typer.Argument(help="A directory: a checkpoint of qwen4_exp or DeepSeek-V4.1, or what export wrote.")
    ],
    output: Annotated[str, typer.Option(help="Directory to make; must not exist or be empty.")],
    base: Annotated[
        str | None, typer.Option(help="Hub id, directory, .gguf file or alias of the base that gets the memory.")
    ] = None,
    layers: Annotated[
        str | None,
        typer.Option(help="Layers of the base to put it in front of, counted from 0.", show_default="the memory's own"),
    ] = None,
    dtype: Dtype = None,
    table_dir: TableDir = None,
    json: Json = False,
) -> None:
    """Put the memory of a checkpoint on a base, where its geometry fits."""
    from engram_graft.output import require_free

    source = Path(checkpoint)
    if not source.is_dir():
        raise UserError(f"checkpoint {checkpoint!r}: no such directory; give one with config.json and safetensors in it")
    require_free(output)
    quiet()
    result = (
        _merged(source, Path(output), base=base, layers=layers, dtype=dtype, table_dir=table_dir)
        if _is_merged(source)
        else _pretrained(source, output, base, layers, dtype, table_dir)
    )
    if json:
        emit(result)
        return
    print(f"import    {result['layout']}: layers {result['layers']}, {result['rows']:,} rows")
    print(f"base      {result['base']}")
    print(f"files     {output}: {', '.join(sorted(path.name for path in Path(output).iterdir()))}")
    print(f'next      engram-graft generate {output} --prompt "..."')


def _is_merged(source: Path) -> bool:
    from engram_graft.files import read_config
    from engram_graft.integrity import CONFIG_FILE

    return (source / CONFIG_FILE).is_file() and bool(read_config(source)["merged"])


def _merged(source: Path, output: Path, **options: str | None) -> dict[str, Any]:
    from engram_graft.repack import repack

    if given := [f"--{name.replace('_', '-')}" for name, value in options.items() if value is not None]:
        raise UserError(
            f"{source} is a merged directory, whose memory stays as it is, on its own base: leave out {', '.join(given)}"
        )
    return {"layout": "merged", **repack(source, output)}


def _pretrained(
    source: Path, output: str, base: str | None, layers: str | None, dtype: str | None, table_dir: str | None
) -> dict[str, Any]:
    from engram_graft.bases import load_base
    from engram_graft.checkpoint import save_graft
    from engram_graft.grafted import find_graft, memories
    from engram_graft.layouts import import_memory, recognise
    from engram_graft.output import new_directory

    recognise(source)  # before a base is loaded
    if base is None:
        raise UserError("give --base: the model that is to get the memory")
    model, tokenizer = load_base(base, dtype or "float32")
    layout = import_memory(source, model, tokenizer, parse_layers(layers) if layers else None, table_dir)
    with new_directory(output) as target:
        save_graft(model, target)
    return {
        "layout": layout,
        "base": base,
        "layers": list(find_graft(model).config.layer_ids),
        "rows": sum(len(memory.table.weight) for memory in memories(model)),
    }
