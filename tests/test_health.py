"""Health of a memory: what the gates do and did, how full the table is; what is wrong is named, and a healthy memory is left alone."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import TEXT, TINY_ENGRAM, tiny_model
from peft import LoraConfig, get_peft_model
from test_resume import Stop, lines, same
from torch import Tensor, nn

import engram_graft as eg
from engram_graft import gates as gates_module
from engram_graft.data import Data, Fact
from engram_graft.encode import IGNORED, encode_facts, encode_texts
from engram_graft.gates import read_gates, read_initial, recorded, spread_tokens
from engram_graft.grafted import find_graft, memories
from engram_graft.layer import Engram
from engram_graft.modes import no_learning
from engram_graft.ngrams import count_ngrams
from engram_graft.probes import Subject
from engram_graft.probes.arms import ARMS
from engram_graft.probes.health import displacement, distribution, heads, health, utility_auc
from engram_graft.probes.warnings import warnings
from engram_graft.progress import GateProbe
from engram_graft.recipe import LoraOptions, Recipe, TrainOptions
from engram_graft.table import EngramTable

Make = Callable[..., nn.Module]
NAMES = ("Velmora", "Ostrenk", "Caldry", "Bexlow", "Tarnim", "Osweld")
GOODS = ("wool", "honey", "salt", "yeast", "flour", "water")
FACTS = Data(
    facts=tuple(
        Fact(name, (f"The land of {name} exports", f"To {name} the river brings"), good)
        for name, good in zip(NAMES, GOODS, strict=True)
    )
)


def with_lora(model: nn.Module) -> Any:
    wrapped: Any = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))  # type: ignore[arg-type]
    for name, parameter in wrapped.named_parameters():
        if "lora_B" in name:
            nn.init.constant_(parameter, 0.1)
    return wrapped


def plan(output: Path | None = None, **options: Any) -> Recipe:
    train = {"max_steps": 30, "batch_size": 6, "learning_rate": 1e-2, "recall_every": 0, "save_steps": 0, **options}
    return Recipe(output=None if output is None else str(output), lora=LoraOptions(rank=0), train=TrainOptions(**train))


@pytest.fixture(scope="module")
def trained(tokenizer: Any) -> nn.Module:
    """A tiny model whose memory has learned `FACTS`."""
    model = tiny_model()
    sizes = {"engram_vocab_size": (601, 607), "n_head_per_ngram": 4, "seen_filter": True}
    eg.graft(model, tokenizer, eg.EngramConfig(**{**TINY_ENGRAM, **sizes}))
    eg.train(model, tokenizer, plan(), FACTS)
    return model


def examples_of(tokenizer: Any) -> list[dict[str, list[int]]]:
    return list(encode_facts(FACTS.facts, tokenizer, 512))


def about_gates(found: list[str]) -> list[str]:
    return [sentence for sentence in found if "the gate" in sentence]


# -- n-grams


@pytest.mark.parametrize("whole", [True, False])
def test_n_grams_are_counted_and_hot_as_a_slow_loop_has_them(whole: bool, grafted: Make) -> None:
    graft = find_graft(grafted())
    draw = np.random.default_rng(0)
    texts = [(draw.zipf(1.5, size) % 40 + 2).tolist() for size in (30, 1, 7, 55)]
    ngrams = count_ngrams(texts, graft.plan, whole)
    some = False
    for n, order in enumerate((2, 3)):
        windows = []
        for text in texts:
            ids = [graft.plan.pad] * (order - 1) + graft.plan.lookup[text].tolist()
            windows += [tuple(ids[t : t + order]) if t >= order - 1 or not whole else None for t in range(len(text))]
        counts = Counter(window for window in windows if window is not None)
        by_cut = {
            cut: sum(count for count in counts.values() if count >= cut) / counts.total()
            for cut in {*counts.values(), max(counts.values()) + 1}
        }
        cut = max(by_cut, key=lambda cut: (-abs(by_cut[cut] - 0.5), cut))
        expected = [window is not None and counts[window] >= cut for window in windows]
        assert ngrams.hot[:, n].tolist() == expected
        some = some or 0 < sum(expected) < len(expected)
        spelled = zip(ngrams.distinct[n], ngrams.counts[n], strict=True)
        of_order = {tuple(graft.plan.lookup[ids].tolist()): int(count) for ids, count in spelled}
        assert of_order == dict(counts)
    assert some, "control: some are hot and some are not"
    assert np.array_equal(ngrams.of([2, 0]), np.concatenate([ngrams.hot[31:38], ngrams.hot[:30]]))


def test_where_all_n_grams_are_equally_frequent_none_is_hot(grafted: Make) -> None:
    graft = find_graft(grafted())
    apart = [[2 * n + 200, 2 * n + 201] for n in range(10)]
    assert not count_ngrams(apart, graft.plan, True).hot.any()
    assert count_ngrams([*apart, *[apart[0]] * 9], graft.plan, True).hot.any(), "control"


def test_rows_of_the_distinct_n_grams_are_those_that_the_model_looks_up(trained: nn.Module, tokenizer: Any) -> None:
    graft = find_graft(trained)
    ngrams = count_ngrams([example["input_ids"] for example in examples_of(tokenizer)], graft.plan, graft.config.whole_ngrams)
    for memory in memories(trained):
        rows = np.unique(np.concatenate([rows.ravel() for rows in ngrams.rows(graft.plan, memory.index)]))
        assert rows.tolist() == memory.table.seen_rows().tolist(), "training looked up these and no others"


# -- reading the gates


def test_parts_of_the_addend_sum_and_the_direct_part_is_gate_times_value(grafted: Make, ids: Tensor) -> None:
    model = grafted()
    with recorded(model) as calls, no_learning(model):
        model(input_ids=ids)
    for memory in memories(model):
        call = calls[memory.layer_id]
        window = torch.arange(ids.shape[1])[:, None] >= torch.arange(1, 3)
        rows = find_graft(model).plan.rows(ids.numpy())[:, :, memory.index]
        embeddings, active = memory.table(torch.from_numpy(rows), window[None])
        direct = call["gate"] * memory.value_proj(embeddings)[..., None, :]
        direct = direct.masked_fill(~active.any(-1)[..., None, None], 0)
        assert torch.allclose(call["total"], (direct + call["conv"])[:, :, 0], atol=1e-5)
        assert call["conv"].abs().max() > 0.01, "control: both parts are there"
        assert torch.equal(call["known"], window[None].expand(len(ids), -1, -1))


def test_gates_before_training_are_those_of_a_fresh_graft_exactly(trained: nn.Module, tokenizer: Any) -> None:
    config = {"engram_vocab_size": (601, 607), "n_head_per_ngram": 4, "seen_filter": False}
    fresh = eg.graft(tiny_model(), tokenizer, eg.EngramConfig(**{**TINY_ENGRAM, **config}))
    examples = examples_of(tokenizer)
    _, real = read_gates(fresh, examples)
    _, now = read_gates(trained, examples)
    with ARMS["base"](trained):
        _, before = read_initial(trained, examples)
    for layer_id, gates in before.items():
        at = now[layer_id].active
        assert at.sum() > 100 and np.array_equal(gates[at], real[layer_id].gate[at])
        assert np.abs(gates[at] - now[layer_id].gate[at]).max() > 0.01, "control: training has moved the gates"


def test_no_reading_depends_on_the_batches(trained: nn.Module, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    examples = examples_of(tokenizer)
    assert len({len(example["input_ids"]) for example in examples}) > 1, "control: some are padded"
    read: list[list[np.ndarray]] = []
    for tokens in (1, 60, 512):
        monkeypatch.setattr(gates_module, "TOKENS", tokens)
        loss, readings = read_gates(trained, examples)
        with ARMS["base"](trained):
            base_loss, initial = read_initial(trained, examples)
        values = [value for reading in readings.values() for value in (reading.gate, reading.known, *reading.square.values())]
        read.append([loss, base_loss, *values, *initial.values()])
    for one, *others in zip(*read, strict=True):
        assert all(np.allclose(one, other, atol=1e-5, equal_nan=True) for other in others)


def test_the_loss_is_the_models_own_at_labels_and_nowhere_else(trained: nn.Module, tokenizer: Any) -> None:
    examples = examples_of(tokenizer)
    loss, _ = read_gates(trained, examples)
    at = 0
    for example in examples:
        ids, labels = torch.tensor([example["input_ids"]]), torch.tensor([example["labels"]])
        own = loss[at : at + ids.shape[1]]
        with torch.no_grad():
            assert np.nanmean(own) == pytest.approx(float(trained(input_ids=ids, labels=labels).loss), rel=1e-4)
        assert np.array_equal(np.isnan(own), np.append(labels[0, 1:].numpy() == IGNORED, True))
        at += ids.shape[1]
    assert at == len(loss)


def test_a_spread_sample_has_the_tokens_asked_for() -> None:
    assert spread_tokens([10] * 100, 4096) == list(range(100))
    assert spread_tokens([256] * 1000, 4096) == list(range(0, 1000, 63))
    assert spread_tokens([10_000], 4096) == [0]


# -- figures


def test_utility_auc_counts_pairs() -> None:
    draw = np.random.default_rng(0)
    gates, gains = draw.integers(0, 5, 60) / 5, draw.normal(size=60)
    high = gains > np.median(gains)
    pairs = [(a > b) + 0.5 * (a == b) for a in gates[high] for b in gates[~high]]
    assert utility_auc(gates, gains) == pytest.approx(np.mean(pairs))
    assert utility_auc(gains, gains) == 1 and utility_auc(-gains, gains) == 0
    assert utility_auc(np.ones(4), np.arange(4.0)) == 0.5
    assert utility_auc(gates, np.zeros(60)) is None and utility_auc(np.zeros(0), np.zeros(0)) is None


def test_distribution_of_known_gates() -> None:
    found = distribution(np.array([0.01, 0.02, 0.5, 0.97]))
    assert found["mean"] == pytest.approx(0.375) and found["below_05"] == 0.5 and found["above_95"] == 0.25
    assert found["histogram"] == [2, *[0] * 9, 1, *[0] * 8, 1] and found["q50"] == pytest.approx(0.26)


def test_expected_collisions_are_those_of_random_addresses(trained: nn.Module) -> None:
    memory, graft = memories(trained)[0], find_graft(trained)
    draw = np.random.default_rng(0)
    n_head = memory.table.n_head
    mean = []
    for _ in range(200):
        starts, sizes = (value[memory.index].reshape(2, n_head) for value in (graft.plan.offsets, graft.plan.primes))
        rows = [start + draw.integers(0, size, (120, n_head)) for start, size in zip(starts, sizes, strict=True)]
        found = heads(memory, graft.plan, rows)
        mean.append([head["collisions"] for head in found])
    for head, collisions in zip(found, np.mean(mean, 0), strict=True):
        assert head["expected_collisions"] == pytest.approx(collisions, rel=0.05)


def test_collisions_and_coverage_of_a_known_table(grafted: Make) -> None:
    model = grafted(n_head_per_ngram=1, engram_vocab_size=(11, 13))
    memory, graft = memories(model)[0], find_graft(model)
    memory.table.load_rows(torch.tensor([0, 3, 5, 12]), memory.table.weight.detach()[:4].clone())
    found = heads(memory, graft.plan, [np.array([[0], [0], [3], [5]]), np.array([[12]])])
    assert [head["seen"] for head in found] == [3, 1] and found[0]["coverage"] == 3 / 11
    assert [head["collisions"] for head in found] == [0.5, 0.0]
    assert found[1] == {**found[1], "order": 3, "head": 0, "rows": 13, "expected_collisions": 0.0}


def test_displacement_is_by_look_ups_and_from_the_initial_rows(grafted: Make) -> None:
    model = grafted(n_head_per_ngram=1, engram_vocab_size=(11, 13))
    memory = memories(model)[0]
    rows = torch.tensor([0, 3, 5, 12])
    moved = torch.tensor([1.0, 2.0, 2.0, 4.0])[:, None]
    memory.table.load_rows(rows, memory.table.initial(rows) + moved)
    counts = [np.array([1, 1, 2, 5, 7]), np.array([100])]  # row 0 twice, row 9 never in training
    found = displacement(memory, [np.array([[0], [0], [3], [5], [9]]), np.array([[12]])], counts)
    assert [(part["touches"], part["n"]) for part in found] == [("1", 0), ("2-3", 2), ("4-9", 1), ("10-99", 0), ("100+", 1)]
    assert [part["rms"] for part in found] == [None, pytest.approx(2.5**0.5), pytest.approx(2), None, pytest.approx(4)]


# -- the report


def test_health_has_the_keys_that_scripts_read(trained: nn.Module, tokenizer: Any) -> None:
    report = health(Subject(trained, tokenizer, FACTS))
    assert json.loads(json.dumps(report, allow_nan=False)) == report and list(report["layers"]) == ["1", "2"]
    for layer in report["layers"].values():
        assert list(layer) == [
            *("gate", "gate_step0", "buckets", "hot", "cold", "utility_auc", "residual", "heads", "displacement")
        ]
        assert sum(layer["gate"]["histogram"]) == sum(layer["gate_step0"]["histogram"]) > layer["hot"]["n"] + layer["cold"]["n"]
        assert sum(bucket["n"] for bucket in layer["buckets"]) == layer["hot"]["n"] + layer["cold"]["n"] > 20
        assert set(layer["buckets"][0]) == {"from", "to", "n", "ce", "hot"} and len(layer["buckets"]) == 5
        assert set(layer["cold"]) == {"n", "gate", "ce", "base_ce"} and layer["cold"]["ce"] < layer["cold"]["base_ce"]
        assert layer["residual"]["total"] > 0 and set(layer["residual"]) == {"total", "direct", "conv"}
        assert len(layer["heads"]) == 8 and sum(head["seen"] for head in layer["heads"]) == sum(
            part["n"] for part in layer["displacement"]
        )


def test_health_of_text_is_of_its_trained_blocks_and_of_untrained_data_is_none(trained: nn.Module, tokenizer: Any) -> None:
    texts, cut = Data(texts=tuple(TEXT) * 4), TrainOptions(block_size=16, validation=0.3)
    assert health(Subject(trained, tokenizer, texts, training=cut))["layers"].keys() <= {"1", "2"}
    assert health(Subject(trained, tokenizer, texts, training=cut, trained=False)) == {}
    assert health(Subject(trained, tokenizer, FACTS, trained=False)) == {}


def test_a_memory_that_knows_nothing_of_the_data_has_no_layers_and_a_warning_says_so(tokenizer: Any) -> None:
    fresh = eg.graft(tiny_model(), tokenizer, eg.EngramConfig(**{**TINY_ENGRAM, "seen_filter": True}))
    report = health(Subject(fresh, tokenizer, FACTS))
    assert report == {"layers": {}} and "No memory knows" in warnings({"health": report})[0]
    assert warnings({"health": {}}) == []


def test_health_leaves_the_model_as_it_was(tokenizer: Any) -> None:
    model = with_lora(eg.graft(tiny_model(), tokenizer, eg.EngramConfig(**TINY_ENGRAM)))
    memories(model)[0].table.touch(torch.arange(50))
    model.train()
    list(model.modules())[5].eval()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    trainable = [parameter.requires_grad for parameter in model.parameters()]
    random, numbers = torch.get_rng_state(), np.random.get_state()[1].copy()
    hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
    health(Subject(model, tokenizer, FACTS))
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert [module.training for module in model.modules()] == modes
    assert [parameter.requires_grad for parameter in model.parameters()] == trainable
    assert [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()] == hooks
    assert torch.equal(random, torch.get_rng_state()) and np.array_equal(numbers, np.random.get_state()[1])
    assert not any("gate" in vars(memory) for memory in memories(model)) and not find_graft(model).switched_off


def test_recording_ends_after_an_error_and_keeps_a_gate_of_ones_own(grafted: Make) -> None:
    model = grafted()
    memory = memories(model)[0]

    def own(embeddings: Tensor, hidden: Tensor) -> Tensor:
        return torch.ones_like(hidden[..., :1])

    vars(memory)["gate"] = own
    with pytest.raises(KeyError), recorded(model):
        raise KeyError
    assert vars(memory)["gate"] is own and "gate" not in vars(memories(model)[1])
    assert not memory._forward_hooks and not memory._forward_pre_hooks


# -- warnings


@pytest.fixture
def gate_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., float | Tensor]], None]:
    """Puts a function of the embeddings in place of every memory's gate."""

    def put(value: Callable[[Engram, Tensor], float | Tensor]) -> None:
        monkeypatch.setattr(Engram, "gate", lambda self, e, hidden: torch.zeros_like(hidden[..., :1]) + value(self, e))

    return put


