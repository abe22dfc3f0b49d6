"""What the probes measure: each score by hand on models whose every answer is known, and none that depends on the batch.

A bigram arm makes a model's next token a table's: `table[id]` are the logits after a token, so that a test decides what is said.
"""

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from conftest import TEXT, TINY_ENGRAM, keep_seen, tiny_model
from torch import Tensor, nn
from torch.nn import functional as F

import engram_graft as eg
from engram_graft.data import Data, Fact
from engram_graft.encode import encode_answer, encode_prompt
from engram_graft.grafted import find_graft, memories
from engram_graft.probes import ARMS, Subject, arms_of
from engram_graft.probes.arms import Arm
from engram_graft.probes.efficacy import EFFICACY
from engram_graft.probes.heldout import HELDOUT, spread, text_loss
from engram_graft.probes.heldout import TEXT as TEXT_PROBE
from engram_graft.probes.locality import LOCALITY, hits, locality
from engram_graft.probes.neighborhood import NEIGHBORHOOD
from engram_graft.probes.recall import LONGEST, PARAPHRASE, RECALL, by_forms, recall
from engram_graft.probes.task_exact import TASK_EXACT
from engram_graft.probes.verbatim import PREFIX, TARGET, VERBATIM, _spans, visited
from engram_graft.recipe import LoraOptions, ProbeOptions, Recipe, TrainOptions
from engram_graft.scoring import greedy, next_token_logits, teacher_forced
from engram_graft.window import Window

Make = Callable[..., nn.Module]
FACTS = (
    Fact("1", ("The cat sleeps in the", "At noon the cat is in"), "sun", paraphrases=("Cats rest in",), target_true="hills"),
    Fact("2", ("Velmora",), "salt", target_true="bread"),
)
NEIGHBOURS = ({"prompt": "Cats and dogs", "answer": "sleep"}, {"prompt": "To make bread", "answer": "mix flour and water"})
MEMORY = {"seen_filter": True, "engram_vocab_size": (1009, 1013)}


pytestmark = pytest.mark.usefixtures("one_thread")


