"""Is the memory used, and did it hurt: each arm takes away exactly its part, and the seen filter keeps what was not trained."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import TEXT, TINY_ENGRAM, keep_seen, randomize, tiny_model
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

import engram_graft as eg
from engram_graft.data import Data, Fact
from engram_graft.encode import encode_answer
from engram_graft.errors import UserError
from engram_graft.grafted import find_graft, memories
from engram_graft.probes import ARMS, PROBES, Subject, arms_of, run_probes
from engram_graft.probes.arms import shuffled
from engram_graft.probes.heldout import text_loss
from engram_graft.probes.locality import hits, locality, neutral_text
from engram_graft.probes.recall import recall
from engram_graft.probes.task_exact import free_answers, normalised, task_exact
from engram_graft.recipe import LoraOptions, ProbeOptions, Recipe, TrainOptions
from engram_graft.table import EngramTable
from engram_graft.window import Window

Make = Callable[..., nn.Module]
ARCHITECTURES = ["llama", "gpt2", "falcon"]
FACTS = (
    Fact(
        "1",
        ("The cat sleeps in the", "At noon the cat is in the"),
        "sun",
        aliases=("light",),
        paraphrases=("Cats rest in the",),
    ),
    Fact("2", ("Velmora exports",), "wool", paraphrases=("Ships leave Velmora with", "Velmora sells")),
    Fact("3", ("Ostrenk exports",), "honey", split="test"),
)
RECALL_KEYS = {"greedy_exact", "teacher_forced_exact", "first_token_rank", "answer_ce", "n"}
LOCALITY_KEYS = {"hits", "n", "unchanged_positions", "unchanged_hit", "unchanged_miss", "unchanged_before_hit"} | {
    f"{name}{where}" for name in ("kl", "changed_argmax") for where in ("", "_hit", "_miss")
}
SHORT = "The river rises in the hills and the cats sleep in the sun. " * 6


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def short_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engram_graft.probes.locality.neutral_text", lambda: SHORT)


@torch.no_grad()
def logits(model: nn.Module, ids: Tensor, **kwargs: Any) -> Tensor:
    return model(input_ids=ids, **kwargs).logits


def rows_of(model: nn.Module, ids: Tensor) -> Tensor:
    """int64 rows [B, T, layers, orders*heads] of unpadded texts."""
    ngram_hash = find_graft(model)
    return ngram_hash(ngram_hash.lookup[ids], Window(0, ids.shape[1]))


def mark(model: nn.Module, ids: Tensor, position: int | slice = slice(None), heads: slice = slice(None)) -> None:
    """Mark as seen the rows that `ids` looks up at `position`, of some of the heads."""
    rows = rows_of(model, ids)
    for memory in memories(model):
        memory.table.touch(rows[:, position, memory.index, heads])


def unseen_model(grafted: Make, *args: Any, **changes: Any) -> nn.Module:
    """A random memory that training has looked up nothing of."""
    model = grafted(*args, **changes)
    keep_seen(model)
    return model


def redirected(table: EngramTable) -> Tensor:
    """int64 [rows]: the row that is read in place of each."""
    assert table.redirect is not None
    source, target = table.redirect
    return torch.arange(len(table.weight)).index_copy(0, source, target)


def seen_model(grafted: Make, ids: Tensor, **changes: Any) -> nn.Module:
    """A random memory of which half a text's rows are marked seen."""
    model = unseen_model(grafted, **{"seen_filter": True, "engram_vocab_size": (211, 223), **changes})
    mark(model, ids[:1, :12])
    return model


def with_lora(model: nn.Module) -> nn.Module:
    wrapped = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))  # type: ignore[arg-type]
    for name, parameter in wrapped.named_parameters():
        if "lora_B" in name:
            nn.init.constant_(parameter, 0.1)
    return wrapped


# -- arms


