"""Our numbers against those of the public Engram demo: geometry to the bit, the module's forward, loss and gradients closely."""

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from engram_graft.compress import TokenMap, extend_lookup
from engram_graft.config import CONV_EPS, EngramConfig
from engram_graft.fresh import fresh_layer
from engram_graft.hashing import HashPlan, NgramHash
from engram_graft.layer import Engram
from engram_graft.plan import plan_hashes
from engram_graft.window import Window

DATA = Path(__file__).parent / "data"
GEOMETRY: dict[str, Any] = json.loads((DATA / "geometry.json").read_text())
SPARE_ROWS = 267  # a model's embedding can have more rows than its tokenizer has ids, Qwen3's has this many


def flat(lists: list[list[int]]) -> list[int]:
    return [number for numbers in lists for number in numbers]


def planned(case: dict[str, Any]) -> HashPlan:
    """The plan of a case. The file has no whole token map: ids that no sample uses stay at -1."""
    lookup = np.full(case["vocab"], -1, dtype=np.int64)
    lookup[case["config"]["pad_id"]] = case["compressed_pad"]
    for sample in case["samples"]:
        lookup[sample["input_ids"]] = sample["compressed"]
    values = dict(case["config"])
    pad_id, heads = values.pop("pad_id"), values["n_head_per_ngram"]
    config = EngramConfig(**values, n_embed_per_ngram=4 * heads)
    extended = extend_lookup(TokenMap(lookup, case["compressed_vocab"], ()), case["vocab"] + SPARE_ROWS)
    return plan_hashes(config, extended, case["compressed_vocab"], pad_id)


@pytest.mark.parametrize("name", GEOMETRY)
def test_the_integers_of_a_real_vocabulary_are_the_demos(name: str) -> None:
    case = GEOMETRY[name]
    plan, layers = planned(case), [str(layer) for layer in case["config"]["layer_ids"]]
    assert plan.multipliers.dtype == plan.primes.dtype == plan.offsets.dtype == np.int64
    assert plan.multipliers.tolist() == [case["multipliers"][layer] for layer in layers]
    assert plan.primes.tolist() == [flat(case["primes"][layer]) for layer in layers]
    assert plan.pad == case["compressed_pad"]
    assert plan.table_rows == [sum(flat(case["primes"][layer])) for layer in layers]
    assert plan.offsets.tolist() == [[sum(row[:i]) for i in range(len(row))] for row in plan.primes.tolist()]


@pytest.mark.parametrize("path", ["host", "tensor"])
@pytest.mark.parametrize("name", GEOMETRY)
def test_the_rows_of_three_texts_are_the_demos(name: str, path: str) -> None:
    case = GEOMETRY[name]
    plan = planned(case)
    tensor_path = NgramHash(plan)
    for sample in case["samples"]:
        ids = np.array([sample["input_ids"]])
        if path == "host":
            rows = plan.rows(ids)
        else:
            compressed = tensor_path.lookup[torch.from_numpy(ids)]
            assert compressed.tolist() == [sample["compressed"]]
            rows = tensor_path(compressed, Window(0, ids.shape[1])).numpy()
        assert rows.dtype == np.int64
        for index, layer in enumerate(case["config"]["layer_ids"]):
            assert (rows[0, :, index] - plan.offsets[index]).tolist() == sample["rows"][str(layer)]


class Golden:
    """One file of the demo's module: its tensors, and our module with its parameters."""

    def __init__(self, streams: int):
        path = DATA / f"module_hc{streams}.safetensors"
        with safe_open(path, "pt") as file:
            values = json.loads(file.metadata()["config"])
        self.tensors = load_file(path)
        self.width, self.layer_id, self.compressed_vocab = (
            values["hidden_size"],
            values["layer_id"],
            values["compressed_vocab"],
        )
        self.primes = flat(values["primes"])
        for name in ("hidden_size", "layer_id", "compressed_vocab", "primes"):
            values.pop(name)
        self.config = EngramConfig(**values, bias=True, seen_filter=False, whole_ngrams=False)
        self.index = self.config.layer_ids.index(self.layer_id)
        self.plan = plan_hashes(self.config, self.tensors["lookup"].numpy(), self.compressed_vocab, values["pad_id"])
        self.rows = self.tensors["rows"] + torch.from_numpy(self.plan.offsets[self.index])

    def fused(self, kind: str) -> dict[str, Tensor]:
        """The demo's `param` or `grad` tensors under our names: per-stream tensors fused, stream after stream."""
        streams = range(self.config.hc_mult)

        def of(name: str) -> Tensor:
            return self.tensors[f"{kind}.{name}"]

        return {
            "table.weight": of("multi_head_embedding.embedding.weight"),
            "key_proj.weight": torch.cat([of(f"key_projs.{g}.weight") for g in streams]),
            "key_proj.bias": torch.cat([of(f"key_projs.{g}.bias") for g in streams]),
            "value_proj.weight": of("value_proj.weight"),
            "value_proj.bias": of("value_proj.bias"),
            "key_norm": torch.stack([of(f"norm1.{g}.weight") for g in streams]),
            "query_norm": torch.stack([of(f"norm2.{g}.weight") for g in streams]),
            "short_conv.weight": of("short_conv.conv.weight"),
            "short_conv.norm": torch.stack([of(f"short_conv.norms.{g}.weight") for g in streams]),
        }

    def module(self, **changes: Any) -> Engram:
        config = EngramConfig(**{**self.config.to_dict(), **changes})
        engram = fresh_layer(config, self.index, self.plan.table_rows[self.index], self.width, torch.device("cpu"))
        parameters = dict(engram.named_parameters())
        values = self.fused("param")
        assert parameters.keys() == values.keys() and all(values[n].shape == p.shape for n, p in parameters.items())
        engram.table.touch(torch.arange(len(engram.table.weight)))
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(values[name])
        return engram

    def output(self, engram: Engram) -> Tensor:
        return engram(self.tensors["hidden"], self.rows, Window(0, self.rows.shape[1]))[0].detach()


