"""What a memory looks like: the one dataclass that the layer, the addresses and the graft are built from.

Names follow the Engram paper (arXiv 2601.07372) and its demo. `layer_ids` are 0-based here; the paper's are 1-based.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from engram_graft.errors import UserError

GATES = ("signed_sqrt", "sigmoid")
ZERO_INITS = ("value", "table")
DTYPES = ("float32", "bfloat16", "float16")
ADDRESSES = ("engram", "qwen4_exp")
GATE_EPS = 2.0**-23  # the demo's: float32's own, in every dtype
CONV_EPS = 1e-5  # the demo's
LAYER_SEED_STRIDE = 10007  # the demo's: layer l draws from seed + 10007 * l


@dataclasses.dataclass(frozen=True)
class EngramConfig:
    """Geometry and behaviour of a memory. Construction raises `UserError` when the fields contradict each other.

    Args:
        layer_ids: 0-based decoder layers that get a memory in front of them.
        max_ngram_size: the longest n-gram N; orders 2..N are looked up.
        engram_vocab_size: rows each head of an order has at least, one number an order (the next free prime is used).
        n_embed_per_ngram: channels an order's embedding has, shared by its heads.
        n_head_per_ngram: heads (independent hash functions) an order has.
        kernel_size: taps of the short convolution; its dilation is `max_ngram_size`.
        hc_mult: residual streams; 1 for plain models.
        gate: "signed_sqrt" (the paper's demo) or "sigmoid" (its Eq. 4).
        bias: give both projections a bias. Off by default: a trainable value bias can learn without any look-up.
        conv: keep the short convolution.
        zero_init: which factor starts at zero so that a fresh graft adds exactly 0: "value" (value projection) or "table".
        whole_ngrams: only n-grams that lie wholly inside the text add anything; false is the paper's way, which also learns "pad pad
            The". A text's first position is where attention parks: to move it moves every later logit, and every text that begins so.
        seen_filter: at inference an n-gram contributes only if training looked it up. Always off while training.
        ngram_dropout: share of n-grams that each training step leaves silent, at random, as the filter does with those of unknown
            wordings: what is learned then relies less on any one of them.
        dtype: dtype of the memory's parameters and arithmetic; the result is cast to the base's.
        seed: of multipliers and initial values.
        pad_id: token id that positions before the text's start are read as; None takes the tokenizer's pad, else eos, else 0.
        addresses: "engram" (the paper's: compressed ids) or "qwen4_exp" (transformers' model of that name: ids as they are; what lies
            behind an end of text reads as one, and `pad_id` is its id, by default the base's).
        gate_eps: of the norms of key and query.
        conv_eps: of the norm before the convolution.
    """

    layer_ids: tuple[int, ...] = (2, 6)
    max_ngram_size: int = 3
    engram_vocab_size: tuple[int, ...] = (20_000, 20_000)
    n_embed_per_ngram: int = 256
    n_head_per_ngram: int = 8
    kernel_size: int = 4
    hc_mult: int = 1
    gate: str = "signed_sqrt"
    bias: bool = False
    conv: bool = True
    zero_init: str = "value"
    whole_ngrams: bool = True
    seen_filter: bool = True
    ngram_dropout: float = 0.0
    dtype: str = "float32"
    seed: int = 0
    pad_id: int | None = None
    addresses: str = "engram"
    gate_eps: float = GATE_EPS
    conv_eps: float = CONV_EPS

    def __post_init__(self) -> None:
        for name in ("layer_ids", "engram_vocab_size"):
            object.__setattr__(self, name, _int_tuple(name, getattr(self, name)))
        for name in ("max_ngram_size", "n_embed_per_ngram", "n_head_per_ngram", "kernel_size", "hc_mult", "seed"):
            if not _is_int(getattr(self, name)):
                raise UserError(f"{name}={getattr(self, name)!r}: must be a whole number")
        if self.pad_id is not None and (not _is_int(self.pad_id) or self.pad_id < 0):
            raise UserError(f"pad_id={self.pad_id!r}: must be a token id (0 or more), or null for the tokenizer's own")
        for name in ("bias", "conv", "whole_ngrams", "seen_filter"):
            if not isinstance(getattr(self, name), bool):
                raise UserError(f"{name}={getattr(self, name)!r}: must be true or false")
        for name, allowed in (("gate", GATES), ("zero_init", ZERO_INITS), ("dtype", DTYPES), ("addresses", ADDRESSES)):
            if getattr(self, name) not in allowed:
                raise UserError(f"{name}={getattr(self, name)!r}: must be one of {', '.join(allowed)}")
        if not self.layer_ids or len(set(self.layer_ids)) != len(self.layer_ids) or min(self.layer_ids) < 0:
            raise UserError(
                f"layer_ids={list(self.layer_ids)}: name at least one layer, each once, counted from 0 "
                "(the paper's layers 2 and 15 are 1 and 14 here)"
            )
        if self.max_ngram_size < 2:
            raise UserError(
                f"max_ngram_size={self.max_ngram_size}: orders start at 2 (a 1-gram is the token embedding the base already "
                "has); use 2 or more, 3 is the default"
            )
        if len(self.engram_vocab_size) != self.max_ngram_size - 1 or min(self.engram_vocab_size) < 2:
            raise UserError(
                f"engram_vocab_size={list(self.engram_vocab_size)}: give {self.max_ngram_size - 1} numbers of 2 or more, one for "
                f"each order 2..{self.max_ngram_size}"
            )
        for name in ("n_embed_per_ngram", "n_head_per_ngram", "kernel_size", "hc_mult"):
            if getattr(self, name) < 1:
                raise UserError(f"{name}={getattr(self, name)}: must be 1 or more")
        if not 0 <= self.seed < 2**31:
            raise UserError(f"seed={self.seed}: must be from 0 to 2147483647")
        if not isinstance(self.ngram_dropout, int | float) or not 0 <= self.ngram_dropout < 1:
            raise UserError(f"ngram_dropout={self.ngram_dropout!r}: must be from 0 to below 1")
        for name in ("gate_eps", "conv_eps"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
                raise UserError(f"{name}={value!r}: must be a number above 0, e.g. 1e-6")
        if self.addresses == "qwen4_exp" and len(set(self.engram_vocab_size)) > 1:
            raise UserError(
                f"engram_vocab_size={list(self.engram_vocab_size)} with addresses='qwen4_exp': one number there for every order"
            )
        if max(self.engram_vocab_size) > 10**10:
            raise UserError(f"engram_vocab_size={list(self.engram_vocab_size)}: at most 10000000000 rows a head")
        if self.n_embed_per_ngram % self.n_head_per_ngram:
            raise UserError(
                f"n_embed_per_ngram={self.n_embed_per_ngram} is not a multiple of n_head_per_ngram={self.n_head_per_ngram}: "
                "the heads of an order share its channels equally"
            )
        if self.zero_init == "table" and self.bias:
            raise UserError("zero_init='table' with bias=true is no identity (the value bias passes): use bias=false")

    @property
    def orders(self) -> int:
        """How many n-gram orders are looked up: 2..N makes N - 1."""
        return self.max_ngram_size - 1

    @property
    def heads(self) -> int:
        """Rows looked up per position and layer: orders x heads."""
        return self.orders * self.n_head_per_ngram

    @property
    def head_dim(self) -> int:
        """Channels of one row."""
        return self.n_embed_per_ngram // self.n_head_per_ngram

    @property
    def resets(self) -> bool:
        """Whether an n-gram ends where it meets the token `pad_id`: the end of a text."""
        return self.addresses == "qwen4_exp"

    @property
    def conv_reach(self) -> int:
        """How many tokens back the short convolution looks."""
        return (self.kernel_size - 1) * self.max_ngram_size if self.conv else 0

    def to_dict(self) -> dict[str, Any]:
        """Plain lists and numbers, as stored in `engram_config.json` and recipes."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(self).items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "EngramConfig":
        """The config with these fields. Raises `UserError` for an unknown field."""
        known = [f.name for f in dataclasses.fields(cls)]
        for name in values:
            if name not in known:
                raise UserError(f"unknown memory option {name!r}: the options are {', '.join(known)}")
        return cls(**values)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _int_tuple(name: str, value: object) -> tuple[int, ...]:
    if isinstance(value, list | tuple) and all(_is_int(v) for v in value):
        return tuple(value)
    raise UserError(f"{name}={value!r}: must be a list of whole numbers, e.g. [2, 6]")