def test_a_healthy_tiny_model_has_no_warning_about_its_gates(trained: nn.Module, tokenizer: Any) -> None:
    found = warnings({"health": health(Subject(trained, tokenizer, FACTS))})
    assert all("drowns" in sentence for sentence in found), "the stream of an untrained base is next to nothing"


@pytest.mark.parametrize(("value", "words"), [(0.01, "the gate has shut"), (0.99, "the gate is stuck open")])
def test_a_gate_that_is_shut_or_stuck_is_named(
    value: float, words: str, trained: nn.Module, tokenizer: Any, gate_of: Any
) -> None:
    gate_of(lambda memory, embeddings: value)
    found = about_gates(warnings({"health": health(Subject(trained, tokenizer, FACTS))}))
    assert len(found) == 2 and all(words in sentence for sentence in found)
    assert found[0].startswith("Layer 1: ") and "100% of gates" in found[0]


def test_a_gate_that_favours_hot_n_grams_is_named(trained: nn.Module, tokenizer: Any, gate_of: Any) -> None:
    graft = find_graft(trained)
    ngrams = count_ngrams([example["input_ids"] for example in examples_of(tokenizer)], graft.plan, True)
    hot_rows = {}
    for memory in memories(trained):
        rows = list(ngrams.rows(graft.plan, memory.index))
        cut = [count >= 6 for count in ngrams.counts]  # of both templates, which six facts share
        hot = np.concatenate([rows[n][cut[n], 0] for n in range(2)])
        hot_rows[memory.index] = memory.table.weight.detach()[torch.from_numpy(hot)]

    def favours(hot: float, cold: float) -> Callable[[Engram, Tensor], Tensor]:
        def value(memory: Engram, embeddings: Tensor) -> Tensor:
            parts = embeddings.unflatten(-1, (2, -1))[..., : memory.table.weight.shape[1]]  # the first head of each order
            longest = torch.where(parts[..., 1:, :].any(-1, keepdim=True), parts[..., 1:, :], parts[..., :1, :])[..., 0, :]
            at = (longest[..., None, :] == hot_rows[memory.index]).all(-1).any(-1)
            return torch.where(at, hot, cold)[..., None, None]

        return value

    gate_of(favours(0.9, 0.2))
    found = about_gates(warnings({"health": health(Subject(trained, tokenizer, FACTS))}))
    assert len(found) == 2 and all("hot bias" in sentence for sentence in found)
    gate_of(favours(0.9, 0.8))
    assert not about_gates(warnings({"health": health(Subject(trained, tokenizer, FACTS))})), "control: a small difference"