def matches(actual: Tensor, expected: Tensor) -> bool:
    return actual.shape == expected.shape and bool(((actual - expected).abs() <= 1e-5 + 2e-3 * expected.abs()).all())


@pytest.mark.parametrize("streams", [1, 4])
def test_the_modules_addresses_are_the_demos(streams: int) -> None:
    golden = Golden(streams)
    assert golden.plan.multipliers[golden.index].tolist() == golden.tensors["multipliers"].tolist()
    assert golden.plan.primes[golden.index].tolist() == golden.primes
    host = torch.from_numpy(golden.plan.rows(golden.tensors["input_ids"].numpy()))
    hashed = NgramHash(golden.plan)
    tensor = hashed(hashed.lookup[golden.tensors["input_ids"]], Window(0, host.shape[1]))
    assert torch.equal(host[:, :, golden.index], golden.rows) and torch.equal(tensor, host)


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("streams", [1, 4])
def test_forward_loss_and_every_gradient_are_the_demos(streams: int, mode: str) -> None:
    golden = Golden(streams)
    expected = golden.tensors
    engram = golden.module().train(mode == "train")
    hidden = expected["hidden"].clone().requires_grad_()
    embeddings, active = engram.table(golden.rows)
    assert active is None and torch.equal(embeddings, expected["embeddings"])
    assert matches(engram.gate(embeddings, hidden), expected["gates"])
    output, _ = engram(hidden, golden.rows, Window(0, hidden.shape[1]))
    loss = (output * expected["cotangent"]).sum()
    loss.backward()
    assert matches(output, expected["output"]) and matches(loss.reshape(1), expected["loss"])
    gradients = {name: parameter.grad for name, parameter in engram.named_parameters()}
    assert gradients["table.weight"].is_sparse
    gradients["table.weight"] = gradients["table.weight"].to_dense()
    for name, gradient in golden.fused("grad").items():
        assert gradient.count_nonzero() > 0 and matches(gradients[name], gradient), name
    assert matches(hidden.grad, expected["grad.hidden"])


@pytest.mark.parametrize("streams", [1, 4])
def test_control_any_other_value_of_any_parameter_breaks_the_match(streams: int) -> None:
    golden = Golden(streams)
    engram = golden.module()
    assert matches(golden.output(engram), golden.tensors["output"])
    for name, _ in engram.named_parameters():
        other = copy.deepcopy(engram)
        parameter = other.get_parameter(name)
        noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
        parameter.data += 0.05 * noise
        assert not matches(golden.output(other), golden.tensors["output"]), name


def test_the_conv_norm_is_per_stream_and_not_over_the_concatenated_channels() -> None:
    for streams in (1, 4):
        golden = Golden(streams)
        engram = golden.module()
        norm = engram.short_conv.norm

        def concatenated(values: Tensor, norm: Tensor = norm) -> Tensor:
            flat = values.flatten(-2)
            return F.rms_norm(flat, flat.shape[-1:], eps=CONV_EPS).unflatten(-1, norm.shape) * norm

        engram.short_conv.normed = concatenated
        assert matches(golden.output(engram), golden.tensors["output"]) == (streams == 1), streams


@pytest.mark.parametrize("streams", [1, 4])
def test_control_another_gate_or_dilation_breaks_the_match(streams: int) -> None:
    golden = Golden(streams)
    assert not matches(golden.output(golden.module(gate="sigmoid")), golden.tensors["output"])
    engram = golden.module()
    engram.short_conv.dilation -= 1
    assert not matches(golden.output(engram), golden.tensors["output"])
