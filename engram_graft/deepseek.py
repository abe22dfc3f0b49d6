"""The memory of DeepSeek-V4.1, read from its checkpoints and written as they have it.

Rows are codes of 8 bits with a scale, a power of two, for every 32 channels; keys and value are one projection; there is no convolution.
Source: the checkpoint's own config and tensors; addresses are those of the Engram paper's demo.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from engram_graft.codes import GROUP, decode, encode
from engram_graft.config import EngramConfig
from engram_graft.hashing import HashPlan
from engram_graft.pretrained import MAX_ORDER, Pretrained, epsilon, layer_numbers, number
from engram_graft.weights import FLOATS, Weights

LAYERS = "engram_layer_ids"
PREFIX = "layers.{}.engram."
NEEDS = {
    "addresses": "engram",
    "gate": "signed_sqrt",
    "bias": False,
    "conv": False,
    "whole_ngrams": False,
    "seen_filter": False,
    "seed": 0,
}


def read(text: Mapping[str, Any], weights: Weights) -> Pretrained:
    """The memory of a checkpoint whose text config is `text`. Raises `UserError` where that says no memory."""
    layers, size = layer_numbers(text, LAYERS), number(text, "engram_max_ngram_size", least=2, most=MAX_ORDER)
    heads, dim = number(text, "engram_n_heads", least=1), number(text, "engram_head_dim", least=1)
    names = weights.layers("engram", layers)
    gains = weights.shape(names[0]["q_weight"]) if "q_weight" in names[0] else []
    streams, width = gains if len(gains) == 2 else (None, None)
    config = EngramConfig(
        layer_ids=tuple(layers),
        max_ngram_size=size,
        engram_vocab_size=(number(text, "engram_vocab_size"),) * (size - 1),
        n_embed_per_ngram=heads * dim,
        n_head_per_ngram=heads,
        hc_mult=number(text, "hc_mult", default=streams),
        conv=False,
        whole_ngrams=False,
        seen_filter=False,
        seed=0,
        pad_id=number(text, "engram_pad_token_id", "engram_pad_id"),
        gate_eps=epsilon(text),
    )
    channels = number(text, "hidden_size", default=width, least=1)
    keys, embed = channels * config.hc_mult, config.heads * dim
    kinds = {
        "embed.weight": ["F8_E4M3"],
        "embed.scale": ["F8_E8M0"],
        "wkv.weight": [*FLOATS, "F8_E4M3"],
        "wkv.scale": ["F8_E8M0"],
    }
    faults = [] if dim % GROUP == 0 else [f"its rows have {dim} channels, scales are for {GROUP} each"]
    counts = []
    for leaves in names:
        counts.append(weights.rows(leaves["embed.weight"]) if "embed.weight" in leaves else 0)
        shapes = {"embed.weight": (counts[-1], dim), "embed.scale": (counts[-1], dim // GROUP)}
        shapes |= {
            "q_weight": (config.hc_mult, channels),
            "k_weight": (config.hc_mult, channels),
            "wkv.weight": (keys + channels, embed),
        }
        if "wkv.weight" in leaves and weights.kind(leaves["wkv.weight"]) == "F8_E4M3":
            shapes["wkv.scale"] = (math.ceil((keys + channels) / GROUP), math.ceil(embed / GROUP))
        faults += weights.misfits(leaves, shapes, kinds)

    def dense(index: int) -> dict[str, Tensor]:
        leaves = names[index]
        wkv = weights.tensor(leaves["wkv.weight"]).float()
        if weights.kind(leaves["wkv.weight"]) == "F8_E4M3":  # one for a square of 32 by 32
            scale = weights.tensor(leaves["wkv.scale"]).float().repeat_interleave(GROUP, 0).repeat_interleave(GROUP, 1)
            wkv = wkv * scale[: wkv.shape[0], : wkv.shape[1]]
        gains = {
            ours: weights.tensor(leaves[theirs]).float()
            for theirs, ours in (("k_weight", "key_norm"), ("q_weight", "query_norm"))
        }
        return gains | {"key_proj.weight": wkv[:keys], "value_proj.weight": wkv[keys:]}

    def rows(index: int) -> Iterator[Tensor]:
        pieces = (weights.pieces(names[index][leaf]) for leaf in ("embed.weight", "embed.scale"))
        return (decode(codes, scales, torch.float32) for codes, scales in zip(*pieces, strict=True))

    return Pretrained(config, channels, number(text, "engram_compressed_vocab_size", least=1), dense, rows, counts, {}, faults)


def fragment(config: EngramConfig, plan: HashPlan, width: int, ids: int) -> dict[str, Any]:
    """What the model's config says of a memory."""
    spelled_so = (plan.lookup == plan.pad).argmax()  # any token of the pad's compressed id does
    return {
        "text_config": {
            "hidden_size": width,
            "hc_mult": config.hc_mult,
            "rms_norm_eps": config.gate_eps,
            LAYERS: list(config.layer_ids),
            "engram_num_embeddings": plan.table_rows,
            "engram_max_ngram_size": config.max_ngram_size,
            "engram_vocab_size": config.engram_vocab_size[0],
            "engram_n_heads": config.n_head_per_ngram,
            "engram_head_dim": config.head_dim,
            "engram_pad_token_id": int(spelled_so if config.pad_id is None else config.pad_id),
            "engram_compressed_vocab_size": ids,
        }
    }


def reasons(config: EngramConfig) -> list[str]:
    """Why the layout cannot say what a memory does, beyond `NEEDS`."""
    faults = []
    if len(set(config.engram_vocab_size)) > 1:
        faults.append(f"engram_vocab_size={list(config.engram_vocab_size)}, the layout has one number for every order")
    if config.head_dim % GROUP:
        faults.append(f"rows of {config.head_dim} channels, the layout has a scale for every {GROUP}")
    return faults


def tensors(parameters: Mapping[str, Tensor], table: Tensor, plan: HashPlan, index: int) -> tuple[dict[str, Tensor], float]:
    """The tensors of a layer by their names behind `PREFIX`, and the largest rounding error of a row's value."""
    coded = encode(table, "float8")
    made = {"embed.weight": coded["values"], "embed.scale": coded["scale"]}
    made |= {"q_weight": parameters["query_norm"], "k_weight": parameters["key_norm"]}
    made["wkv.weight"] = torch.cat([parameters["key_proj.weight"], parameters["value_proj.weight"]])
    return made, float((decode(coded["values"], coded["scale"], torch.float32) - table.float()).abs().max())
