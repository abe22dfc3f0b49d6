"""The memory's table: one row a head and hash value, which of them training has looked up, and the look-up itself.

A row has an initial value that is a pure function of the seed, the layer and the row, and is written when training first looks it up;
until then what its place in the array holds is of no account. So memory, files and copies follow the rows touched: `state_dict` holds
these alone.
"""

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engram_graft.errors import UserError
from engram_graft.initial import initial_rows
from engram_graft.read_ahead import in_background
from engram_graft.storage import Resident

CHUNK = 2**20  # rows that are saved, loaded or copied at a time


class EngramTable(nn.Module):
    """Rows of all heads of one layer, concatenated; gradients are sparse, so a step costs what it touches.

    An n-gram is *seen* when the rows of all heads of its order were looked up in training: the heads are a Bloom filter whose
    false positives are occupancy**heads. With `seen_filter` an unseen n-gram reads exact zeros at inference.

    Args:
        rows: rows in total.
        head_dim: channels of a row.
        n_head: heads an order has.
        seen_filter: filter at inference (never while learning).
        dtype, device: of the rows; a table in files is on the CPU, and what it gives follows the rows asked for.
        seed: of the initial values; None starts every row at zero.
        storage: memory by default.
        name: of the table's file, where `storage` has files.
    """

    seen: Tensor

    def __init__(
        self,
        rows: int,
        head_dim: int,
        n_head: int,
        seen_filter: bool,
        dtype: torch.dtype,
        device: torch.device,
        seed: int | None = None,
        storage: Resident | None = None,
        name: str = "table",
    ):
        super().__init__()
        self.storage = storage or Resident()
        device = torch.device("cpu") if self.storage.on_disk else device
        self.weight = nn.Parameter(self.storage.empty(name, (rows, head_dim), dtype, device))  # to be read only where seen
        self.register_buffer("seen", torch.zeros((rows + 7) // 8, dtype=torch.uint8, device=device))  # one bit a row
        self.n_head, self.seen_filter, self.seed, self.name = n_head, seen_filter, seed, name
        self.recording = True  # whether learning look-ups count as such; checks that must leave no trace turn it off
        # sorted rows, and the row that is read in place of each; set by the "shuffled" probe only
        self.redirect: tuple[Tensor, Tensor] | None = None

    @property
    def learning(self) -> bool:
        """Whether this call is part of training: a module in train mode that only generates (no gradients) is not."""
        return self.training and torch.is_grad_enabled()

    def forward(self, rows: Tensor, allowed: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Look up `rows` `[B, T, orders*heads]`.

        Args:
            allowed: bool `[B or 1, T, orders]`, the n-grams that may be looked up and learned at all; None: every one.

        Returns:
            The embeddings `[B, T, orders*heads*head_dim]`, order-major, exact zeros where an n-gram does not contribute, and which
            ones contribute, bool `[B, T, orders]` (None: every one).
        """
        if self.learning and allowed is not None:
            # only these rows: what is not learned gets no gradient, not even a zero
            of_heads = allowed.repeat_interleave(self.n_head, -1).expand_as(rows)
            learned = self.read(rows[of_heads])
            embeddings = learned.new_zeros(*rows.shape, self.weight.shape[1]).index_put((of_heads,), learned)
            return embeddings.flatten(-2), allowed
        active = allowed
        if not self.learning and self.seen_filter:
            active = self.known(rows) if allowed is None else self.known(rows) & allowed
            embeddings = self._gather(rows)  # what is not seen is masked
        else:
            embeddings = self.read(rows)
        if active is not None:
            embeddings = embeddings.masked_fill(~active.repeat_interleave(self.n_head, -1)[..., None], 0)
        return embeddings.flatten(-2), active

    def read(self, rows: Tensor) -> Tensor:
        """The rows' values `[..., head_dim]`, learned or initial. In training the rows count as looked up from here on."""
        if self.learning and self.recording:
            self.touch(rows)
            return self._gather(rows)
        unseen = ~self.is_seen(rows)
        if not torch.compiler.is_compiling() and not bool(unseen.any()):
            return self._gather(rows)
        return torch.where(unseen[..., None], self.initial(rows), self._gather(rows))

    def _gather(self, rows: Tensor) -> Tensor:
        here = rows.to(self.weight.device)
        if self.redirect is not None and len(self.redirect[0]):
            source, target = self.redirect
            at = torch.searchsorted(source, here.contiguous()).clamp_max(len(source) - 1)
            here = torch.where(source[at] == here, target[at], here)
        return F.embedding(here, self.weight, sparse=True).to(rows.device)

    def prefetch(self, rows: Tensor) -> None:
        """Start reading `rows` if they are in files; while not training only those that were looked up, for no other counts."""
        if self.storage.on_disk:
            here = rows.reshape(-1).to(self.weight.device)
            here = here if self.training else here[self.is_seen(here)]
            if len(here):
                in_background(self.storage.prefetch, self.name, here, self.weight.shape[1] * self.weight.itemsize)

    def known(self, rows: Tensor) -> Tensor:
        """bool `[B, T, orders]`: the n-grams whose rows `[B, T, orders*heads]` were all looked up in training."""
        return self.is_seen(rows).unflatten(-1, (-1, self.n_head)).all(-1)

    def is_seen(self, rows: Tensor) -> Tensor:
        """bool, of the shape of `rows`: which were looked up in training."""
        here = rows.to(self.seen.device)
        return ((self.seen[here >> 3] >> (here & 7).to(torch.uint8)) & 1).bool().to(rows.device)

    @torch.no_grad()
    def touch(self, rows: Tensor) -> None:
        """Mark `rows` as looked up; those that were not get their initial values."""
        rows = rows.detach().reshape(-1).to(self.weight.device)
        new = rows[~self.is_seen(rows)].unique()
        if len(new):
            self.weight[new] = self.initial(new)
            self._mark(new)

    def _mark(self, rows: Tensor) -> None:
        """Set the bits of unseen `rows`, none of which comes twice: their sum is their union."""
        self.seen.index_add_(0, rows >> 3, torch.bitwise_left_shift(1, rows & 7).to(torch.uint8))

    @torch.no_grad()
    def initial(self, rows: Tensor) -> Tensor:
        """The initial values `[..., head_dim]` of `rows`."""
        dim, dtype = self.weight.shape[1], self.weight.dtype
        if self.seed is None:
            return torch.zeros(*rows.shape, dim, dtype=dtype, device=rows.device)
        return initial_rows(rows, dim, self.seed, dtype)

    def seen_rows(self) -> Tensor:
        """int64 `[n]`, sorted: the rows that training has looked up."""
        return set_bits(self.seen)

    def count_seen(self) -> int:
        """How many rows training has looked up."""
        return len(self.seen_rows())

    @torch.no_grad()
    def load_rows(self, rows: Tensor, values: Tensor, stored: bool = False) -> None:
        """Make `rows` (int64 `[n]`, increasing) the ones that were looked up, with these values `[n, head_dim]`, which the table's
        file has already if `stored`.

        Raises:
            UserError: they are not increasing, or beyond the table, or not as many as the values.
        """
        total, dim = self.weight.shape
        if rows.ndim != 1 or rows.dtype != torch.int64 or values.shape != (len(rows), dim) or values.dtype != self.weight.dtype:
            raise UserError(
                f"rows are {rows.dtype} {list(rows.shape)} with values {values.dtype} {list(values.shape)}; the table takes int64 [n] "
                f"and {self.weight.dtype} [n, {dim}]"
            )
        if len(rows) and (int(rows[0]) < 0 or int(rows[-1]) >= total or not all(bool((a < b).all()) for a, b in _pairs(rows))):
            raise UserError(f"row ids must increase from 0 to at most {total - 1}")
        self.seen.zero_()
        for start in range(0, len(rows), CHUNK):
            at = rows[start : start + CHUNK].to(self.weight.device)
            if not stored:
                self.weight[at] = values[start : start + CHUNK].to(self.weight.device)
            self._mark(at)

    @torch.no_grad()
    def load_all(self, pieces: Iterable[Tensor]) -> None:
        """Make every row one that was looked up, with the values that `pieces`, `[n, head_dim]` each, give in order. Raises `UserError`
        when they are not as many, or not finite."""
        start, total = 0, len(self.weight)
        for piece in pieces:
            if not bool(piece.isfinite().all()) or start + len(piece) > total:
                raise UserError(f"rows {start} to {start + len(piece) - 1} of {total} are not finite, or too many")
            self.weight[start : start + len(piece)] = piece.to(self.weight.device)
            start += len(piece)
        if start != total:
            raise UserError(f"{start} rows were given, the table has {total}")
        self.seen.fill_(255)
        self.seen[-1] = 2 ** ((total - 1) % 8 + 1) - 1  # no row beyond the last

    @torch.no_grad()
    def saved_rows(self) -> tuple[Tensor, Tensor]:
        """What `load_rows` takes: the rows looked up, sorted, and their values."""
        rows = self.seen_rows()
        values = self.storage.scratch((len(rows), self.weight.shape[1]), self.weight.dtype, self.weight.device)
        for start in range(0, len(rows), CHUNK):
            values[start : start + CHUNK] = self.weight[rows[start : start + CHUNK]]
        return rows, values

    def reopen(self) -> None:
        """Map the table's file anew: once it is filled, what is written to rows stays this table's own."""
        self.weight.data = self.storage.empty(self.name, tuple(self.weight.shape), self.weight.dtype, self.weight.device)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}rows"], destination[f"{prefix}values"] = self.saved_rows()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        _, strict, missing, unexpected, errors = args
        own = (f"{prefix}rows", f"{prefix}values")
        absent = [key for key in own if key not in state_dict]
        missing.extend(absent)
        unexpected.extend(key for key in state_dict if strict and key.startswith(prefix) and key not in own)
        if not absent:
            try:
                self.load_rows(state_dict[f"{prefix}rows"], state_dict[f"{prefix}values"])
            except UserError as error:
                errors.append(f"{prefix[:-1]}: {error}")

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "EngramTable":
        """Move or cast: rows that were looked up. A table in files stays where it is; gathered rows follow the model."""
        sample = fn(self.weight.data[:0])
        if self.storage.on_disk:
            if sample.dtype != self.weight.dtype:
                raise UserError(
                    f"a table in files stays {self.weight.dtype}: give EngramConfig(dtype=...) the dtype it is to have"
                )
            return self
        if (sample.dtype, sample.device) != (self.weight.dtype, self.weight.device):
            total, dim = self.weight.shape
            moved = self.storage.empty(self.name, (total, dim), sample.dtype, sample.device)
            rows = self.seen_rows()
            moved[rows.to(sample.device)] = fn(self.weight.data[rows])
            self.weight.data = moved
            self.weight.grad = None if self.weight.grad is None else fn(self.weight.grad)
            self.seen = fn(self.seen)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> "EngramTable":
        storage, rows = self.storage.twin(), self.seen_rows()
        weight = storage.empty(self.name, tuple(self.weight.shape), self.weight.dtype, self.weight.device)
        for start in range(0, len(rows), CHUNK):
            at = rows[start : start + CHUNK]
            weight[at] = self.weight.detach()[at]
        memo[id(self.storage)], memo[id(self.weight)] = storage, nn.Parameter(weight, self.weight.requires_grad)
        made = memo[id(self)] = self.__class__.__new__(self.__class__)
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return made


def set_bits(array: Tensor) -> Tensor:
    """int64 `[n]`, increasing: which bits of a uint8 array are set, counted from its first byte's lowest."""
    filled = array.nonzero()[:, 0]
    bits = (array[filled, None] >> torch.arange(8, dtype=torch.uint8, device=array.device)) & 1
    byte, bit = bits.nonzero(as_tuple=True)
    return filled[byte] * 8 + bit


def _pairs(rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    for start in range(0, len(rows) - 1, CHUNK):
        piece = rows[start : start + CHUNK + 1]
        yield piece[:-1], piece[1:]
