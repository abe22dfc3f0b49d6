"""A config that contradicts itself is refused with a message that gives the value; every other one survives being saved."""

import dataclasses
import json

import pytest

from engram_graft.config import EngramConfig
from engram_graft.errors import UserError

CONTRADICTIONS: list[tuple[dict[str, object], list[str]]] = [
    ({"layer_ids": ()}, ["layer_ids=[]"]),
    ({"layer_ids": (2, 6, 2)}, ["layer_ids=[2, 6, 2]"]),
    ({"layer_ids": (2, -1)}, ["layer_ids=[2, -1]"]),
    ({"layer_ids": "2,6"}, ["layer_ids='2,6'"]),
    ({"layer_ids": 2}, ["layer_ids=2"]),
    ({"layer_ids": (2, 6.0)}, ["layer_ids=(2, 6.0)"]),
    ({"layer_ids": (True, 2)}, ["layer_ids=(True, 2)"]),
    ({"max_ngram_size": 1, "engram_vocab_size": (23,)}, ["max_ngram_size=1", "orders start at 2"]),
    ({"max_ngram_size": 0, "engram_vocab_size": ()}, ["max_ngram_size=0"]),
    ({"max_ngram_size": "3"}, ["max_ngram_size='3'"]),
    ({"engram_vocab_size": (100,)}, ["engram_vocab_size=[100]", "2 numbers"]),
    ({"engram_vocab_size": (100, 100, 100)}, ["engram_vocab_size=[100, 100, 100]", "2 numbers"]),
    ({"max_ngram_size": 4}, ["engram_vocab_size=[20000, 20000]", "3 numbers", "2..4"]),
    ({"engram_vocab_size": (100, 1)}, ["engram_vocab_size=[100, 1]"]),
    ({"engram_vocab_size": 100}, ["engram_vocab_size=100"]),
    ({"n_embed_per_ngram": 0}, ["n_embed_per_ngram=0"]),
    ({"n_embed_per_ngram": 12.0}, ["n_embed_per_ngram=12.0"]),
    ({"n_embed_per_ngram": 12, "n_head_per_ngram": 8}, ["n_embed_per_ngram=12", "n_head_per_ngram=8"]),
    ({"n_head_per_ngram": 0}, ["n_head_per_ngram=0"]),
    ({"n_head_per_ngram": True}, ["n_head_per_ngram=True"]),
    ({"kernel_size": 0}, ["kernel_size=0"]),
    ({"kernel_size": None}, ["kernel_size=None"]),
    ({"hc_mult": 0}, ["hc_mult=0"]),
    ({"hc_mult": -4}, ["hc_mult=-4"]),
    ({"seed": -1}, ["seed=-1"]),
    ({"seed": 0.5}, ["seed=0.5"]),
    ({"gate": "tanh"}, ["gate='tanh'", "signed_sqrt, sigmoid"]),
    ({"zero_init": "none"}, ["zero_init='none'", "value, table"]),
    ({"dtype": "float64"}, ["dtype='float64'", "bfloat16"]),
    ({"bias": 1}, ["bias=1"]),
    ({"conv": "yes"}, ["conv='yes'"]),
    ({"whole_ngrams": None}, ["whole_ngrams=None"]),
    ({"seen_filter": 0}, ["seen_filter=0"]),
    ({"pad_id": -1}, ["pad_id=-1"]),
    ({"pad_id": "<pad>"}, ["pad_id='<pad>'"]),
    ({"pad_id": True}, ["pad_id=True"]),
    ({"zero_init": "table", "bias": True}, ["zero_init='table'", "bias=true"]),
    ({"addresses": "raw"}, ["addresses='raw'", "engram, qwen4_exp"]),
    ({"addresses": "qwen4_exp", "engram_vocab_size": (50, 60)}, ["engram_vocab_size=[50, 60]", "one number"]),
    ({"gate_eps": 0}, ["gate_eps=0"]),
    ({"conv_eps": "1e-6"}, ["conv_eps='1e-6'"]),
]


@pytest.mark.parametrize(("fields", "parts"), CONTRADICTIONS, ids=lambda value: str(value) if isinstance(value, dict) else "")
def test_a_contradiction_is_refused_and_the_message_names_the_value(fields: dict[str, object], parts: list[str]) -> None:
    with pytest.raises(UserError) as error:
        EngramConfig(**fields)
    for part in parts:
        assert part in str(error.value)
    with pytest.raises(UserError):
        EngramConfig.from_dict(fields)


ALLOWED: list[dict[str, object]] = [
    {},
    {"layer_ids": [0], "max_ngram_size": 2, "engram_vocab_size": [2]},
    {
        "max_ngram_size": 4,
        "engram_vocab_size": (2, 3, 4),
        "n_embed_per_ngram": 6,
        "n_head_per_ngram": 3,
        "kernel_size": 1,
    },
    {"hc_mult": 4, "gate": "sigmoid", "bias": True, "conv": False, "dtype": "bfloat16", "seed": 7, "pad_id": 0},
    {"zero_init": "table", "whole_ngrams": False, "seen_filter": False, "pad_id": 5, "dtype": "float16"},
]


@pytest.mark.parametrize("fields", ALLOWED, ids=str)
def test_a_config_survives_json(fields: dict[str, object]) -> None:
    config = EngramConfig(**fields)
    stored = json.loads(json.dumps(config.to_dict()))
    assert stored == config.to_dict() and stored.keys() == {f.name for f in dataclasses.fields(EngramConfig)}
    again = EngramConfig.from_dict(stored)
    assert again == config and hash(again) == hash(config) and isinstance(again.layer_ids, tuple)
    for name, value in fields.items():
        assert getattr(again, name) == (tuple(value) if isinstance(value, list) else value)


def test_fields_left_out_take_their_defaults_and_an_unknown_one_is_named() -> None:
    assert EngramConfig.from_dict({}) == EngramConfig()
    with pytest.raises(UserError, match=r"'layers': the options are layer_ids, max_ngram_size"):
        EngramConfig.from_dict({"layers": [2, 6]})


def test_a_config_cannot_be_changed_afterwards() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        EngramConfig().seed = 1  # type: ignore[misc]


def test_derived_sizes() -> None:
    config = EngramConfig(max_ngram_size=4, engram_vocab_size=(9, 9, 9), n_embed_per_ngram=24, n_head_per_ngram=3, kernel_size=5)
    assert (config.orders, config.heads, config.head_dim, config.conv_reach) == (3, 9, 8, 16)
    assert dataclasses.replace(config, conv=False).conv_reach == 0
