"""The memory ("PLE") of transformers' `qwen4_exp`, read from its checkpoints and written as they have it.

Its addresses hash token ids as they are and do not reach over an end of text; its norms store their gain less one. Source:
`Qwen4ExpTextPLELayer` and `Qwen4ExpTextNGramEmbedding` of transformers; what differs is that padding within a text is passed over here.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engram_graft.config import EngramConfig
from engram_graft.errors import UserError
from engram_graft.hashing import HashPlan
from engram_graft.pretrained import MAX_ORDER, Pretrained, epsilon, layer_numbers, number
from engram_graft.weights import Weights

LAYERS = "ple_layer_ids"  # counted from 1
PREFIX = "model.layers.{}.ple."
NEEDS = {
    "addresses": "qwen4_exp",
    "gate": "signed_sqrt",
    "bias": False,
    "conv": True,
    "whole_ngrams": False,
    "seen_filter": False,
}
MULTIPLE, PARTS = 128, 512  # transformers' defaults: rows are padded to a multiple, and split into so many shards at most
_NORMS = {"norm_key": "key_norm", "norm_query": "query_norm", "norm_conv": "short_conv.norm"}
_MATRICES = {"key_proj": "key_proj.weight", "value_proj": "value_proj.weight", "conv1d": "short_conv.weight"}
_INTEGERS = {
    "multipliers": "ple_embedding.layer_multipliers",
    "primes": "ple_embedding.ngram_heads_vocab_sizes",
    "offsets": "ple_embedding.ngram_heads_offsets",
}
_TABLE = "ple_embedding.ngram_embedding"


def read(text: Mapping[str, Any], weights: Weights) -> Pretrained:
    """The memory of a checkpoint whose text config is `text`. Raises `UserError` where that says no memory."""
    layers = [layer - 1 for layer in sorted(set(layer_numbers(text, LAYERS)))]
    width, size = number(text, "hidden_size", least=1), number(text, "ngram_size", default=3, least=2, most=MAX_ORDER)
    heads, embed = number(text, "heads_per_ngram", default=8, least=1), number(text, "ple_embed_dim", default=width)
    eos = text.get("eos_token_id")
    if embed % ((size - 1) * heads):
        raise UserError(
            f"the checkpoint's config has ple_embed_dim={embed}, which {size - 1} orders of {heads} heads cannot share"
        )
    config = EngramConfig(
        layer_ids=tuple(layers),
        max_ngram_size=size,
        engram_vocab_size=(number(text, "ngram_vocab_size_base", default=20_000_000),) * (size - 1),
        n_embed_per_ngram=embed // (size - 1),
        n_head_per_ngram=heads,
        kernel_size=number(text, "ple_conv_kernel_size", default=4),
        hc_mult=number(text, "hc_count", default=4),
        whole_ngrams=False,
        seen_filter=False,
        seed=number(text, "seed", default=1234),
        pad_id=number({"eos_token_id": eos[0] if isinstance(eos, list) and eos else eos}, "eos_token_id"),
        addresses="qwen4_exp",
        gate_eps=epsilon(text),
        conv_eps=epsilon(text),
    )
    names = weights.layers("ple", layers)
    streams = width * config.hc_mult
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (streams,) for name in _NORMS}
    shapes["key_proj.weight"], shapes["value_proj.weight"] = (streams, embed), (width, embed)
    shapes["conv1d.weight"] = (streams, 1, config.kernel_size)
    lengths = {"multipliers": size, "primes": config.heads, "offsets": config.heads}
    stored = {name: leaf for name, leaf in _INTEGERS.items() if leaf in names[0]}  # transformers can draw those that are not
    shapes |= {leaf: (lengths[name],) for name, leaf in stored.items()}
    faults = [fault for leaves in names for fault in weights.misfits(leaves, shapes, {leaf: ["I64"] for leaf in stored.values()})]
    integers: dict[str, np.ndarray] = {}
    if not faults:
        integers = {name: np.stack([weights.tensor(n[leaf]).numpy() for n in names]) for name, leaf in stored.items()}
        faults += _odd(integers)
    shards = [_shards(leaves) for leaves in names]
    faults += [fault for of_layer in shards for fault in _shard_faults(weights, of_layer, config.head_dim)]

    def dense(index: int) -> dict[str, Tensor]:
        read = {theirs: weights.tensor(names[index][f"{theirs}.weight"]).float() for theirs in (*_NORMS, *_MATRICES)}
        return {ours: 1 + read[theirs] for theirs, ours in _NORMS.items()} | {n: read[theirs] for theirs, n in _MATRICES.items()}

    def rows(index: int) -> Iterator[Tensor]:
        return (piece.float() for shard in shards[index] for piece in weights.pieces(shard))

    counts = [sum(weights.rows(shard) for shard in of_layer) for of_layer in shards]
    return Pretrained(config, width, number(text, "vocab_size", least=1), dense, rows, counts, integers, faults)


def _shards(leaves: Mapping[str, str]) -> list[str]:
    """The names of a table's parts, in order: shards, or the one tensor that transformers makes of them."""
    numbered = {int(m[1]): name for leaf, name in leaves.items() if (m := re.fullmatch(rf"{_TABLE}\.shard_(\d+)\.weight", leaf))}
    if f"{_TABLE}.weight" in leaves:
        numbered[-1] = leaves[f"{_TABLE}.weight"]
    return [numbered[number] for number in sorted(numbered)]


