"""Addresses that tell no n-gram from another, for the controls that train a graft on them: forward hooks of its `engram_hash`."""

from typing import Any

import torch
from torch import Tensor

from engram_graft.hashing import NgramHash


def one_row(ngram_hash: NgramHash, args: Any, rows: Tensor) -> Tensor:
    """In place of every address the first row of its head."""
    return ngram_hash.offsets.expand_as(rows).contiguous()


class RandomRows:
    """In place of every address a random row of its head: in training each n-gram's is drawn anew at every call; outside it once for
    all calls, so that no score depends on how texts are batched, padded or cached.

    A draw sends row r of a head to (a*r + b) mod its prime, a and b random: any two rows go to a random pair (Carter, Wegman 1979).
    """

    def __init__(self, seed: int):
        self.seed, self.generator = seed, torch.Generator().manual_seed(seed)

    def __call__(self, ngram_hash: NgramHash, args: Any, rows: Tensor) -> Tensor:
        learning = ngram_hash.training and torch.is_grad_enabled()
        generator = self.generator if learning else torch.Generator().manual_seed(self.seed + 1)
        primes = ngram_hash.primes.cpu()
        draws = torch.rand(2, *primes.shape, generator=generator, dtype=torch.float64)
        factor, shift = 1 + (draws[0] * (primes - 1)).long(), (draws[1] * primes).long()
        moved = (rows - ngram_hash.offsets) * factor.to(rows.device) + shift.to(rows.device)
        return moved % ngram_hash.primes + ngram_hash.offsets