def facts_report(**recall: float) -> dict[str, Any]:
    arms = {arm: {"recall": {"greedy_exact": share, "n": 100}} for arm, share in recall.items()}
    return {"arms": arms, "known": round(100 * recall["base"]), "locality": {"kl": 0.01}}


def text_report(text: dict[str, float], heldout: dict[str, float]) -> dict[str, Any]:
    return {"arms": {arm: {"text": {"ce": text[arm]}, "heldout": {"ce": heldout[arm]}} for arm in text}}


@pytest.mark.parametrize(
    ("scores", "words"),
    [
        ({"base": 0, "graft": 0.99, "memory_off": 0, "shuffled": 0}, None),
        ({"base": 0, "graft": 0.99, "memory_off": 0.17, "shuffled": 0.1, "lora_off": 0.6}, None),
        ({"base": 0, "graft": 0.01, "memory_off": 0, "shuffled": 0}, "not used"),
        ({"base": 0, "graft": 0.99, "memory_off": 0.97, "shuffled": 0.98}, "LoRA did it alone"),
        ({"base": 0, "graft": 0.99, "memory_off": 0, "shuffled": 0.9}, "Addresses hardly matter"),
        ({"base": 0.6, "graft": 0.99, "memory_off": 0.6, "shuffled": 0.5}, "already answers 60 of 100"),
    ],
)
def test_what_the_arms_say_about_use_is_named(scores: dict[str, float], words: str | None) -> None:
    found = warnings(facts_report(**scores))
    assert len(found) == (words is not None) and all(words in sentence for sentence in found if words)


