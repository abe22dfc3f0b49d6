"""`engram-graft inspect`: what a memory would cost on a base, or what a trained one holds; no weights of the base are loaded."""

from pathlib import Path
from typing import Annotated, Any

import typer

from engram_graft.cli.common import Json, emit, examples, parse_layers, quiet
from engram_graft.errors import UserError

HELP_END = examples(
    "engram-graft inspect smollm2 --layers 2,6",
    "engram-graft inspect smollm2 --set n_head_per_ngram=4",
    "engram-graft inspect runs/demo",
)


def command(
    source: Annotated[str, typer.Argument(help="A graft directory, or a base (hub id, directory, .gguf file, alias).")],
    layers: Annotated[str, typer.Option(help="For a base: layers, counted from 0.")] = "2,6",
    setting: Annotated[
        list[str] | None, typer.Option("--set", help="For a base: any memory option, e.g. n_head_per_ngram=4.")
    ] = None,
    json: Json = False,
) -> None:
    """Geometry, vocabulary before and after compression, parameters and bytes; for a trained graft row coverage and collisions."""
    quiet()
    from engram_graft.hub import find

    directory = find(source)
    report = _base(source, parse_layers(layers), setting or []) if directory is None else _graft(directory)
    if json:
        emit(report)
        return
    for key, value in report.items():
        if not isinstance(value, list):
            print(f"{key:<18}{value:,}" if type(value) is int else f"{key:<18}{value}")
    _print_layers(report["layers"])


def _print_layers(layers: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table()
    for column in layers[0]:
        table.add_column(column.replace("_", " "), justify="right")
    for layer in layers:
        table.add_row(
            *(f"{v:,}" if isinstance(v, int) else f"{v:.4g}" if isinstance(v, float) else str(v) for v in layer.values())
        )
    Console().print(table)


def _base(name: str, layers: list[int], settings: list[str]) -> dict[str, Any]:
    from engram_graft.bases import load_config, load_tokenizer
    from engram_graft.compress import compress, lookup_of
    from engram_graft.config import EngramConfig
    from engram_graft.plan import plan_hashes
    from engram_graft.recipe import parse_setting

    config = EngramConfig.from_dict({"layer_ids": layers, **dict(parse_setting(text) for text in settings)})
    base = load_config(name).get_text_config(decoder=True)
    if max(config.layer_ids) >= base.num_hidden_layers:
        raise UserError(
            f"layer {max(config.layer_ids)} does not exist: {name} has layers 0 to {base.num_hidden_layers - 1} (counted from 0)"
        )
    token_map = compress(load_tokenizer(name))
    plan = plan_hashes(config, *lookup_of(config.addresses, token_map, base.vocab_size), 0)
    itemsize = {"float32": 4, "bfloat16": 2, "float16": 2}[config.dtype]
    embed, width = config.orders * config.n_embed_per_ngram, base.hidden_size
    dense = width * (embed * (config.hc_mult + 1) + 2 * config.hc_mult)
    dense += width * config.hc_mult * (config.kernel_size + 1) if config.conv else 0
    dense += width * (config.hc_mult + 1) if config.bias else 0
    rows = [
        {"layer": layer, "rows": n, "table_parameters": n * config.head_dim, "dense_parameters": dense}
        for layer, n in zip(config.layer_ids, plan.table_rows, strict=True)
    ]
    total = sum(row["table_parameters"] + row["dense_parameters"] for row in rows)
    return {
        "base": name,
        **_vocabulary(len(token_map.lookup), token_map.size),
        "heads_a_layer": config.heads,
        "head_dim": config.head_dim,
        "parameters": total,
        "bytes": total * itemsize,
        "optimizer_bytes": f"{8 * dense * len(rows):,} and {8 * config.head_dim + 8} a row touched",
        "layers": rows,
    }


def _vocabulary(ids: int, compressed: int) -> dict[str, Any]:
    return {"vocabulary": ids, "compressed": compressed, "saved": f"{1 - compressed / ids:.1%}"}


def _graft(directory: Path) -> dict[str, Any]:
    import torch

    from engram_graft.files import read_graft

    described, config, tensors, plan = read_graft(directory)
    heads, rows = config.n_head_per_ngram, []
    for index, layer in enumerate(config.layer_ids):
        seen, primes = tensors[f"layers.{layer}.table.rows"], plan.primes[index].tolist()
        starts = torch.searchsorted(seen, torch.tensor([0, *plan.primes[index].cumsum().tolist()]))
        counts = starts.diff().tolist()
        filled = [count / prime for count, prime in zip(counts, primes, strict=True)]
        for order in range(2, config.max_ngram_size + 1):
            shares = filled[(order - 2) * heads : (order - 1) * heads]
            rows.append(
                {
                    "layer": layer,
                    "order": order,
                    "rows": sum(primes[(order - 2) * heads : (order - 1) * heads]),
                    "seen_rows": sum(counts[(order - 2) * heads : (order - 1) * heads]),
                    "coverage_min": min(shares),
                    "coverage_max": max(shares),
                    "false_positives": float(torch.tensor(shares, dtype=torch.float64).prod()),
                }
            )
    return {
        "graft": str(directory),
        "base": described["base"]["name"],
        "merged": described["merged"],
        **_vocabulary(described["tokenizer"]["ids"], described["tokenizer"]["compressed"]),
        "parameters": sum(plan.table_rows) * config.head_dim
        + sum(t.numel() for name, t in tensors.items() if t.is_floating_point() and not name.endswith("table.values")),
        "layers": rows,
    }
