"""A table as files have it: the rows that were learned, or every row and a bit for each; in any of the codes."""

from collections.abc import Mapping

import torch
from torch import Tensor

from engram_graft.codes import CODES, decode, encode, scales
from engram_graft.errors import UserError
from engram_graft.initial import initial_rows
from engram_graft.table import CHUNK, EngramTable, set_bits


@torch.no_grad()
def stored_table(table: EngramTable, layout: str, code: str) -> dict[str, Tensor]:
    """The tensors of a table: "values" (and "scale" with float8), with "rows" if sparse, with "seen" if dense."""
    rows, values = table.saved_rows()
    if layout == "sparse":
        return {"rows": rows, **encode(values, code)}
    return {"seen": table.seen.clone(), **encode(every_row(rows.cpu(), values.cpu(), len(table.weight), table.seed), code)}


def every_row(rows: Tensor, values: Tensor, total: int, seed: int | None) -> Tensor:
    """`[total, dim]`: `values` `[n, dim]` at `rows`, all other rows as they start."""
    dim, dtype = values.shape[1], values.dtype
    table = torch.zeros(total, dim, dtype=dtype)
    if seed is not None and len(rows) < total:
        for start in range(0, total, CHUNK):
            at = torch.arange(start, min(start + CHUNK, total))
            table[at] = initial_rows(at, dim, seed, dtype)
    table[rows] = values
    return table


def learned_rows(
    name: str, tensors: Mapping[str, Tensor], layout: str, code: str, total: int, dim: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """What `EngramTable.load_rows` takes, from the tensors of `stored_table`.

    Args:
        name: what the tensors' names begin with: "layers.2.table".
        total, dim: rows and channels of the table they belong to.
        dtype: of the values wanted.

    Raises:
        UserError: a tensor is missing, or has another shape or dtype than `layout`, `code` and the table say.
    """
    index = "rows" if layout == "sparse" else "seen"
    leaves = [index, "values", *(["scale"] if code == "float8" else [])]
    if missing := [f"{name}.{leaf}" for leaf in leaves if f"{name}.{leaf}" not in tensors]:
        raise UserError(f"missing {', '.join(missing)}")
    found = {leaf: tensors[f"{name}.{leaf}"] for leaf in leaves}
    wanted: dict[str, tuple[torch.dtype, list[int]]] = {"values": (CODES[code], [total, dim])}
    if layout == "sparse":
        count = found["rows"].numel()
        wanted = {"rows": (torch.int64, [count]), "values": (CODES[code], [count, dim])}
    else:
        wanted["seen"] = (torch.uint8, [(total + 7) // 8])
    if code == "float8":
        wanted["scale"] = (torch.float8_e8m0fnu, [wanted["values"][1][0], scales(dim)])
    for leaf, (kind, shape) in wanted.items():
        if found[leaf].dtype != kind or list(found[leaf].shape) != shape:
            raise UserError(f"{name}.{leaf} is {found[leaf].dtype} {list(found[leaf].shape)}, not {kind} {shape}")
    rows = found["rows"] if layout == "sparse" else set_bits(found["seen"])
    if len(rows) and not 0 <= int(rows[-1]) < total:
        raise UserError(f"{name}.{index} goes up to {int(rows[-1])}, its primes add up to {total} rows")
    values, scale = found["values"], found.get("scale")
    if layout == "dense":
        values, scale = values[rows], None if scale is None else scale[rows]
    return rows, decode(values, scale, dtype)