def bigram(table: Tensor) -> Arm:
    """An arm in which the logits `[V]` after token `id` are `table[id]`."""

    @contextlib.contextmanager
    def arm(model: nn.Module) -> Iterator[None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            logits, keep = table[kwargs["input_ids"]], kwargs.get("logits_to_keep", 0)
            output.logits = logits[:, keep] if isinstance(keep, Tensor) else logits[:, -keep:]
            return output

        handle = model.register_forward_hook(hook, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()

    return arm


def saying(tokenizer: Any, *texts: Sequence[Any], strength: float = 50.0, end: bool = True) -> Tensor:
    """A table that continues these token ids, or these (prompt, answer) and then ends, each with logit `strength`; the rest is 0."""
    table = torch.zeros(328, 328)
    for text in texts:
        ids = list(text)
        if isinstance(text[0], str):
            prompt, answer = encode_answer(tokenizer, *text)
            ids = [prompt[-1], *answer, *[tokenizer.eos_token_id] * end]
        for a, b in itertools.pairwise(ids):
            assert not table[a].any() or table[a, b], "one token cannot be followed by two"
            table[a, b] = strength
    return table


def subject_of(tokenizer: Any, arms: dict[str, Tensor], **changes: Any) -> Subject:
    given = {name: bigram(table) for name, table in arms.items()}
    return Subject(tiny_model(), tokenizer, **{"data": Data(facts=FACTS), "given_arms": given, **changes})


def unseen(grafted: Make, **changes: Any) -> nn.Module:
    """A random memory that training has looked up nothing of."""
    model = grafted(**{**MEMORY, **changes})
    keep_seen(model)
    return model


def mark(model: nn.Module, ids: Tensor, position: slice = slice(None)) -> None:
    """Mark as seen the rows that the whole n-grams of `ids` look up at `position`."""
    ngram_hash, window = find_graft(model), Window(0, ids.shape[1])
    rows = ngram_hash(ngram_hash.lookup[ids], window)
    for memory in memories(model):
        for t in range(ids.shape[1])[position]:
            memory.table.touch(rows[:, t, memory.index, : min(t, 2) * TINY_ENGRAM["n_head_per_ngram"]])  # type: ignore[operator]


@torch.no_grad()
def logits(model: Any, ids: Tensor) -> Tensor:
    return model(input_ids=ids).logits


# -- what the cases ask for


def test_case_36_a_lower_loss_with_worse_answers_is_seen_as_such(tokenizer: Any) -> None:
    right, wrong = ("The cat sleeps in the", "sun"), ("Velmora", "bread")
    arms = {"base": torch.zeros(328, 328), "sure": saying(tokenizer, right, wrong, strength=60)}
    subject = subject_of(tokenizer, arms, data=Data(facts=tuple(dataclasses.replace(f, prompts=f.prompts[:1]) for f in FACTS)))
    asked, answered = RECALL.run(subject), TASK_EXACT.run(subject)
    assert asked["base"]["answer_ce"] < asked["sure"]["answer_ce"], "by its loss the base is the better one"
    assert asked["base"]["answer_ce"] == pytest.approx(math.log(328))
    assert (answered["base"]["exact_match"], answered["sure"]["exact_match"]) == (0, 0.5)
    assert (asked["base"]["greedy_exact"], asked["sure"]["greedy_exact"]) == (0, 0.5)


def test_case_37_new_leaves_out_what_the_base_knows_and_is_none_where_it_knows_all(tokenizer: Any) -> None:
    one, other = ("The cat sleeps in the", "sun"), ("Velmora", "bread")
    arms = {"base": saying(tokenizer, one), "graft": saying(tokenizer, one, other), "forgets": saying(tokenizer, other)}
    data = Data(facts=(Fact("1", one[:1], one[1]), Fact("2", other[:1], other[1])))
    found = {arm: (s["greedy_exact"], s["new"]) for arm, s in RECALL.run(subject_of(tokenizer, arms, data=data)).items()}
    new = {"greedy_exact": 1, "n": 1}
    assert found == {"base": (0.5, {**new, "greedy_exact": 0}), "graft": (1, new), "forgets": (0.5, new)}
    known = Data(facts=data.facts[:1])
    assert RECALL.run(subject_of(tokenizer, arms, data=known))["graft"]["new"] == {"greedy_exact": None, "n": 0}


def test_case_38_generation_and_teacher_forcing_are_two_numbers(tokenizer: Any) -> None:
    """A model that goes on to "salty", or that errs at the first token only, is right in one of the two at most."""
    question = ("Velmora", "salt")
    context, answer = encode_answer(tokenizer, *question)
    longer, slips = saying(tokenizer, question, end=False), saying(tokenizer, question)
    longer[answer[-1], tokenizer("y")["input_ids"][0]] = 60
    slips[context[-1], answer[0]] = 0
    slips[context[-1], 5] = 1
    found = {}
    for name, table in {"right": saying(tokenizer, question), "longer": longer, "slips": slips}.items():
        subject = subject_of(tokenizer, {"base": table}, data=Data(facts=(Fact("1", question[:1], question[1]),)))
        found[name] = RECALL.run(subject)["base"]
    assert {name: (s["greedy_exact"], s["teacher_forced_exact"]) for name, s in found.items()} == {
        "right": (1, 1),
        "longer": (0, 1),
        "slips": (0, 0),
    }
    assert found["slips"]["first_token_rank"] == 2 and found["right"]["first_token_rank"] == 1


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_case_39_no_score_depends_on_batch_size_or_padding_side(
    architecture: str, grafted: Make, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = grafted(architecture, **MEMORY)
    arms = {name: ARMS[name] for name in ("base", "graft")}
    facts = (dataclasses.replace(FACTS[0], neighborhood=NEIGHBOURS), *FACTS[1:], Fact("3", ("x",), "yeast and more"))
    text = " ".join(TEXT).replace("\n", " ") * 2
    reports: list[dict[Any, Any]] = []
    for size, side in ((1, "left"), (3, "right"), (99, "left")):
        monkeypatch.setattr(tokenizer, "padding_side", side)
        training = TrainOptions(block_size=60, validation=0.3)
        options = ProbeOptions(batch_size=size, max_new_tokens=4)
        report: dict[Any, Any] = {}
        for data in (Data(facts=facts), Data(texts=(text,))):
            subject = Subject(model, tokenizer, data, options, training, given_arms=arms)
            for probe in (RECALL, PARAPHRASE, TASK_EXACT, NEIGHBORHOOD, EFFICACY, TEXT_PROBE, HELDOUT, VERBATIM):
                for arm, scores in probe.run(subject).items():
                    report |= {(probe.name, arm, name): value for name, value in flat(scores)}
        reports.append(report)
    names = {name for name, *_ in reports[0]}
    assert names == {"recall", "paraphrase", "task_exact", "neighborhood", "efficacy", "text", "heldout", "verbatim"}
    for other in reports[1:]:
        assert other == {key: pytest.approx(value, abs=1e-5) for key, value in reports[0].items()}
    assert reports[0]["neighborhood", "graft", "kl"] > 1e-3, "control: there is something to measure"


def flat(scores: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in scores.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def test_case_40_damage_done_at_a_hit_shows_at_hits_and_not_elsewhere(grafted: Make, tokenizer: Any) -> None:
    text = "The river rises in the hills and the cats"
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    model = unseen(grafted)
    mark(model, ids, slice(-1, None))
    assert hits(model, ids)[0].nonzero().tolist() == [[ids.shape[1] - 1]], "the last position alone"
    found = locality(model, tokenizer, arms_of(model), text)["graft"]
    assert found["kl_miss"] == 0 and found["unchanged_miss"] == 1 and found["changed_argmax_miss"] == 0
    assert found["kl_hit"] > 1e-3 and found["unchanged_hit"] == 0
    assert found["kl"] == pytest.approx(found["kl_hit"] / ids.shape[1]), "diluted by all that was never written"


# -- recall


def test_first_token_rank_is_the_answers_place_among_all_tokens(grafted: Make, tokenizer: Any) -> None:
    model = grafted()
    questions = [(prompt, fact.answer) for fact in FACTS for prompt in fact.prompts]
    expected = []
    for prompt, answer in questions:
        context, ids = encode_answer(tokenizer, prompt, answer)
        order = logits(model, torch.tensor([context]))[0, -1].argsort(descending=True)
        expected.append(order.tolist().index(ids[0]) + 1)
    assert [score.rank for score in teacher_forced(model, tokenizer, questions, 2)] == expected and max(expected) > 1
    assert recall(model, tokenizer, questions, 2)["first_token_rank"] == sorted(expected)[1]


@pytest.mark.parametrize(
    ("length", "said", "right"),
    [
        (40, [*range(10, 10 + LONGEST), 3, 3], True),
        (40, [*range(10, 9 + LONGEST), 3, 3, 3], False),
        (LONGEST, [*range(10, 10 + LONGEST), 1], True),
        (LONGEST - 1, [*range(10, 10 + LONGEST), 3], False),  # goes on with a letter
    ],
)
def test_of_a_long_answer_the_first_32_tokens_are_asked_for(
    length: int, said: list[int], right: bool, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def speak(model: Any, tokenizer: Any, prompts: Any, length: int, size: int) -> list[list[int]]:
        asked.append(length)
        return [said[:length]]

    monkeypatch.setattr("engram_graft.probes.recall.greedy", speak)
    question = ([5, 6, 7], list(range(10, 10 + length)))
    assert tokenizer.decode([10 + LONGEST - 1]).isalnum(), "the token that makes a longer word"
    report = recall(tiny_model(), tokenizer, [question], 2)
    assert report["right"] == [right] and asked == [min(length, LONGEST) + 2]


def test_by_forms_groups_facts_by_their_trained_wordings() -> None:
    facts = (
        Fact("1", ("a", "b"), "x", paraphrases=("c",)),
        Fact("2", ("d",), "y", paraphrases=("e", "f")),
        Fact("3", ("g", "h"), "z", paraphrases=("i",)),
        Fact("4", ("j", "k", "l"), "z"),
    )
    report = by_forms(facts, [True, True, False, True, False, False, True, True], [True, False, True, False])
    assert report == {
        "1": {"facts": 1, "trained": 0, "unseen": 0.5},
        "2": {"facts": 2, "trained": 0.75, "unseen": 0.5},
        "3": {"facts": 1, "trained": pytest.approx(2 / 3), "unseen": None},
    }


def test_by_forms_takes_what_the_recall_probes_say(tokenizer: Any) -> None:
    arms = {"base": torch.zeros(328, 328), "graft": saying(tokenizer, ("The cat sleeps in the", "sun"))}
    subject = subject_of(tokenizer, arms)
    trained, other = RECALL.run(subject)["graft"]["right"], PARAPHRASE.run(subject)["graft"]["right"]
    assert by_forms(subject.facts, trained, other) == {
        "1": {"facts": 1, "trained": 0, "unseen": None},
        "2": {"facts": 1, "trained": 0.5, "unseen": 0},
    }


def test_task_exact_lets_an_answer_be_longer_than_max_new_tokens(tokenizer: Any) -> None:
    question = ("Velmora", "salt, hive")
    assert len(encode_answer(tokenizer, *question)[1]) > 2
    fact = Fact("1", question[:1], question[1])
    subject = subject_of(
        tokenizer, {"base": saying(tokenizer, question)}, data=Data(facts=(fact,)), options=ProbeOptions(max_new_tokens=2)
    )
    assert TASK_EXACT.run(subject)["base"]["exact_match"] == 1


# -- text


def letters(n: int, seed: int = 0) -> str:
    """A text of `n` tokens without merges, that repeats no three of them."""
    generator = torch.Generator().manual_seed(seed)
    return "".join("BDGJKPQRWXYZ#$%&<>@^~|{}"[i] for i in torch.randint(24, (n,), generator=generator).tolist())


def test_visited_spans_after_real_training_are_those_of_the_blocks_that_were_trained(tokenizer: Any) -> None:
    model: Any = tiny_model()
    sizes = {"engram_vocab_size": (20011, 20021), "n_head_per_ngram": 4, "seen_filter": True}
    eg.graft(model, tokenizer, eg.EngramConfig(**{**TINY_ENGRAM, **sizes}))
    options = TrainOptions(max_steps=3, batch_size=2, block_size=48, recall_every=0, validation=0.2)
    data = Data(texts=(letters(48 * 15),))
    subject = Subject(model, tokenizer, data, training=options)
    assert VERBATIM.run(subject)["graft"].keys() == {"held_out"}, "nothing was visited yet"
    eg.train(model, tokenizer, Recipe(lora=LoraOptions(rank=0), train=options), data)
    assert len(_spans(subject, subject.blocks[0])) == 12 and visited(model, _spans(subject, subject.blocks[1])) == []
    report = VERBATIM.run(subject)
    assert {arm: (s["visited"]["n"], s["held_out"]["n"]) for arm, s in report.items()} == dict.fromkeys(report, (6, 3))


def test_one_unknown_ngram_in_one_layer_keeps_a_span_out(grafted: Make, tokenizer: Any) -> None:
    span = torch.arange(10, 10 + PREFIX + TARGET)[None]
    model = unseen(grafted)
    mark(model, span)
    assert visited(model, span.tolist()) == span.tolist()
    table = memories(model)[1].table
    kept = table.seen_rows()
    table.load_rows(kept[1:], table.weight.detach()[kept[1:]])
    assert visited(model, span.tolist()) == []


def test_verbatim_is_the_share_of_tokens_and_spans_that_are_continued(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engram_graft.probes.verbatim.visited", lambda model, spans: spans)
    data = Data(texts=(letters(48 * 4),))
    subject = subject_of(tokenizer, {"base": torch.zeros(328, 328)}, data=data, training=TrainOptions(block_size=96))
    spans = _spans(subject, subject.blocks[0])
    assert len(spans) == 4 and all(len(span) == PREFIX + TARGET for span in spans)

    def speak(model: Any, tokenizer: Any, prompts: Any, length: int, size: int) -> list[list[int]]:
        assert length == TARGET and prompts == [span[:PREFIX] for span in spans]
        a, b, c = (span[PREFIX:] for span in spans[:3])
        return [a, b[:4], [*c[:-1], 0], []]  # whole, stopped early, one token wrong, nothing

    monkeypatch.setattr("engram_graft.probes.verbatim.greedy", speak)
    assert VERBATIM.run(subject) == {"base": {"visited": {"token": 35 / 64, "span": 0.25, "n": 4}}}


def test_verbatim_is_about_spans_of_one_document_that_are_long_enough(tokenizer: Any) -> None:
    spans = {}
    for size, texts in (
        (47, (letters(200),)),
        (96, tuple(letters(40, seed) for seed in range(9))),
        (96, (letters(60), letters(99))),
    ):
        subject = Subject(tiny_model(), tokenizer, Data(texts=texts), training=TrainOptions(block_size=size))
        spans[size, len(texts)] = len(_spans(subject, subject.blocks[0]))
    assert spans == {(47, 1): 0, (96, 9): 0, (96, 2): 2}
    assert VERBATIM.run(Subject(tiny_model(), tokenizer, Data(facts=FACTS))) == {}


def test_spread_takes_all_or_as_many_as_asked_from_end_to_end() -> None:
    assert spread(3, 5) == [0, 1, 2] and spread(10, 5) == [0, 2, 4, 6, 8] and spread(0, 5) == []
    assert spread(1000, 3) == [0, 333, 666]


def test_bits_per_byte_is_the_loss_of_the_text_over_its_bytes_and_eos_is_none_of_it(tokenizer: Any) -> None:
    texts = ("Café cafe", "The Cat")
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(328, 328, generator=generator)
    subject = subject_of(tokenizer, {"base": table}, data=Data(texts=texts), training=TrainOptions(block_size=64))
    ids = [id for text in texts for id in [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]]
    losses = [float(F.cross_entropy(table[a], torch.tensor(b))) for a, b in itertools.pairwise(ids)]
    of_text = [loss for loss, id in zip(losses, ids[1:], strict=True) if id != tokenizer.eos_token_id]
    first = len(tokenizer.decode(ids[:1]).encode())
    found = text_loss(subject, subject.blocks[0])["base"]
    assert found["n"] == len(losses) and found["ce"] == pytest.approx(sum(losses) / len(losses))
    assert found["perplexity"] == pytest.approx(math.exp(found["ce"]))
    assert found["bits_per_byte"] == pytest.approx(sum(of_text) / math.log(2) / (len("".join(texts).encode()) - first))
    assert len(of_text) == len(losses) - 2, "control: there were ends to leave out"


# -- locality


def test_with_the_filter_nothing_changes_before_the_first_hit_and_without_it_all_does(grafted: Make, tokenizer: Any) -> None:
    text = "The river rises in the hills and the cats sleep in the sun. " * 12  # more than one window
    ids = tokenizer(text, return_tensors="pt")["input_ids"][:, :128]
    found = {}
    for seen_filter in (True, False):
        model = unseen(grafted, seen_filter=seen_filter)
        mark(model, ids, slice(20, 23))
        found[seen_filter] = locality(model, tokenizer, arms_of(model), text)["graft"]
    assert found[True]["hits"] == found[False]["hits"] > 0
    assert found[True]["unchanged_before_hit"] == 1 and found[True]["unchanged_hit"] == 0 < found[True]["changed_argmax_hit"]
    assert 0 < found[True]["unchanged_miss"] < 1, "after a hit the rest of its window is another"
    assert found[False]["unchanged_before_hit"] < 0.2, "control: but for a first token, which ends no whole n-gram"


def test_with_the_filter_a_text_without_a_learned_ngram_is_the_bases_throughout(grafted: Make, tokenizer: Any) -> None:
    found = {}
    for seen_filter in (True, False):
        model = unseen(grafted, seen_filter=seen_filter)
        mark(model, tokenizer("def area(r)", return_tensors="pt")["input_ids"])
        found[seen_filter] = locality(model, tokenizer, arms_of(model), "Velmora exports wool; Ostrenk exports honey.")["graft"]
        assert found[seen_filter]["hits"] == 0 and found[seen_filter]["kl_hit"] is None
    assert found[True]["unchanged_positions"] == found[True]["unchanged_before_hit"] == found[True]["unchanged_miss"] == 1
    assert found[True]["kl"] == found[True]["changed_argmax"] == 0
    assert found[False]["unchanged_positions"] < 1, "control"


def test_unchanged_before_hit_is_none_where_every_window_begins_with_a_hit(grafted: Make, tokenizer: Any) -> None:
    model = grafted(seen_filter=True, whole_ngrams=False)  # all rows are seen, and so is every position
    assert locality(model, tokenizer, arms_of(model), "The cat")["graft"]["unchanged_before_hit"] is None


def test_locality_counts_the_positions_with_another_most_likely_token(grafted: Make, tokenizer: Any) -> None:
    model, text = unseen(grafted), "The river rises in the hills and the cats sleep in the sun."
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    mark(model, ids, slice(5, 9))
    changed = (logits(model, ids)[0].argmax(-1) != logits(tiny_model(), ids)[0].argmax(-1)).double()
    at_hit = hits(model, ids)[0]
    found = locality(model, tokenizer, arms_of(model), text)["graft"]
    assert found["changed_argmax"] == pytest.approx(float(changed.mean())) and 0 < found["changed_argmax"] < 1
    assert found["changed_argmax_hit"] == pytest.approx(float(changed[at_hit].mean()))
    assert found["changed_argmax_miss"] == pytest.approx(float(changed[~at_hit].mean()))


def test_a_control_without_memory_is_measured_at_the_hits_of_the_graft_it_is_compared_with(
    grafted: Make, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "The river rises in the hills and the cats sleep in the sun. Velmora exports wool"
    monkeypatch.setattr("engram_graft.probes.locality.neutral_text", lambda: text)
    graft, data = unseen(grafted), Data(texts=(letters(48),))
    mark(graft, tokenizer(text, return_tensors="pt")["input_ids"], slice(5, 9))
    own = LOCALITY.run(Subject(graft, tokenizer, data))["graft"]
    arms = {"base": torch.zeros(328, 328), "control": torch.eye(328)}
    subject = subject_of(tokenizer, arms, data=data, training=TrainOptions(block_size=48), reference=graft)
    found = LOCALITY.run(subject)
    assert found["control"]["hits"] == found["base"]["hits"] == own["hits"] > 0
    assert found["base"]["kl"] == 0 < found["control"]["kl"]
    assert found["control"]["kl_hit"] == pytest.approx(found["control"]["kl_miss"], rel=1e-3), "it knows of no n-gram"
    assert VERBATIM.run(subject) == {}, "the graft has not visited the text"
    mark(graft, torch.tensor(_spans(subject, subject.blocks[0])))
    assert VERBATIM.run(subject)["control"]["visited"]["n"] == 1


# -- neighborhood and efficacy


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "falcon"])
def test_next_token_logits_are_those_of_each_prompt_alone(architecture: str, grafted: Make, tokenizer: Any) -> None:
    model = grafted(architecture)
    prompts = ["x", "The cat sleeps in the", "To make bread, mix flour, water, salt and yeast."]
    found = next_token_logits(model, tokenizer, prompts)
    for prompt, row in zip(prompts, found, strict=True):
        alone = logits(model, torch.tensor([encode_prompt(tokenizer, prompt)]))[0, -1]
        assert float((row - alone).abs().max()) < 1e-4
    assert float((found[0] - found[1]).abs().max()) > 1e-2, "control"


def test_neighborhood_is_what_moved_away_from_the_base_right_or_wrong(tokenizer: Any) -> None:
    first, second = ((entry["prompt"], entry["answer"]) for entry in NEIGHBOURS)
    facts = (dataclasses.replace(FACTS[0], neighborhood=NEIGHBOURS), FACTS[1])
    base = saying(tokenizer, ("Cats and dogs", "sun"), second, strength=8)  # the first answer is wrong, and is to stay
    moved = base.clone()
    last = encode_prompt(tokenizer, first[0])[-1]
    moved[last] = 0
    moved[last, 7] = 3.0
    report = NEIGHBORHOOD.run(subject_of(tokenizer, {"base": base, "moved": moved}, data=Data(facts=facts)))
    p, q = base[last].log_softmax(-1), moved[last].log_softmax(-1)
    assert report["base"] == {"kl": 0, "same_answer": 1, "n": 2}
    assert report["moved"] == {"kl": pytest.approx(float((p.exp() * (p - q)).sum()) / 2, rel=1e-4), "same_answer": 0.5, "n": 2}
    assert NEIGHBORHOOD.run(subject_of(tokenizer, {"base": base})) == {}, "no fact has neighbours"


def test_neighborhood_answers_are_compared_over_the_entrys_length_and_two_more(tokenizer: Any) -> None:
    entry = {"prompt": "Cats and dogs", "answer": "sun"}
    length = len(encode_answer(tokenizer, entry["prompt"], entry["answer"])[1])
    last = encode_prompt(tokenizer, entry["prompt"])[-1]
    long = {"prompt": "x", "answer": "sleep in the hills and in the sun"}  # makes everything be decoded for longer
    facts = (dataclasses.replace(FACTS[0], neighborhood=(entry, long)),)
    same = {}
    for differs_at in (length + 1, length + 2):
        path = [last, *range(20, 40)]
        base, other = saying(tokenizer, path), saying(tokenizer, path)
        other[path[differs_at]] = 0
        other[path[differs_at], 300] = 50
        report = NEIGHBORHOOD.run(subject_of(tokenizer, {"base": base, "other": other}, data=Data(facts=facts)))
        same[differs_at] = report["other"]["same_answer"]
    assert same == {length + 1: 0.5, length + 2: 1.0}


def test_efficacy_is_romes_three_shares_by_fact_and_their_harmonic_mean(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = (
        Fact("1", ("a", "b"), "new", (), ("c", "d"), ({"prompt": "e", "answer": "true"},), target_true="true"),
        Fact(
            "2",
            ("f",),
            "new",
            (),
            ("g",),
            ({"prompt": "h", "answer": "true"}, {"prompt": "i", "answer": "true"}, {"prompt": "unrelated", "answer": "x"}),
            target_true="true",
        ),
        Fact("3", ("j",), "new"),
    )
    likely = {"a": "new", "b": "true", "c": "new", "d": "new", "e": "true", "f": "new", "g": "true", "h": "true", "i": "new"}

    def forced(model: Any, tokenizer: Any, questions: Any, size: int) -> list[Any]:
        assert {prompt for prompt, _ in questions} == set(likely), "facts without target_true are not asked"
        return [type("S", (), {"ce": 1.0 if likely[prompt] == target else 2.0}) for prompt, target in questions]

    monkeypatch.setattr("engram_graft.probes.efficacy.teacher_forced", forced)
    subject = subject_of(tokenizer, {"base": torch.zeros(328, 328)}, data=Data(facts=facts))
    shares = (0.75, 0.5, 0.75)  # (1/2, 1), (1, 0), (1, 1/2)
    assert EFFICACY.run(subject)["base"] == {
        "efficacy": shares[0],
        "paraphrase": shares[1],
        "neighborhood": shares[2],
        "score": pytest.approx(3 / sum(1 / share for share in shares)),
        "n": 2,
    }


def test_efficacy_compares_likelihoods_per_token_and_a_tie_is_no_success(tokenizer: Any) -> None:
    fact = Fact("1", ("Velmora",), "salt", neighborhood=({"prompt": "Velmora", "answer": "bread"},), target_true="bread")
    arms = {
        "base": torch.zeros(328, 328),
        "graft": saying(tokenizer, ("Velmora", "salt")),
        "true": saying(tokenizer, ("Velmora", "bread")),
    }
    report = EFFICACY.run(subject_of(tokenizer, arms, data=Data(facts=(fact,))))
    assert {arm: (s["efficacy"], s["neighborhood"]) for arm, s in report.items()} == {
        "base": (0, 0),
        "graft": (1, 0),
        "true": (0, 1),
    }
    assert report["graft"]["paraphrase"] is None and report["graft"]["score"] is None, "no paraphrase, no score"
    plain = Data(facts=(Fact("1", ("Velmora",), "salt"),))
    assert EFFICACY.run(subject_of(tokenizer, arms, data=plain)) == {}


def test_measuring_leaves_the_model_as_it_was(grafted: Make, tokenizer: Any) -> None:
    model = grafted(**MEMORY)
    model.train()
    list(model.modules())[5].eval()
    modes, random = [module.training for module in model.modules()], torch.get_rng_state()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    facts = (dataclasses.replace(FACTS[0], neighborhood=NEIGHBOURS),)
    for data in (Data(facts=facts), Data(texts=(letters(200),))):
        subject = Subject(model, tokenizer, data, ProbeOptions(batch_size=2), TrainOptions(block_size=64))
        assert sum(bool(probe.run(subject)) for probe in (NEIGHBORHOOD, EFFICACY, VERBATIM)) > 0
    assert [module.training for module in model.modules()] == modes and torch.equal(random, torch.get_rng_state())
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


def test_the_bigram_arm_says_what_its_table_says(tokenizer: Any) -> None:
    """Control for this file: without the arm the model says something else, and the arm goes when its block ends."""
    model, question = tiny_model(), ("Velmora", "salt")
    before = greedy(model, tokenizer, ["Velmora"], 4)
    with bigram(saying(tokenizer, question))(model):
        assert greedy(model, tokenizer, ["Velmora"], 4) == [encode_answer(tokenizer, *question)[1]]
    assert greedy(model, tokenizer, ["Velmora"], 4) == before != [encode_answer(tokenizer, *question)[1]]