def _shard_faults(weights: Weights, shards: list[str], head_dim: int) -> list[str]:
    faults = [] if shards else [f"tensor {_TABLE}.shard_0.weight is missing"]
    of_parts = [name for name in shards if ".shard_" in name]
    if of_parts and (len(of_parts) != len(shards) or not of_parts[-1].endswith(f".shard_{len(of_parts) - 1}.weight")):
        faults.append(f"the shards of its table are not 0 to {len(of_parts) - 1}, each once: the last is {of_parts[-1]}")
    for name in shards:
        faults += weights.misfits({"": name}, {"": (weights.rows(name), head_dim)}, {})
    return faults


def _odd(integers: Mapping[str, np.ndarray]) -> list[str]:
    """What is wrong with stored integers."""
    primes, offsets = integers.get("primes"), integers.get("offsets")
    if primes is None:
        return []
    if primes.min() < 2 or primes.max() > 2**40:
        return [f"its moduli go from {primes.min()} to {primes.max()}"]
    if offsets is not None and not np.array_equal(offsets, primes.cumsum(1) - primes):
        return ["its offsets are not the running sums of its moduli"]
    return []


def fragment(config: EngramConfig, plan: HashPlan, width: int, ids: int) -> dict[str, Any]:
    """What the model's config says of a memory."""
    return {
        "model_type": "qwen4_exp_text",
        "hidden_size": width,
        "vocab_size": ids,
        "hc_count": config.hc_mult,
        "rms_norm_eps": config.gate_eps,
        "eos_token_id": plan.pad,
        LAYERS: [layer + 1 for layer in config.layer_ids],
        "ple_embed_dim": config.orders * config.n_embed_per_ngram,
        "ple_conv_kernel_size": config.kernel_size,
        "ngram_size": config.max_ngram_size,
        "heads_per_ngram": config.n_head_per_ngram,
        "ngram_vocab_size_base": config.engram_vocab_size[0],
        "make_ngram_vocab_size_divisible_by": MULTIPLE,
        "split_ngram_parts": PARTS,
        "seed": config.seed,
    }


def reasons(config: EngramConfig) -> list[str]:
    """Why the layout cannot say what a memory does, beyond `NEEDS`."""
    faults = []
    if config.hc_mult < 2:
        faults.append(f"hc_mult={config.hc_mult}, the layout has 2 residual streams or more")
    if config.gate_eps != config.conv_eps:
        faults.append(f"gate_eps={config.gate_eps} and conv_eps={config.conv_eps}, the layout has one number for both")
    if list(config.layer_ids) != sorted(config.layer_ids):
        faults.append(f"layer_ids={list(config.layer_ids)}, the layout draws addresses in increasing order of layers")
    return faults


def tensors(parameters: Mapping[str, Tensor], table: Tensor, plan: HashPlan, index: int) -> tuple[dict[str, Tensor], float]:
    """The tensors of layer `index` by their names behind `PREFIX`, and the largest rounding error: of `1 + (gain - 1)`."""
    made = {f"{theirs}.weight": parameters[ours] for theirs, ours in _MATRICES.items()}
    error = 0.0
    for theirs, ours in _NORMS.items():
        gain = parameters[ours].flatten().float()
        less = made[f"{theirs}.weight"] = (gain - 1).to(parameters[ours].dtype)
        error = max(error, float((1 + less.float() - gain).abs().max()))
    made |= {leaf: torch.from_numpy(getattr(plan, name)[index].copy()) for name, leaf in _INTEGERS.items()}
    padded = torch.cat([table, table.new_zeros(-len(table) % MULTIPLE, table.shape[1])])
    shards = padded.chunk(PARTS)
    return made | {f"{_TABLE}.shard_{k}.weight": shard.contiguous() for k, shard in enumerate(shards)}, error