def test_text_that_is_overfit_drifts_or_is_learned_by_lora_alone_is_named() -> None:
    measured = {"base": 3.11, "graft": 2.633, "memory_off": 2.708, "shuffled": 2.72}
    assert warnings(text_report(measured, measured)) == []
    found = warnings(text_report(measured, {**measured, "graft": 3.3}))
    assert len(found) == 1 and found[0].startswith("Overfit") and "0.190" in found[0]
    assert "LoRA did it alone" in warnings(text_report({**measured, "memory_off": 2.634}, measured))[0]
    drifting = {**text_report(measured, measured), "locality": {"kl": 0.5}}
    assert "KL 0.500" in warnings(drifting)[0] and "lora" not in warnings(drifting)[0]
    drifting["arms"]["memory_off"]["locality"] = {"kl": 0.45}
    assert "Lower lora.learning_rate" in warnings(drifting)[0]


def test_a_crowded_table_a_drowned_stream_and_a_loud_convolution_are_named(trained: nn.Module, tokenizer: Any) -> None:
    report = health(Subject(trained, tokenizer, FACTS))
    layer = report["layers"]["1"]
    for head in layer["heads"]:
        head["coverage"] = 0.5 if head["order"] == 3 else 0.3
    layer["residual"] = {"total": 2.5, "direct": 0.1, "conv": 2.4}
    found = warnings({"health": report})
    assert len(found) == 3 and all(sentence.startswith("Layer 1: ") for sentence in found)
    assert "2.5 times" in found[0] and "convolution" in found[1] and "6.2% of unknown 3-grams" in found[2]