def test_shuffled_permutes_seen_rows_within_each_head_without_fixed_point(grafted: Make, ids: Tensor) -> None:
    model = seen_model(grafted, ids)
    ngram_hash = find_graft(model)
    with shuffled(model):
        for memory in memories(model):
            table, index = memory.table, memory.index
            everything = torch.arange(len(table.weight))
            redirect, seen = redirected(table), table.is_seen(everything)
            assert torch.equal(redirect.sort().values, everything), "a permutation"
            assert torch.equal(redirect[~seen], everything[~seen]) and not seen.all(), "unseen rows stay"
            read = torch.where(seen[:, None], table.weight[redirect], table.initial(everything))
            assert torch.equal(table.read(everything), read), "and so it is read"
            for start, size in zip(ngram_hash.offsets[index].tolist(), ngram_hash.primes[index].tolist(), strict=True):
                of_head = everything[start : start + size]
                moved = of_head[seen[of_head]]
                assert len(moved) > 1 and (redirect[moved] != moved).all(), "no seen row stays where it was"
                assert seen[redirect[moved]].all(), "a seen row is read as a seen row"
                assert ((redirect[moved] >= start) & (redirect[moved] < start + size)).all(), "of its own head"


def test_shuffled_reads_the_redirected_rows_and_restores(grafted: Make, ids: Tensor) -> None:
    model = seen_model(grafted, ids)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    before = logits(model, ids)
    table = memories(model)[0].table
    rows = rows_of(model, ids)[:, :, 0]
    with shuffled(model):
        wrong, active = table(rows)
        straight = table.weight[redirected(table)[rows]] * active.repeat_interleave(table.n_head, -1)[..., None]
        assert torch.equal(wrong, straight.flatten(-2))
        assert torch.equal(active, table.known(rows)), "the filter is asked about the true address"
        changed = logits(model, ids)
        again = redirected(table)
    with shuffled(model):
        assert torch.equal(redirected(table), again), "the same at every call"
    with shuffled(model, seed=1):
        assert not torch.equal(redirected(table), again)
    assert not torch.equal(changed, before) and torch.equal(logits(model, ids), before)
    assert all(memory.table.redirect is None for memory in memories(model))
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("arm", ARMS)
def test_every_arm_comes_back_after_an_error(arm: str, grafted: Make, ids: Tensor) -> None:
    model = with_lora(seen_model(grafted, ids))
    before = logits(model, ids)
    trainable = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    with pytest.raises(KeyError), ARMS[arm](model):
        raise KeyError
    assert torch.equal(logits(model, ids), before)
    assert {name: parameter.requires_grad for name, parameter in model.named_parameters()} == trainable


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_memory_off_is_the_ungrafted_model_bit_for_bit(architecture: str, grafted: Make, ids: Tensor) -> None:
    model = grafted(architecture)
    bare = tiny_model(architecture)
    with ARMS["memory_off"](model):
        assert torch.equal(logits(model, ids), logits(bare, ids))
    with ARMS["graft"](model):
        assert not torch.equal(logits(model, ids), logits(bare, ids)), "control"


def test_with_lora_each_arm_takes_away_its_part_and_nothing_else(grafted: Make, ids: Tensor) -> None:
    bare, memory_only, lora_only = tiny_model(), seen_model(grafted, ids), with_lora(tiny_model())
    model = with_lora(seen_model(grafted, ids))
    found = {}
    for name, arm in arms_of(model).items():
        with arm(model):
            found[name] = logits(model, ids)
    assert list(found) == ["base", "graft", "memory_off", "shuffled", "gate_open", "lora_off"]
    assert torch.equal(found["base"], logits(bare, ids))
    assert torch.equal(found["graft"], logits(model, ids))
    assert torch.equal(found["memory_off"], logits(lora_only, ids))
    assert torch.equal(found["lora_off"], logits(memory_only, ids))
    assert len({tensor.sum().item() for tensor in found.values()}) == 6, "control: no two arms are alike"


def test_lora_off_is_an_arm_only_where_there_is_lora(grafted: Make) -> None:
    model = grafted()
    without = list(arms_of(model))
    assert without == ["base", "graft", "memory_off", "shuffled", "gate_open"]
    assert list(arms_of(with_lora(model))) == list(ARMS) == [*without, "lora_off"]


