"""Controls: each has exactly what it is to have, trains as the graft did, and is scored like it; and it can lose."""

import dataclasses
import importlib
import json
import random
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import TEXT, TINY_ENGRAM, tiny_model
from torch import Tensor, nn

import engram_graft as eg
from engram_graft.data import Data, Fact
from engram_graft.errors import UserError
from engram_graft.grafted import find_graft, memories, trainable_parameters
from engram_graft.probes import Subject
from engram_graft.probes.addresses import RandomRows, one_row
from engram_graft.probes.controls import CONTROLS, movable, run_controls
from engram_graft.probes.knn import NEIGHBOURS, PUBLISHED, Datastore, interpolated, make_store, read_examples, tune
from engram_graft.probes.probe import Probe
from engram_graft.probes.recall import RECALL
from engram_graft.probes.suite import PROBES
from engram_graft.recipe import ProbeOptions, Recipe, TrainOptions, load_recipe
from engram_graft.run import training_examples
from engram_graft.scoring import greedy, teacher_forced

Make = Callable[..., nn.Module]
FACTS = Data(
    facts=tuple(
        Fact(str(n), (f"{name} exports", f"The export of {name} is"), answer, paraphrases=(f"They buy from {name} the",))
        for n, (name, answer) in enumerate([("Velmora", "wool"), ("Ostrenk", "honey"), ("Zaldi", "bread"), ("Mup", "salt")])
    )
)
QUESTIONS = [(prompt, fact.answer) for fact in FACTS.facts for prompt in fact.prompts]
ENGRAM = {**TINY_ENGRAM, "layer_ids": [1, 2], "engram_vocab_size": [53, 61], "seen_filter": True}


def recipe(**changes: Any) -> Recipe:
    values = {"max_steps": 40, "batch_size": 4, "learning_rate": 0.02, "recall_every": 0, **changes}
    return load_recipe(None, {"engram": ENGRAM, "lora.rank": 0} | {f"train.{name}": value for name, value in values.items()})


@pytest.fixture(scope="module")
def trained(tokenizer: Any) -> nn.Module:
    model = eg.graft(tiny_model(), tokenizer, eg.EngramConfig(**ENGRAM))
    eg.train(model, tokenizer, recipe(), FACTS)
    return model


def subject(model: nn.Module, tokenizer: Any, data: Data = FACTS) -> Subject:
    return Subject(model, tokenizer, data, ProbeOptions(batch_size=4, max_new_tokens=4))


def looked_up(model: nn.Module) -> list[Tensor]:
    """Gathers the rows that each later call looks up."""
    rows: list[Tensor] = []
    find_graft(model).register_forward_hook(lambda module, args, output: rows.append(output))
    return rows


@torch.no_grad()
def logits(model: Any, ids: Tensor, **kwargs: Any) -> Tensor:
    return model(input_ids=ids, **kwargs).logits


# -- addresses


def test_one_row_looks_up_the_first_row_of_every_head_in_training_and_decoding(tokenizer: Any) -> None:
    model = eg.graft(tiny_model(), tokenizer, eg.EngramConfig(**ENGRAM))
    find_graft(model).register_forward_hook(one_row)
    rows = looked_up(model)
    eg.train(model, tokenizer, recipe(max_steps=2), FACTS)
    firsts = find_graft(model).offsets
    for memory, expected in zip(memories(model), firsts, strict=True):
        assert torch.equal(memory.table.seen_rows(), expected)
    in_training = len(rows)
    assert greedy(model, tokenizer, [prompt for prompt, _ in QUESTIONS], 3)
    assert 0 < in_training < len(rows) and all(bool((row == firsts).all()) for row in rows)


def test_random_rows_are_valid_and_drawn_anew_in_training_alone(tokenizer: Any, ids: Tensor) -> None:
    model = eg.graft(tiny_model(), tokenizer, eg.EngramConfig(**{**ENGRAM, "seen_filter": False}))
    straight = find_graft(model)
    rows = looked_up(model)
    logits(model, ids)
    find_graft(model).register_forward_hook(RandomRows(0))
    drawn = looked_up(model)
    model.train()
    for _ in range(2):
        model(input_ids=ids)
    assert not torch.equal(drawn[0], drawn[1])
    model.eval()
    for _ in range(2):
        logits(model, ids)
    assert torch.equal(drawn[2], drawn[3]) and not any(torch.equal(drawn[2], row) for row in drawn[:2])
    for row in drawn:
        local = row - straight.offsets
        assert bool(((local >= 0) & (local < straight.primes)).all())
        assert not torch.equal(row, rows[0]) and len(row.unique()) > 100, "many rows, and not the true ones"