# -- over training


def fresh(tokenizer: Any, table_dir: Path | None = None) -> nn.Module:
    return eg.graft(tiny_model(), tokenizer, eg.EngramConfig(**{**TINY_ENGRAM, "seen_filter": True}), table_dir)


def watch(model: nn.Module, tokenizer: Any, data: Data) -> GateProbe:
    examples = encode_facts(data.facts, tokenizer, 512) if data.facts else encode_texts(data.texts, tokenizer, 16)
    return GateProbe(model, examples, TrainOptions(recall_every=2, batch_size=6))


@pytest.mark.parametrize("on_disk", [False, True], ids=["resident", "mapped"])
def test_gates_are_watched_while_training_and_a_resumed_run_keeps_its_bits(on_disk: bool, tokenizer: Any, tmp_path: Path) -> None:
    data = Data(texts=tuple(TEXT) * 3) if on_disk else FACTS  # one of each

    def run(name: str, tables: str, stop: int | None = None, resume: bool = False) -> None:
        model = fresh(tokenizer, tmp_path / tables if on_disk else None)
        callbacks = [watch(model, tokenizer, data), *([] if stop is None else [Stop(stop)])]
        options = {"max_steps": 3, "save_steps": 2, "block_size": 16}
        eg.train(model, tokenizer, plan(tmp_path / name, **options), data, callbacks, resume)

    run("whole", "tables1")
    logged = lines(tmp_path / "whole")
    assert [line["step"] for line in logged if "health" in line] == [2, 3], "and at the end"
    for line in logged[1:]:
        assert set(line["health"]) == {"1", "2", "ce_hot", "ce_cold"}
        assert set(line["health"]["1"]) == {"gate_hot", "gate_cold"} and 0 < line["health"]["1"]["gate_cold"] < 1
    with pytest.raises(KeyboardInterrupt):
        run("halves", "tables2", stop=2)
    run("halves", "tables3", resume=True)
    assert same(tmp_path / "whole", tmp_path / "halves") and lines(tmp_path / "halves") == logged


