"""Addresses: from token ids to table rows. Deterministic integers, so the rows of a text are known before the model runs.

Mix of order n at position t: XOR over k < n of `compressed[t-k] * multiplier[k]` in wrapping int64; the row of a head is the mix
modulo that head's own prime, plus the head's offset in its layer's table. Source: `NgramHashMapping` of the Engram demo; the end of
text that an n-gram does not reach over is that of transformers' `qwen4_exp`.
Two implementations, pinned bit-equal by tests: `HashPlan.rows` on the host (numpy) and `NgramHash` in the model (torch, any device).
"""

import dataclasses

import numpy as np
import torch
from torch import Tensor, nn

from engram_graft.window import Window


@dataclasses.dataclass(frozen=True)
class HashPlan:
    """The integers of a memory. Drawn once (`plan.plan_hashes`), then saved and read back: numpy does not promise its streams.

    Args:
        multipliers: odd int64 `[layers, N]`.
        primes: int64 `[layers, (N-1)*heads]`, order-major.
        offsets: int64 `[layers, (N-1)*heads]`, where each head starts in its layer's table.
        lookup: int64 `[V]`, compressed id of every token id the model can be fed.
        pad: compressed id that positions before the text's start are read as.
        resets: whether the id `pad` ends a text wherever it comes: what lies behind it is read as it, and it is its own text's last.
    """

    multipliers: np.ndarray
    primes: np.ndarray
    offsets: np.ndarray
    lookup: np.ndarray
    pad: int
    resets: bool = False

    @property
    def table_rows(self) -> list[int]:
        """Rows of each layer's table."""
        return [int(total) for total in self.primes.sum(1)]

    def rows(self, input_ids: np.ndarray) -> np.ndarray:
        """Host path: int64 rows `[..., T, layers, (N-1)*heads]` of whole texts, token ids `[..., T]`."""
        compressed = self.lookup[input_ids]
        padded = np.concatenate([np.full((*compressed.shape[:-1], self._context), self.pad), compressed], -1)
        length = compressed.shape[-1]
        tokens = [padded[..., self._context - k : self._context - k + length, None] for k in range(self._context + 1)]
        if self.resets:
            for k in range(2, self._context + 1):  # one that is the pad itself reads as the pad in any case
                tokens[k] = np.where(tokens[k - 1] == self.pad, self.pad, tokens[k])
        heads = self.primes.shape[1] // self._context
        rows = []
        with np.errstate(over="ignore"):  # the wrap-around is the hash
            mix = tokens[0] * self.multipliers[:, 0]  # (..., T, L)
            for order in range(2, self._context + 2):
                mix = mix ^ (tokens[order - 1] * self.multipliers[:, order - 1])
                of_order = slice((order - 2) * heads, (order - 1) * heads)
                rows.append(np.mod(mix[..., None], self.primes[:, of_order]) + self.offsets[:, of_order])
        return np.concatenate(rows, -1)

    @property
    def _context(self) -> int:
        return self.multipliers.shape[1] - 1


class NgramHash(nn.Module):
    """Tensor path of a `HashPlan`. Its buffers are part of the model's state: a memory without its integers is noise."""

    lookup: Tensor
    multipliers: Tensor
    primes: Tensor
    offsets: Tensor
    pad: Tensor

    def __init__(self, plan: HashPlan):
        super().__init__()
        for name in ("lookup", "multipliers", "primes", "offsets"):
            self.register_buffer(name, torch.from_numpy(getattr(plan, name).copy()))
        self.register_buffer("pad", torch.tensor(plan.pad))
        self.resets = plan.resets

    @property
    def plan(self) -> HashPlan:
        """The same integers for the host path."""
        arrays = {name: getattr(self, name).cpu().numpy() for name in ("multipliers", "primes", "offsets", "lookup")}
        return HashPlan(**arrays, pad=int(self.pad), resets=self.resets)

    def forward(self, compressed: Tensor, window: Window) -> Tensor:
        """int64 rows `[B, T, layers, (N-1)*heads]` of the window's last T positions; `compressed` is `[B, past + T]`."""
        orders = self.multipliers.shape[1] - 1
        moduli = self.primes.unflatten(1, (orders, -1))  # (L, orders, heads)
        mix = window.back(compressed, 0, self.pad)[..., None] * self.multipliers[:, 0]  # (B, T, L)
        mixes, nearer = [], None
        for n in range(1, orders + 1):
            token = window.back(compressed, n, self.pad)
            if self.resets:
                token = nearer = token if nearer is None else torch.where(nearer == self.pad, self.pad, token)
            mix = mix ^ (token[..., None] * self.multipliers[:, n])
            mixes.append(mix)
        rows = torch.remainder(torch.stack(mixes, -1)[..., None], moduli)  # (B, T, L, orders, heads): nearly all of the time
        return rows.add_(self.offsets.view_as(moduli)).flatten(-2)