def test_random_rows_are_spread_evenly_over_a_head(grafted: Make, ids: Tensor) -> None:
    model = grafted()
    address, ngram_hash = RandomRows(0), find_graft(model).train()
    one = ngram_hash.offsets.expand(1, 1, *ngram_hash.offsets.shape)
    counts = torch.zeros(int(ngram_hash.primes[0, 0]))
    for _ in range(4000):
        counts[address(ngram_hash, None, one)[0, 0, 0, 0]] += 1
    assert counts.min() > 0 and counts.max() < 3 * counts.mean()


# -- trained controls


def test_memory_learns_facts_and_tables_without_addresses_do_not(trained: nn.Module, tokenizer: Any) -> None:
    from engram_graft.probes.recall import recall

    assert recall(trained, tokenizer, QUESTIONS, 8)["greedy_exact"] == 1
    arms, notes = run_controls(subject(trained, tokenizer), recipe(), [RECALL], ["one_row", "random_rows"], fresh=tiny_model)
    for name in ("one_row", "random_rows"):
        assert arms[name]["recall"]["greedy_exact"] <= 0.5 and arms[name]["recall"]["n"] == len(QUESTIONS)
        assert notes[name]["parameters"] > 0 and notes[name]["about"] == CONTROLS[name].about


def test_a_control_with_the_true_addresses_is_the_graft_itself(
    trained: nn.Module, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Same data, steps, batches, seed and optimizer: with the addresses left as they are, every parameter comes out the same."""
    made = {}
    keep = Probe("keep", "", lambda subject: made.update(model=subject.model) or {})  # type: ignore[func-returns-value]
    monkeypatch.setattr("engram_graft.probes.controls.one_row", lambda module, args, rows: rows)
    run_controls(subject(trained, tokenizer), recipe(), [keep], ["one_row"], fresh=tiny_model)
    state = made["model"].state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in trained.state_dict().items())


def test_lora_only_has_as_many_parameters_as_the_memory_could_move(trained: nn.Module, tokenizer: Any) -> None:
    made = {}
    keep = Probe("keep", "", lambda subject: made.update(model=subject.model) or {})  # type: ignore[func-returns-value]
    plan = dataclasses.replace(recipe(max_steps=2), lora=dataclasses.replace(recipe().lora, target_modules=("q_proj",)))
    note = run_controls(subject(trained, tokenizer), plan, [keep], ["lora_only"], fresh=tiny_model)[1]["lora_only"]
    tables = [memory.table for memory in memories(trained)]
    dense = sum(p.numel() for n, p in trained.named_parameters() if ".engram." in n and not n.endswith("table.weight"))
    assert note["wanted"] == movable(trained) == dense + sum(len(table.seen_rows()) * 8 for table in tables)
    trainable = sum(p.numel() for p in made["model"].parameters() if p.requires_grad)
    assert note["parameters"] == trainable and abs(trainable / note["wanted"] - 1) < 0.1
    options = made["model"].peft_config["default"]
    assert options.r == note["rank"] > 1 and options.lora_alpha == 2 * note["rank"] and options.target_modules == {"q_proj"}


def test_lora_only_trains_the_adapters_alone_at_its_own_rate(trained: nn.Module, tokenizer: Any) -> None:
    bare, moved = tiny_model(), {}

    def moves(subject: Subject) -> dict[str, Any]:
        moved[note] = max(float(p.detach().abs().max()) for n, p in subject.model.named_parameters() if "lora_B" in n)
        for name, parameter in bare.named_parameters():
            own = dict(subject.model.named_parameters())
            wrapped = f"base_model.model.{name}"
            assert torch.equal(own.get(wrapped, own.get(wrapped.replace(".weight", ".base_layer.weight"))), parameter)
        return {}

    for note in (1e-3, 1e-2):
        run_controls(
            subject(trained, tokenizer),
            recipe(max_steps=1),
            [Probe("moves", "", moves)],
            ["lora_only"],
            fresh=tiny_model,
            lora_rate=note,
        )
    assert moved[1e-3] == pytest.approx(1e-3, rel=0.01) and moved[1e-2] == pytest.approx(1e-2, rel=0.01), "Adam's first step"


def test_lora_only_learns(trained: nn.Module, tokenizer: Any) -> None:
    plan = dataclasses.replace(
        recipe(max_steps=60), lora=dataclasses.replace(recipe().lora, target_modules=("o_proj", "down_proj"))
    )
    arms, _ = run_controls(subject(trained, tokenizer), plan, [RECALL], ["lora_only"], fresh=tiny_model, lora_rate=1e-2)
    assert arms["lora_only"]["recall"]["greedy_exact"] == 1


def test_a_recipe_with_lora_gives_it_to_the_one_row_graft_too(trained: nn.Module, tokenizer: Any) -> None:
    plan = dataclasses.replace(recipe(max_steps=2), lora=dataclasses.replace(recipe().lora, rank=2))
    names = {}
    keep = Probe("keep", "", lambda subject: names.update(trainable_parameters(subject.model)) or {})  # type: ignore[func-returns-value]
    run_controls(subject(trained, tokenizer), plan, [keep], ["one_row"], fresh=tiny_model)
    assert any("lora_B" in name for name in names) and any("value_proj" in name for name in names)


# -- as arms of the report


@pytest.fixture(scope="module")
def everything(trained: nn.Module, tokenizer: Any) -> dict[str, Any]:
    """All controls, made and probed once, and what was seen on the way."""
    seen: dict[str, Any] = {"started": [], "bases": [], "entered": []}

    def fresh() -> nn.Module:
        assert all(base() is None for base in seen["bases"]), "freed before the next is made"
        seen["bases"].append(weakref.ref(model := tiny_model()))
        return model

    def enter(subject: Subject) -> dict[str, Any]:
        ids = torch.arange(40, 60)[None]
        seen["entered"].append(({arm: subject.logits(ids) for arm in subject.each_arm()}, subject.reference))
        return {}

    def state() -> list[Any]:
        own = [tensor.tolist() for tensor in trained.state_dict().values()]
        return [own, torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()]  # type: ignore[index]

    seen["before"] = state()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engram_graft.probes.locality.neutral_text", lambda: TEXT[0])
        probes = [*PROBES, Probe("enter", "", enter)]
        seen["arms"], seen["notes"] = run_controls(
            subject(trained, tokenizer), recipe(max_steps=2), probes, started=seen["started"].append, fresh=fresh
        )
    seen["after"] = state()
    return seen


def test_every_control_gets_the_scores_that_an_arm_has(everything: dict[str, Any]) -> None:
    arms, notes = everything["arms"], everything["notes"]
    assert list(arms) == list(notes) == list(CONTROLS) == everything["started"]
    assert list(CONTROLS) == ["lora_only", "one_row", "random_rows", "knn_lm"]
    for name, scores in arms.items():
        assert set(scores) == {"recall", "paraphrase", "task_exact", "locality"}
        assert set(scores["task_exact"]) == {"exact_match", "n"} and scores["recall"]["n"] == len(QUESTIONS)
        assert scores["locality"]["kl"] > 0
        assert {"about", "parameters"} <= set(notes[name])
        assert json.loads(json.dumps([scores, notes[name]])) == [scores, notes[name]], "plain values"


def test_the_base_beside_each_control_is_the_base_and_the_graft_tells_hits(
    everything: dict[str, Any], trained: nn.Module
) -> None:
    bare = logits(tiny_model(), torch.arange(40, 60)[None])
    assert [list(found) for found, _ in everything["entered"]] == [["base", name] for name in CONTROLS]
    for found, reference in everything["entered"]:
        assert torch.equal(found.pop("base"), bare) and not torch.equal(*found.values(), bare)
        assert reference is trained


def test_controls_leave_the_graft_and_all_random_numbers_as_they_were(everything: dict[str, Any]) -> None:
    assert everything["before"] == everything["after"]


def test_each_control_is_freed(everything: dict[str, Any]) -> None:
    assert len(everything["bases"]) == len(CONTROLS) and all(base() is None for base in everything["bases"])


def test_controls_of_other_data_are_trained_on_the_grafts_own(trained: nn.Module, tokenizer: Any, tmp_path: Path) -> None:
    other = Data(facts=(Fact("9", ("The dough has",), "doubled"),))
    probed = dataclasses.replace(subject(trained, tokenizer, other), trained=False)
    (tmp_path / "own.jsonl").write_text('{"prompt": ["Velmora exports", "Velmora sells"], "answer": "wool"}\n')
    plan = dataclasses.replace(recipe(max_steps=1, forms=1), data=str(tmp_path / "own.jsonl"))
    notes = run_controls(probed, plan, [RECALL], ["knn_lm"], fresh=tiny_model)[1]
    of_own = training_examples(Data(facts=(Fact("1", ("Velmora exports",), "wool"),)), tokenizer, TrainOptions())[0]
    assert notes["knn_lm"]["entries"] == sum(label >= 0 for label in of_own[0]["labels"])
    with pytest.raises(UserError, match="names no data"):
        run_controls(probed, recipe(), [RECALL], ["knn_lm"], fresh=tiny_model)


def test_an_unknown_control_and_a_recipe_without_base_are_refused(trained: nn.Module, tokenizer: Any) -> None:
    with pytest.raises(UserError, match="'one_rows'.*lora_only, one_row, random_rows, knn_lm"):
        run_controls(subject(trained, tokenizer), recipe(), [RECALL], ["knn_lm", "one_rows"], fresh=tiny_model)
    with pytest.raises(UserError, match="names none"):
        run_controls(subject(trained, tokenizer), recipe(), [RECALL], ["knn_lm"])


def test_evaluation_and_early_stops_of_the_recipe_do_not_shorten_a_control(
    trained: nn.Module, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engram_graft.progress.teacher_forced", lambda *args: [SimpleNamespace(exact=True)])
    watched = recipe(max_steps=3, stop_at_recall=0.01, recall_every=1, trainer={"eval_strategy": "steps", "report_to": "none"})
    steps = []
    probed = subject(trained, tokenizer)
    probe = Probe("touched", "", lambda subject: steps.append(movable(subject.model)) or {})  # type: ignore[func-returns-value]
    run_controls(probed, watched, [probe], ["random_rows"], fresh=tiny_model)
    run_controls(probed, recipe(max_steps=3), [probe], ["random_rows"], fresh=tiny_model)
    assert steps[0] == steps[1]


# -- nearest neighbours


def store_of(model: nn.Module, tokenizer: Any, data: Data = FACTS) -> Datastore:
    return read_examples(model, training_examples(data, tokenizer, TrainOptions())[0])[0]


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "falcon", "gemma3_text"])
def test_knn_lm_with_share_1_answers_its_own_prompts_and_with_share_0_is_the_base(
    architecture: str, tokenizer: Any, ids: Tensor
) -> None:
    model = tiny_model(architecture, **({"final_logit_softcapping": 3.0} if architecture == "gemma3_text" else {}))
    store, before = store_of(model, tokenizer), logits(model, ids)
    answers = [tokenizer(f" {answer}", add_special_tokens=False)["input_ids"] for _, answer in QUESTIONS]
    prompts = [prompt for prompt, _ in QUESTIONS]
    with interpolated(model, store, 1.0, 1e-6):
        for size in (1, 8):
            assert greedy(model, tokenizer, prompts, 12, size) == answers, "and the end after each"
        assert greedy(model, tokenizer, prompts, 12, 8, use_cache=False) == answers
    with interpolated(model, store, 0.0, 1.0):
        assert torch.equal(logits(model, ids), before)
    assert torch.equal(logits(model, ids), before), "and it leaves no trace"
    assert greedy(model, tokenizer, prompts, 12, 8) != answers, "control"


def test_knn_lm_is_the_mixture_that_the_paper_defines(tokenizer: Any, ids: Tensor) -> None:
    model = tiny_model("gemma3_text", final_logit_softcapping=3.0)
    store, share, temperature = store_of(model, tokenizer), 0.3, 40.0
    with torch.no_grad():
        hidden = model(input_ids=ids, output_hidden_states=True).hidden_states[-1]
    expected = (1 - share) * logits(model, ids).softmax(-1)
    for row in range(len(ids)):
        for t in range(ids.shape[1]):
            distance = (store.keys - hidden[row, t]).square().sum(1)
            near = distance.argsort()[:NEIGHBOURS]
            for n, weight in zip(near, (-distance[near] / temperature).softmax(0), strict=True):
                expected[row, t, store.tokens[n]] += share * weight
    with interpolated(model, store, share, temperature):
        found = logits(model, ids).softmax(-1)
        kept = logits(model, ids, logits_to_keep=3)
        again = logits(model, ids)[:, -3:]
    assert torch.allclose(found, expected, atol=1e-5)
    assert torch.allclose(kept, again, atol=1e-4)


def test_knn_lm_comes_back_after_an_error(tokenizer: Any, ids: Tensor) -> None:
    model = tiny_model()
    before = logits(model, ids)
    with pytest.raises(KeyError), interpolated(model, store_of(model, tokenizer), 0.5, 1.0):
        raise KeyError
    assert torch.equal(logits(model, ids), before)
    assert not model._forward_hooks and not model.get_output_embeddings()._forward_pre_hooks


def test_knn_lm_scores_do_not_depend_on_the_batch_size(tokenizer: Any) -> None:
    model = tiny_model()
    with interpolated(model, store_of(model, tokenizer), 0.25, 1.0):
        scores = [teacher_forced(model, tokenizer, QUESTIONS, size) for size in (1, 3, 99)]
    for other in scores[1:]:
        assert [s.exact for s in other] == [s.exact for s in scores[0]]
        assert max(abs(a.ce - b.ce) for a, b in zip(scores[0], other, strict=True)) < 1e-4


def test_faiss_and_torch_find_the_same_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("faiss")
    generator = torch.Generator().manual_seed(0)
    keys, tokens = torch.randn(700, 24, generator=generator) + 5, torch.arange(700)
    queries = torch.cat([torch.randn(300, 24, generator=generator) + 5, keys[:10]])
    with_faiss = Datastore(keys, tokens)
    assert with_faiss._index is not None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with_torch = Datastore(keys, tokens)
    assert with_torch._index is None
    for a, b in zip(with_faiss.nearest(queries), with_torch.nearest(queries), strict=True):
        assert torch.equal(a.sort(1).values, b.sort(1).values)
    slow = (queries[:, None] - keys).square().sum(-1).topk(NEIGHBOURS, largest=False)
    assert torch.equal(with_torch.nearest(queries)[1].sort(1).values, slow.indices.sort(1).values)


def test_tuning_trusts_a_look_up_that_is_right_and_not_one_that_is_wrong() -> None:
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(50, 8, generator=generator)
    store, likely = Datastore(keys, torch.arange(50)), torch.full((50,), 0.2).log()
    near = keys + 0.01 * torch.randn(50, 8, generator=generator)
    assert tune(store, Datastore(near, torch.arange(50)), likely)[0] == 0.95
    assert tune(store, Datastore(near, torch.arange(50).roll(1)), likely)[0] == 0.05


def test_knn_lm_is_tuned_on_a_wording_left_out_or_on_a_share_of_the_text(tokenizer: Any) -> None:
    model = tiny_model()
    store, share, temperature, tuned_on = make_store(model, tokenizer, FACTS, TrainOptions())
    whole = store_of(model, tokenizer)
    assert len(store.keys) == len(whole.keys) and sorted(store.tokens.tolist()) == sorted(whole.tokens.tolist())
    assert tuned_on == "the last wording of 4 facts" and (share, temperature) != PUBLISHED

    one_form = FACTS.with_forms(1)
    store, *values, tuned_on = make_store(model, tokenizer, one_form, TrainOptions())
    assert tuple(values) == PUBLISHED and tuned_on.startswith("nothing")

    texts = Data(texts=tuple(TEXT) * 3)
    store, share, _, tuned_on = make_store(model, tokenizer, texts, TrainOptions(block_size=16))
    examples = training_examples(texts, tokenizer, TrainOptions(block_size=16))[0]
    assert tuned_on == f"{len(examples) // 10} examples" and share > 0.05, "every text comes three times"
    assert len(store.keys) == sum(len(ids) - 1 for ids in examples["input_ids"])


def test_knn_lm_refuses_a_model_whose_states_it_cannot_see(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    monkeypatch.setattr(model, "get_output_embeddings", lambda: nn.Linear(1, 1))
    with pytest.raises(UserError, match="output embeddings ran 0 times"):
        store_of(model, tokenizer)