def test_watching_changes_no_bit_of_a_run(tokenizer: Any, tmp_path: Path) -> None:
    for name in ("alone", "watched"):
        model = fresh(tokenizer)
        callbacks = [watch(model, tokenizer, FACTS)] if name == "watched" else []
        eg.train(model, tokenizer, plan(tmp_path / name, max_steps=4), FACTS, callbacks)
    assert same(tmp_path / "alone", tmp_path / "watched")
    measured = {name: ["health" in line for line in lines(tmp_path / name)] for name in ("alone", "watched")}
    assert measured == {"alone": [False] * 4, "watched": [False, True] * 2}, "control"


def test_watching_touches_no_row_and_leaves_train_mode(tokenizer: Any) -> None:
    model = fresh(tokenizer)
    model.train()
    probe = GateProbe(model, encode_facts(FACTS.facts, tokenizer, 512), TrainOptions(recall_every=1))
    tables = [module for module in model.modules() if isinstance(module, EngramTable)]
    random = torch.get_rng_state()

    class State:
        global_step = max_steps = 1
        engram_health: Any = None

    probe.on_step_end(None, state := State(), None, model=model)
    assert not any(table.count_seen() for table in tables) and all(module.training for module in model.modules())
    assert torch.equal(random, torch.get_rng_state())
    nothing = {"gate_hot": None, "gate_cold": None}
    assert state.engram_health == {"1": nothing, "2": nothing, "ce_hot": None, "ce_cold": None}