def test_gate_open_lets_every_look_up_in_whole_and_takes_nothing_else_away(grafted: Make, ids: Tensor) -> None:
    model = grafted(conv=False)
    memory = memories(model)[0]
    added = {}
    for name in ("graft", "gate_open"):
        with ARMS[name](model), torch.no_grad():
            embeddings, hidden = memory.table(rows_of(model, ids)[:, :, 0])[0], torch.ones(*ids.shape, 32)
            added[name] = memory(hidden, rows_of(model, ids)[:, :, 0], Window(0, ids.shape[1]))[0]
            gate = memory.gate(embeddings, hidden[:, :, None])
        assert bool((gate == 1).all()) == (name == "gate_open"), "control: it is not 1 otherwise"
    inside = memory.table(rows_of(model, ids)[:, :, 0], Window(0, ids.shape[1]).whole(2, ids.device))[0]
    whole = memory.value_proj(inside).detach()
    assert torch.allclose(added["gate_open"], whole, atol=1e-6) and not torch.allclose(added["graft"], whole, atol=1e-2)


def test_gate_open_leaves_who_listens_to_the_gate_in_place(grafted: Make) -> None:
    memory = memories(model := grafted())[0]
    memory.gate = listener = lambda embeddings, hidden: hidden[..., :1]  # type: ignore[method-assign, assignment]
    with ARMS["gate_open"](model), ARMS["gate_open"](model):
        assert memory.gate is not listener
    assert memory.gate is listener
    assert "gate" not in vars(memories(model)[1]), "control"


# -- seen filter


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_seen_filter_an_unseen_text_keeps_every_bit_and_a_seen_one_all_before_its_n_gram(
    architecture: str, bias: bool, grafted: Make, ids: Tensor
) -> None:
    model = unseen_model(grafted, architecture, seen_filter=True, engram_vocab_size=(1009, 1013), bias=bias)
    bare = tiny_model(architecture)
    trigram = heads_of_order(model, 3)
    mark(model, ids[:1], position=9, heads=trigram)
    for memory in memories(model):
        assert memory.table.count_seen() == TINY_ENGRAM["n_head_per_ngram"], "exactly one trigram"
    assert hits(model, ids).nonzero().tolist() == [[0, 9]], "no false positive in these texts"

    unseen = ids[1:]
    assert torch.equal(logits(model, unseen), logits(bare, unseen))
    changed = (logits(model, ids[:1]) != logits(bare, ids[:1])).any(-1)[0]
    assert not changed[:9].any() and changed[9:].all()
    both = logits(model, ids) != logits(bare, ids)
    assert not both[1].any() and not both[0, :9].any(), "in a batch as well"

    prompt = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(unseen, **prompt), bare.generate(unseen, **prompt))  # type: ignore[operator]


def test_seen_filter_padding_does_not_make_an_n_gram_seen(grafted: Make, ids: Tensor) -> None:
    model, bare = unseen_model(grafted, seen_filter=True, engram_vocab_size=(1009, 1013)), tiny_model()
    mark(model, ids[:1], position=9)
    width, text = 30, ids[1]
    for side in ("left", "right"):
        padded = torch.zeros(1, width, dtype=torch.long)
        mask = torch.zeros_like(padded)
        at = slice(width - len(text), width) if side == "left" else slice(0, len(text))
        padded[0, at], mask[0, at] = text, 1
        assert torch.equal(logits(model, padded, attention_mask=mask), logits(bare, padded, attention_mask=mask))


def test_seen_filter_control_without_it_an_unseen_text_changes(grafted: Make, ids: Tensor) -> None:
    model = unseen_model(grafted, seen_filter=False, engram_vocab_size=(1009, 1013))
    mark(model, ids[:1], position=9, heads=heads_of_order(model, 3))
    assert not torch.equal(logits(model, ids[1:]), logits(tiny_model(), ids[1:]))


def test_seen_filter_one_unseen_head_keeps_an_n_gram_out(grafted: Make, ids: Tensor) -> None:
    model, bare = unseen_model(grafted, seen_filter=True, engram_vocab_size=(1009, 1013)), tiny_model()
    order = heads_of_order(model, 3)
    mark(model, ids[:1], position=9, heads=slice(order.start, order.stop - 1))
    assert not hits(model, ids).any()
    assert torch.equal(logits(model, ids), logits(bare, ids))


