"""A row's initial value: a pure function of seed and row, so that rows that nobody looked up need not be stored anywhere."""

import math

import torch
from torch import Tensor

from engram_graft.config import LAYER_SEED_STRIDE, EngramConfig

_WORD = 2**64
GAMMA, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # SplitMix64's (Steele, Lea, Flood 2014)


def row_seed(config: EngramConfig, layer_id: int) -> int | None:
    """The seed of a layer's rows; None: they start at zero."""
    return config.seed * LAYER_SEED_STRIDE + layer_id if config.zero_init == "value" else None


def initial_rows(rows: Tensor, dim: int, seed: int, dtype: torch.dtype) -> Tensor:
    """Values `[..., dim]` of `rows` (int64, any shape): mean 0, standard deviation 1.

    The sum of four 16-bit numbers drawn by SplitMix64 from the channel's number: close to normal, and integers up to the last step,
    so that every device, dtype and version of torch gives the same.
    """
    channels = rows[..., None] * dim + torch.arange(dim, device=rows.device)
    word = channels * _signed(GAMMA) + _signed(splitmix64(seed))
    word = _folded(_folded(_folded(word, 30) * _signed(_FIRST), 27) * _signed(_SECOND), 31)
    total = torch.stack([(word >> shift) & 0xFFFF for shift in (0, 16, 32, 48)]).sum(0) - 2 * 0xFFFF
    deviation = math.sqrt(4 * (2**32 - 1) / 12)
    return (total.float() * (1 / deviation)).to(dtype)


def _signed(word: int) -> int:
    """A 64-bit word as int64 has it."""
    word %= _WORD
    return word - _WORD if word >= _WORD // 2 else word


def _folded(word: Tensor, shift: int) -> Tensor:
    """`word ^ (word >> shift)`, the shift one of unsigned words."""
    return word ^ ((word >> shift) & ((1 << (64 - shift)) - 1))


def splitmix64(word: int) -> int:
    """SplitMix64's next output from the state `word`."""
    word = (word + GAMMA) % _WORD
    word = (word ^ (word >> 30)) * _FIRST % _WORD
    word = (word ^ (word >> 27)) * _SECOND % _WORD
    return word ^ (word >> 31)
