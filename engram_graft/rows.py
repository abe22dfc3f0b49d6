"""The table of an exported model: the rows that training looked up, to be read and fine-tuned like any parameter.

It learns no further n-grams, so it needs no sparse gradients, no optimizer of its own and nothing of the training engine.
"""

from typing import Any

import torch
from torch import Tensor, nn

from engram_graft.codes import CODES, decode, scales
from engram_graft.config import EngramConfig
from engram_graft.initial import initial_rows, row_seed

TABLES = ("sparse", "dense")


class LearnedRows(nn.Module):
    """A layer's trained table. Reads as `EngramTable` does outside training, bit for bit where its values were not coded.

    Args:
        config: of the memory.
        layer_id: the layer it belongs to.
        total: rows of the table.
        stored: rows that training looked up.
        layout: "sparse" stores these rows and their numbers, found by bisection; "dense" stores every row and a bit for each.
        code: how the values are stored, one of `CODES`.
        device: where the tensors are made.
    """

    learning = False  # as the layer asks of a table
    values: Tensor
    scale: Tensor | None
    rows: Tensor | None
    seen: Tensor | None

    def __init__(
        self, config: EngramConfig, layer_id: int, total: int, stored: int, layout: str, code: str, device: torch.device
    ):
        super().__init__()
        self.n_head, self.seen_filter = config.n_head_per_ngram, config.seen_filter
        self.seed, self.dtype = row_seed(config, layer_id), getattr(torch, config.dtype)
        count = stored if layout == "sparse" else total
        values = torch.zeros(count, config.head_dim, dtype=CODES[code], device=device)
        scale = rows = seen = None
        if code == "float8":
            self.register_buffer("values", values)
            scale = torch.ones(count, scales(config.head_dim), dtype=torch.float8_e8m0fnu, device=device)
        else:
            self.values = nn.Parameter(values)
        if layout == "sparse":
            rows = torch.zeros(count, dtype=torch.int64, device=device)
        else:
            seen = torch.zeros((total + 7) // 8, dtype=torch.uint8, device=device)
        for name, tensor in (("scale", scale), ("rows", rows), ("seen", seen)):
            self.register_buffer(name, tensor)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """As modules do, but float8 values and their scales are codes: `model.half()` moves them at most."""
        codes = {} if self.scale is None else {"values": self.values, "scale": self.scale}
        super()._apply(fn, recurse)
        for name, tensor in codes.items():
            if (cast := getattr(self, name)).dtype != tensor.dtype:
                setattr(self, name, tensor.to(cast.device))
        return self

    def forward(self, rows: Tensor, allowed: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Look up `rows` `[B, T, orders*heads]`: as `EngramTable.forward`."""
        read, seen = self._read(rows)
        active = allowed
        if self.seen_filter:
            known = seen.unflatten(-1, (-1, self.n_head)).all(-1)
            active = known if allowed is None else known & allowed
        else:
            read = torch.where(seen[..., None], read, self._initial(rows))
        if active is not None:
            read = read.masked_fill(~active.repeat_interleave(self.n_head, -1)[..., None], 0)
        return read.flatten(-2), active

    def _read(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The rows' values `[..., head_dim]`, and which of the rows training looked up; what the others' values are is left open."""
        if self.seen is not None:
            at, seen = rows, ((self.seen[rows >> 3] >> (rows & 7).to(torch.uint8)) & 1).bool()
        else:
            assert self.rows is not None
            if not len(self.rows):
                return self.values.new_zeros(*rows.shape, self.values.shape[1], dtype=self.dtype), torch.zeros_like(rows).bool()
            at = torch.searchsorted(self.rows, rows.contiguous()).clamp_max(len(self.rows) - 1)
            seen = self.rows[at] == rows
        return decode(self.values[at], None if self.scale is None else self.scale[at], self.dtype), seen

    def _initial(self, rows: Tensor) -> Tensor:
        if self.seed is None:
            return torch.zeros((), dtype=self.dtype, device=rows.device)
        return initial_rows(rows, self.values.shape[1], self.seed, self.dtype)