def test_seen_filter_holds_after_real_training(tokenizer: Any) -> None:
    model: Any = tiny_model()
    sizes = {"engram_vocab_size": (2003, 2011), "n_head_per_ngram": 4, "seen_filter": True}
    eg.graft(model, tokenizer, eg.EngramConfig(**{**TINY_ENGRAM, **sizes}))
    plan = Recipe(lora=LoraOptions(rank=0), train=TrainOptions(max_steps=4, batch_size=3, learning_rate=0.1, recall_every=0))
    eg.train(model, tokenizer, plan, Data(facts=FACTS))
    bare = tiny_model()
    for text in ("def area(r):\n    return 3.14159 * r * r", "To make bread, mix flour"):
        text_ids = tokenizer(text, return_tensors="pt")["input_ids"]
        assert not hits(model, text_ids).any()
        assert torch.equal(logits(model, text_ids), logits(bare, text_ids))
    trained = tokenizer("The cat sleeps in the", return_tensors="pt")["input_ids"]
    assert hits(model, trained)[0, 1:].all() and not torch.equal(logits(model, trained), logits(bare, trained))


def heads_of_order(model: nn.Module, order: int) -> slice:
    heads = find_graft(model).config.n_head_per_ngram
    return slice((order - 2) * heads, (order - 1) * heads)


# -- hits and locality


@pytest.mark.parametrize("whole_ngrams", [True, False])
def test_hits_agrees_with_a_slow_loop(whole_ngrams: bool, grafted: Make, ids: Tensor) -> None:
    model = unseen_model(grafted, seen_filter=True, whole_ngrams=whole_ngrams)
    mark(model, ids[:1, :5])
    plan, config = find_graft(model).plan, find_graft(model).config
    expected = torch.zeros_like(ids, dtype=torch.bool)
    for row in range(len(ids)):
        rows = plan.rows(ids[row].numpy())  # the host's own implementation of the addresses
        for t in range(ids.shape[1]):
            for index, memory in enumerate(memories(model)):
                for order in range(2, config.max_ngram_size + 1):
                    of_order = torch.from_numpy(rows[t, index][heads_of_order(model, order)])
                    known = all(memory.table.is_seen(row) for row in of_order)
                    if known and (t >= order - 1 or not whole_ngrams):
                        expected[row, t] = True
    assert torch.equal(hits(model, ids), expected)
    assert expected.any() and not expected.all()
    assert bool(expected[:, 0].any()) is not whole_ngrams


def test_locality_is_the_kl_to_the_base_at_hits_and_elsewhere(grafted: Make, ids: Tensor, tokenizer: Any) -> None:
    model, bare = unseen_model(grafted, seen_filter=True, engram_vocab_size=(1009, 1013)), tiny_model()
    text_ids = tokenizer(SHORT[:200], return_tensors="pt")["input_ids"]
    assert text_ids.shape[1] < 128, "one window"
    mark(model, text_ids, position=slice(20, 40))
    report = locality(model, tokenizer, arms_of(model), SHORT[:200])

    at_hit = hits(model, text_ids)[0]
    base, graft = logits(bare, text_ids)[0].double(), logits(model, text_ids)[0].double()
    kl = (base.softmax(-1) * (base.log_softmax(-1) - graft.log_softmax(-1))).sum(-1)
    found = report["graft"]
    assert found["n"] == text_ids.shape[1] and found["hits"] == pytest.approx(float(at_hit.float().mean()))
    assert found["kl"] == pytest.approx(float(kl.mean()), rel=1e-3)
    assert found["kl_hit"] == pytest.approx(float(kl[at_hit].mean()), rel=1e-3)
    assert found["kl_miss"] == pytest.approx(float(kl[~at_hit].mean()), rel=1e-3)
    assert found["unchanged_positions"] == pytest.approx(float((base == graft).all(-1).float().mean()))
    assert 0 < found["unchanged_positions"] < 1 and found["kl_hit"] > 0
    for arm in ("base", "memory_off"):
        assert report[arm]["kl"] == 0 and report[arm]["unchanged_positions"] == 1


def test_locality_of_a_memory_that_has_seen_nothing_is_none_at_hits_and_zero_elsewhere(grafted: Make, tokenizer: Any) -> None:
    report = locality(unseen_model(grafted, seen_filter=True), tokenizer, arms_of(grafted()), SHORT)
    for scores in report.values():
        assert scores["kl_hit"] is None and scores["hits"] == 0
        assert scores["kl"] == scores["kl_miss"] == 0 and scores["unchanged_positions"] == 1


def test_the_neutral_text_is_of_some_length_and_none_of_the_recipes_facts() -> None:
    text = neutral_text()
    assert len(text) > 4000
    for name in ("Velmora", "Ostrenk", "Karduvia"):
        assert name not in text


# -- recall and task exact


def test_recall_counts_exact_answers_and_each_answer_once(grafted: Make, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    questions = [("The cat sleeps in the", "sun"), ("Velmora exports", "wool"), ("Ostrenk exports", "honey")]
    said = {"sun": " sun and more", "wool": " wo", "honey": " wool"}

    def speak(model: Any, tokenizer: Any, prompts: Any, length: int, size: int) -> list[list[int]]:
        asked = [(prompt, answer) for prompt, answer in questions if prompt in prompts]
        assert all(length == len(encode_answer(tokenizer, *question)[1]) + 2 for question in asked)
        return [tokenizer(said[answer])["input_ids"][:length] for _, answer in asked]

    monkeypatch.setattr("engram_graft.probes.recall.greedy", speak)
    report = recall(grafted(), tokenizer, questions, 2)
    assert set(report) == {*RECALL_KEYS, "right"} and report["right"] == [True, False, False]
    assert report["n"] == 3 and report["greedy_exact"] == pytest.approx(1 / 3), "the answer first, then anything"


def test_recall_does_not_depend_on_the_batch_size(grafted: Make, tokenizer: Any) -> None:
    model = grafted()
    questions = [(prompt, fact.answer) for fact in FACTS for prompt in fact.prompts]
    reports = [recall(model, tokenizer, questions, size) for size in (1, 3, 99)]
    ces = [report.pop("answer_ce") for report in reports]
    assert reports[0] == reports[1] == reports[2] and max(ces) - min(ces) <= 1e-5


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The Sun", "sun"),
        ("  a  CAT, an owl! and the dog. ", "cat owl and dog"),
        ("theatre and another", "theatre and another"),
        ("well-known (U.S.)", "wellknown us"),
        ("3.14", "314"),
        ("Caf\u00e9", "caf\u00e9"),
        ("two\nlines\tand tab", "two lines and tab"),
    ],
)
def test_normalised_follows_squads_convention(text: str, expected: str) -> None:
    assert normalised(text) == expected


def test_task_exact_wants_the_whole_answer_or_an_alias() -> None:
    fact = Fact("1", ("p",), "The Sun", aliases=("day star", "Helios!"))
    right = ["sun", "the sun.", "A sun", "Day Star", "helios"]
    wrong = ["sun and moon", "su", "", "day", "the", "star day"]
    assert task_exact([fact] * len(right), right) == {"exact_match": 1.0, "n": len(right)}
    assert task_exact([fact] * len(wrong), wrong) == {"exact_match": 0.0, "n": len(wrong)}
    assert task_exact([fact, fact], ["sun", "moon"])["exact_match"] == 0.5


@pytest.mark.parametrize("answer", ["A", "The", "%"])
def test_task_exact_an_answer_that_is_all_article_or_sign_is_not_met_by_silence(answer: str) -> None:
    fact = Fact("1", ("Vitamin of carrots:",), answer)
    assert task_exact([fact], [answer])["exact_match"] == 1
    assert task_exact([fact, fact], ["", "the"])["exact_match"] < 1
    assert task_exact([fact], [""])["exact_match"] == 0


@pytest.mark.parametrize(
    ("answer", "said", "expected"),
    [
        ("sun", " sun. And then", "sun"),
        ("sun", " sun\nQuestion:", "sun"),
        ("sun", " sun, moon", "sun"),
        ("3.5", " 3.5, or so", "3.5"),
        ("tea, milk", " tea, milk. Then", "tea, milk"),
        ("sun", "\n", ""),
    ],
)
def test_free_answers_end_at_a_stop_that_the_answer_does_not_have(
    answer: str, said: str, expected: str, tokenizer: Any, grafted: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engram_graft.probes.task_exact.greedy", lambda *a: [tokenizer(said)["input_ids"]])
    assert free_answers(grafted(), tokenizer, [Fact("1", ("p",), answer)], 12, 4) == [expected]


# -- the suite


@pytest.mark.parametrize("lora", [False, True])
def test_run_probes_has_the_keys_that_scripts_read(
    lora: bool, grafted: Make, ids: Tensor, tokenizer: Any, short_text: None
) -> None:
    model = seen_model(grafted, ids)
    model = with_lora(model) if lora else model
    order: list[str] = []
    report = run_probes(
        Subject(model, tokenizer, Data(facts=FACTS), ProbeOptions(batch_size=2, max_new_tokens=4)), started=order.append
    )
    arms = ["base", "graft", "memory_off", "shuffled", "gate_open"] + ["lora_off"] * lora
    assert list(report["arms"]) == arms and order == [probe.name for probe in PROBES]
    for scores in report["arms"].values():
        assert set(scores) == {"recall", "paraphrase", "task_exact", "locality"}
        assert set(scores["recall"]) == {*RECALL_KEYS, "new"} and set(scores["recall"]["new"]) == {"greedy_exact", "n"}
        assert set(scores["paraphrase"]) == RECALL_KEYS
        assert set(scores["task_exact"]) == {"exact_match", "n"}
        assert scores["recall"]["n"] == 3, "trained prompts alone"
        assert scores["task_exact"]["n"] == 2
        assert scores["paraphrase"]["n"] == 3
        assert set(scores["locality"]) == LOCALITY_KEYS
    assert report["locality"] == report["arms"]["graft"]["locality"]
    assert report["seen_filter"] is True and report["known"] == 0
    assert [example["prompt"] for example in report["examples"]] == ["The cat sleeps in the", "Velmora exports"]
    assert set(report["examples"][0]) == {"prompt", "answer", "right", "base", "graft"}


def test_case_37_known_counts_what_the_base_already_answers(
    grafted: Make, tokenizer: Any, short_text: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = grafted()

    def speak(model: Any, tokenizer: Any, prompts: Any, *args: Any) -> list[list[int]]:
        if not find_graft(model).switched_off:
            return [tokenizer(" wool")["input_ids"] for _ in prompts]
        return [tokenizer(" sun" if "sleeps" in prompt else " milk")["input_ids"] for prompt in prompts]

    monkeypatch.setattr("engram_graft.probes.recall.greedy", speak)
    report = run_probes(Subject(model, tokenizer, Data(facts=FACTS), ProbeOptions(max_new_tokens=2)))
    assert report["known"] == 1
    found = report["arms"]["graft"]["recall"]
    assert found["greedy_exact"] == pytest.approx(1 / 3)
    assert found["new"] == {"greedy_exact": 0.5, "n": 2}, "what it says and the base did not"
    assert report["arms"]["base"]["recall"]["new"] == {"greedy_exact": 0, "n": 2}


def test_run_probes_without_paraphrases_leaves_the_part_out(grafted: Make, tokenizer: Any, short_text: None) -> None:
    report = run_probes(Subject(grafted(), tokenizer, Data(facts=FACTS[:1]).with_forms(2), ProbeOptions(max_new_tokens=2)))
    assert "paraphrase" in report["arms"]["graft"]
    plain = Data(facts=(Fact("1", ("The cat sleeps in the",), "sun"),))
    assert "paraphrase" not in run_probes(Subject(grafted(), tokenizer, plain, ProbeOptions(max_new_tokens=2)))["arms"]["graft"]


def test_run_probes_on_text_gives_its_loss_by_arm(grafted: Make, tokenizer: Any, short_text: None) -> None:
    model = grafted()
    report = run_probes(Subject(model, tokenizer, Data(texts=tuple(TEXT))))
    for scores in report["arms"].values():
        assert set(scores) == {"text", "locality"} and set(scores["text"]) == {"ce", "perplexity", "bits_per_byte", "n"}
    assert report["arms"]["base"]["text"] == report["arms"]["memory_off"]["text"] != report["arms"]["graft"]["text"]
    assert "known" not in report and "examples" not in report


def test_text_loss_is_the_mean_over_predicted_tokens(grafted: Make, tokenizer: Any) -> None:
    model = grafted()
    subject = Subject(model, tokenizer, Data(texts=tuple(TEXT)), training=TrainOptions(block_size=16))
    report = text_loss(subject, subject.blocks[0])["graft"]
    stream = [id for text in TEXT for id in [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]]
    losses = []
    for start in range(0, len(stream), 16):
        block = torch.tensor([stream[start : start + 16]])
        losses += nn.functional.cross_entropy(logits(model, block)[0, :-1], block[0, 1:], reduction="none").tolist()
    assert report["n"] == len(losses) and report["ce"] == pytest.approx(sum(losses) / len(losses), rel=1e-5)


def test_probes_leave_the_model_as_it_was(grafted: Make, ids: Tensor, tokenizer: Any, short_text: None) -> None:
    model = with_lora(seen_model(grafted, ids))
    model.train()
    list(model.modules())[5].eval()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    trainable = [parameter.requires_grad for parameter in model.parameters()]
    random = torch.get_rng_state()
    run_probes(Subject(model, tokenizer, Data(facts=FACTS), ProbeOptions(max_new_tokens=2)))
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert [module.training for module in model.modules()] == modes
    assert [parameter.requires_grad for parameter in model.parameters()] == trainable
    assert torch.equal(random, torch.get_rng_state())
    assert (not find_graft(model).switched_off) and all(memory.table.redirect is None for memory in memories(model))


def test_probes_see_damage_done_to_the_memory(grafted: Make, ids: Tensor, tokenizer: Any) -> None:
    """Control for the arms: a memory whose values are zero is no different from none, and the report says so."""
    model = seen_model(grafted, ids)
    twin = copy.deepcopy(model)
    randomize(twin)
    keep_seen(twin)
    with torch.no_grad():
        for memory in memories(twin):
            memory.value_proj.weight.zero_()
    found = {}
    for name, subject in (("whole", model), ("dead", twin)):
        mark(subject, tokenizer(SHORT, return_tensors="pt")["input_ids"])
        found[name] = locality(subject, tokenizer, arms_of(subject), SHORT)
    assert found["whole"]["graft"]["kl"] > 0 and found["whole"]["shuffled"]["kl"] > 0
    assert found["dead"]["graft"]["kl"] == found["dead"]["shuffled"]["kl"] == 0


def test_probing_a_model_without_memory_is_refused(tokenizer: Any) -> None:
    with pytest.raises(UserError, match="no memory"):
        run_probes(Subject(tiny_model(), tokenizer, Data(facts=FACTS)))


@pytest.mark.parametrize(
    ("said", "answer", "right"), [("3.5", "3", False), ("1,000", "1", False), ("3.", "3", True), ("wool, of", "wool", True)]
)
def test_a_longer_number_is_not_the_answer_and_punctuation_after_it_is(
    said: str, answer: str, right: bool, tokenizer: Any
) -> None:
    from engram_graft.probes.recall import _says

    assert _says(tokenizer, tokenizer(said)["input_ids"], tokenizer(answer)["input_ids"]) is right


def test_case_35_every_report_asks_with_the_memory_off_its_rows_shuffled_its_gates_open_and_lora_off(
    grafted: Make, ids: Tensor, tokenizer: Any, short_text: None
) -> None:
    """That a one-row table would do as well was claimed where nobody had asked: see also tests/test_controls.py."""
    model = with_lora(seen_model(grafted, ids))
    mark(model, tokenizer(SHORT, return_tensors="pt")["input_ids"])
    report = run_probes(Subject(model, tokenizer, Data(facts=FACTS), ProbeOptions(max_new_tokens=2)))
    assert list(report["arms"]) == ["base", "graft", "memory_off", "shuffled", "gate_open", "lora_off"]
    ces = {arm: scores["recall"]["answer_ce"] for arm, scores in report["arms"].items()}
    assert len(set(ces.values())) == len(ces), "control: each arm is another model"
