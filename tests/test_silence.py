"""What training leaves out: which n-grams these are, that they stay untouched and silent, and the training that teaches wordings."""

import dataclasses
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from conftest import TINY_ENGRAM, randomize, tiny_model
from peft import LoraConfig, get_peft_model
from test_cli import base, run, train_arguments  # noqa: F401
from test_resume import SMALL, Stop, lines, same
from test_train import FACTS, recipe
from torch import Tensor, nn

import engram_graft as eg
from engram_graft.background import LENGTH, SAMPLES, background_texts, expected_rates
from engram_graft.data import TEACHER, Data, Fact, load_data
from engram_graft.encode import Collator, encode_facts, subject_spans
from engram_graft.errors import UserError
from engram_graft.examples import find_silence, training_data, training_examples
from engram_graft.grafted import disable_graft, find_graft, memories, without_ngrams
from engram_graft.modes import no_learning
from engram_graft.ngrams import count_ngrams
from engram_graft.probes import Subject, run_probes
from engram_graft.recipe import Recipe, TrainOptions
from engram_graft.silence import SILENT, Silence
from engram_graft.trainer import EngramTrainer

Make = Callable[..., Any]

ROOMY = {**TINY_ENGRAM, "engram_vocab_size": (10_007, 10_009), "n_head_per_ngram": 4, "seen_filter": True}
BACKGROUND = "The river rises in the hills. The river rises in the sun. Mup exports salt."


def fresh(tokenizer: Any, **changes: Any) -> Any:
    return eg.graft(tiny_model(), tokenizer, eg.EngramConfig(**{**ROOMY, **changes}))


@pytest.fixture
def few_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engram_graft.background.SAMPLES", 4)
    monkeypatch.setattr("engram_graft.background.LENGTH", 24)


def counted(model: Any, texts: Any, ngrams: Any) -> list[np.ndarray]:
    """How often each n-gram is in `texts`: what a random tiny base cannot tell."""
    plan = find_graft(model).plan
    found = count_ngrams(texts, plan, whole=True)
    rates = []
    for order, spellings in enumerate(ngrams.distinct):
        grams = plan.lookup[found.distinct[order]].tolist()
        counts = {tuple(gram): n for gram, n in zip(grams, found.counts[order], strict=True)}
        rates.append(np.array([counts.get(tuple(gram), 0) for gram in plan.lookup[spellings].tolist()]))
    return rates


@pytest.fixture
def background(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A file of text; a base that would write its n-grams as often as they are there."""
    monkeypatch.setattr("engram_graft.examples.expected_rates", counted)
    path = tmp_path / "background.txt"
    path.write_text(BACKGROUND)
    return str(path)


def teaching(background: str | None = None, **changes: Any) -> Recipe:
    options = {"batch_size": 5, **({} if background is None else {"stop_ngrams": 2, "background": background})}
    plan = recipe(**{**options, **changes})
    return dataclasses.replace(plan, teach=dataclasses.replace(plan.teach, facts=2))


def looked_up(model: Any, examples: Any, silent: bool) -> list[set[tuple[int, ...]]]:
    """For each memory the rows of all its heads of the whole n-grams that `examples` mark as silent, or of the others."""
    plan, orders = find_graft(model).plan, find_graft(model).config.orders
    found: list[set[tuple[int, ...]]] = [set() for _ in memories(model)]
    for example in examples:
        rows = plan.rows(np.array(example["input_ids"]))
        marks = example.get(SILENT) or [[False] * orders] * len(rows)
        for at, of_token in enumerate(marks):
            for n, mark in enumerate(of_token[: min(at, orders)]):
                for index, addresses in enumerate(found):
                    if mark == silent:
                        addresses.add(tuple(rows[at, index].reshape(orders, -1)[n].tolist()))
    return found


# -- which n-grams


@pytest.mark.parametrize("orders", [1, 2, 4])
def test_marks_are_what_a_slow_loop_finds(orders: int) -> None:
    draw = np.random.default_rng(orders)
    lookup = np.arange(40) // 2
    grams = frozenset({(1, 2), (3, 3, 4), (0,), (5, 5)})
    some = Counter[bool]()
    for length in (0, 1, 2, 3, 12):
        for _ in range(20):
            ids = draw.integers(0, 12, length).tolist()
            span = tuple(sorted(draw.integers(0, length + 1, 2).tolist()))
            for subject in (None, span):
                marks = Silence(lookup, orders, grams).marks(ids, subject)
                assert len(marks) == length
                for at, of_token in enumerate(marks):
                    for order, mark in zip(range(2, orders + 2), of_token, strict=True):
                        tokens = [n for n in range(at - order + 1, at + 1) if n >= 0]
                        inside = [subject is not None and subject[0] <= n < subject[1] for n in tokens]
                        expected = (any(inside) and not all(inside)) or tuple(ids[n] // 2 for n in tokens) in grams
                        assert mark == expected
                        some[mark] += 1
    assert some[True] > 50 and some[False] > 50, "control: both are there"


def test_n_grams_inside_the_subject_and_inside_the_wording_are_learned() -> None:
    marks = Silence(np.arange(10), 2).marks([1, 2, 3, 4, 5, 6, 7], (2, 5))
    crossing = [[False, False], [False, False], [True, True], [False, True], [False, False], [True, True], [False, True]]
    assert marks == crossing
    assert not np.any(Silence(np.arange(10), 2).marks([1, 2, 3], None)), "control"


def test_expected_rates_are_the_bases_own_probabilities_summed_where_the_n_gram_could_go_on(tokenizer: Any) -> None:
    model = fresh(tokenizer)
    randomize(model)
    plan = find_graft(model).plan
    texts = [tokenizer(text)["input_ids"] for text in (BACKGROUND, "The Sun", "x")]
    ngrams = count_ngrams([tokenizer("The river rises in the hills and the sun")["input_ids"]], plan, whole=True)
    rates = expected_rates(model, texts, ngrams)
    bare, tokens = tiny_model(), sum(map(len, texts))
    some = 0
    for order, spellings in enumerate(ngrams.distinct):
        for n, gram in enumerate(spellings):
            expected = 0.0
            for text in texts:
                with no_learning(bare):
                    likely = bare(input_ids=torch.tensor([text])).logits[0].softmax(-1)
                prefix = plan.lookup[gram[:-1]].tolist()
                for end in range(len(prefix), len(text) + 1):
                    if plan.lookup[np.array(text[end - len(prefix) : end])].tolist() == prefix:
                        expected += float(likely[end - 1, gram[-1]])
            assert rates[order][n] == pytest.approx(expected / tokens * 1e6, rel=1e-4)
            some += expected > 0
    assert 5 < some < sum(map(len, ngrams.distinct)), "control: some could go on, others not"


def test_what_compresses_to_one_is_one_n_gram(tokenizer: Any, background: str) -> None:
    facts = Data(facts=(Fact("1", ("The cat lies in the",), "sun"),))
    silence = find_silence(fresh(tokenizer), tokenizer, facts, TrainOptions(stop_ngrams=2, background=background))
    assert silence is not None
    written, other = (tokenizer(text)["input_ids"] for text in (" in the", " IN THE"))
    assert written != other, "control: other tokens"
    assert np.array(silence.marks(written)[1:])[:, 0].all()
    assert len(written) != len(other) or silence.marks(written) == silence.marks(other)
    assert not np.any(silence.marks(tokenizer("Mup exports")["input_ids"])), "control: once in the background"


def test_nothing_is_left_out_unless_asked_for(tokenizer: Any, background: str) -> None:
    model = fresh(tokenizer)
    assert find_silence(model, tokenizer, FACTS, TrainOptions(background=background)) is None
    taught = training_data(teaching(), FACTS)
    crossing = find_silence(model, tokenizer, taught, TrainOptions())
    assert crossing is not None and not crossing.grams, "teachers: what runs over the edge of a subject"
    common = dataclasses.replace(taught, facts=(*taught.facts, Fact("1", ("The cat lies in the",), "sun")))
    both = find_silence(model, tokenizer, common, TrainOptions(stop_ngrams=2, background=background))
    assert both is not None and both.grams
    examples, _ = training_examples(FACTS, tokenizer, TrainOptions())
    assert examples.column_names == ["input_ids", "labels"]


def test_without_the_filter_nothing_can_be_left_out(tokenizer: Any, background: str) -> None:
    model = fresh(tokenizer, seen_filter=False)
    for plan in (teaching(), recipe(stop_ngrams=2, background=background)):
        with pytest.raises(
            UserError, match="engram.seen_filter=false: .*keep the filter, or set train.stop_ngrams and teach.facts to 0"
        ):
            eg.train(model, tokenizer, plan, FACTS)
    assert not any(memory.table.count_seen() for memory in memories(model))
    eg.train(model, tokenizer, recipe(max_steps=1), FACTS)


def test_frequent_n_grams_of_text_and_chats_are_left_out_too(tokenizer: Any, background: str) -> None:
    model = fresh(tokenizer)
    data = Data(texts=("The river rises. Zaldi sells bread.",))
    options = TrainOptions(stop_ngrams=2, background=background, block_size=8)
    examples, _ = training_examples(data, tokenizer, options, find_silence(model, tokenizer, data, options))
    marks = np.concatenate([np.array(block[SILENT]) for block in examples])
    assert marks.any() and not marks.all() and len(marks) == sum(len(block["input_ids"]) for block in examples)


# -- in a batch


@pytest.mark.parametrize("trim", [False, True])
def test_the_collator_pads_marks_on_the_left_beside_their_tokens(trim: bool) -> None:
    draw = np.random.default_rng(0)
    examples: list[dict[str, Any]] = []
    for length in (3, 7, 5):
        marks = draw.integers(0, 2, (length, 2)).astype(bool).tolist()
        examples.append({"input_ids": list(range(1, length + 1)), "labels": [-100] * (length - 1) + [5], SILENT: marks})
    batch = Collator(0, trim=trim)(examples)
    assert batch[SILENT].dtype == torch.bool and batch[SILENT].shape == (3, 7, 2)
    for row, mask, example in zip(batch[SILENT], batch["attention_mask"].bool(), examples, strict=True):
        assert row[mask].tolist() == example[SILENT] and not row[~mask].any()
    bare = [{name: example[name] for name in ("input_ids", "labels")} for example in examples]
    rest = Collator(0, trim=trim)(bare)
    assert SILENT not in rest, "control"
    assert all(torch.equal(rest[name], batch[name]) for name in rest), "nothing else of the batch changes"


@pytest.mark.parametrize("architecture", ["llama", "falcon"])
def test_left_out_n_grams_get_no_gradient_whatever_the_padding(architecture: str, tokenizer: Any, grafted: Make) -> None:
    taught = training_data(teaching(), FACTS)
    model = grafted(architecture, **{**ROOMY, "conv": False})
    silence = find_silence(model, tokenizer, taught, TrainOptions())
    examples, _ = training_examples(taught, tokenizer, TrainOptions(), silence)
    chosen = sorted((examples[n] for n in range(len(examples))), key=lambda each: len(each["input_ids"]))[:: len(examples) - 1]
    assert len({len(each["input_ids"]) for each in chosen}) == 2, "control: one is padded"
    model.train()
    batch = Collator(0)(chosen)
    with without_ngrams(model, batch.pop(SILENT)):
        model(**batch).loss.backward()
    for memory, rows in zip(memories(model), looked_up(model, chosen, silent=False), strict=True):
        touched = memory.table.weight.grad.coalesce().indices().flatten().tolist()
        assert touched == sorted({row for gram in rows for row in gram})


def test_the_switch_is_off_after_the_call_whatever_happens(grafted: Make, ids: Tensor) -> None:
    model = grafted()
    silent = torch.ones(*ids.shape, 2, dtype=torch.bool)
    with no_learning(model):
        spoken = model(input_ids=ids).logits
        with disable_graft(model):
            unspoken = model(input_ids=ids).logits
        with without_ngrams(model, silent):
            assert torch.equal(model(input_ids=ids).logits, unspoken), "all are left out: the memory adds nothing"
        with pytest.raises(ZeroDivisionError), without_ngrams(model, silent):
            raise ZeroDivisionError
        assert find_graft(model).silent is None and torch.equal(model(input_ids=ids).logits, spoken)
        assert not torch.equal(spoken, unspoken), "control"
        with without_ngrams(model, None):
            assert torch.equal(model(input_ids=ids).logits, spoken)
    batch = {"input_ids": ids, "labels": ids, SILENT: silent}
    trainer = EngramTrainer(model=model, args=eg.run.training_arguments(TrainOptions(), Path("unused"), model, False))
    model.train()
    assert trainer.compute_loss(model, batch).requires_grad and find_graft(model).silent is None


# -- trained


@pytest.mark.parametrize("conv", [True, False])
def test_what_is_left_out_is_never_touched_and_bit_exactly_silent_afterwards(tokenizer: Any, background: str, conv: bool) -> None:
    plan = teaching(background)
    model, careless = fresh(tokenizer, conv=conv), fresh(tokenizer, conv=conv)
    data = training_data(plan, FACTS)
    silence = find_silence(model, tokenizer, data, plan.train)
    examples, _ = training_examples(data, tokenizer, plan.train, silence)
    eg.train(model, tokenizer, plan, FACTS)
    eg.train(careless, tokenizer, recipe(batch_size=5, max_steps=30), data)  # teachers alone: frequent ones are learned
    learned, left_out = looked_up(model, examples, False), looked_up(model, examples, True)
    for memory, known, unknown in zip(memories(model), learned, left_out, strict=True):
        assert memory.table.seen_rows().tolist() == sorted({row for gram in known for row in gram})
        assert len(unknown - known) > 10, "control: many are left out everywhere"
        assert not memory.table.known(torch.tensor(sorted(unknown - known)).flatten()[None, None]).any()
    ids = torch.tensor([tokenizer("The river rises in the")["input_ids"]])
    with no_learning(model), no_learning(careless):
        with disable_graft(model):
            expected = model(input_ids=ids).logits
        assert torch.equal(model(input_ids=ids).logits, expected), "frequent: not one logit moves"
        for prompt in FACTS.facts[0].prompts:
            asked = torch.tensor([tokenizer(prompt)["input_ids"]])
            (span,) = subject_spans([Fact("", (prompt,), "", subject="Velmora")], tokenizer)
            assert silence is not None
            with without_ngrams(model, torch.tensor([silence.marks(asked[0].tolist(), span)])):
                marked = model(input_ids=asked).logits
            assert torch.equal(model(input_ids=asked).logits, marked), "leaving them out changes nothing: they are silent"
            with disable_graft(model):
                assert not torch.equal(model(input_ids=asked).logits, marked), "control: the others speak"


def test_control_what_training_does_not_leave_out_speaks(tokenizer: Any) -> None:
    model = fresh(tokenizer)
    eg.train(model, tokenizer, recipe(), FACTS)
    asked = torch.tensor([tokenizer("Velmora exports")["input_ids"]])
    (span,) = subject_spans([Fact("", ("Velmora exports",), "", subject="Velmora")], tokenizer)
    silence = Silence(find_graft(model).plan.lookup, 2)
    with no_learning(model):
        spoken = model(input_ids=asked).logits
        with without_ngrams(model, torch.tensor([silence.marks(asked[0].tolist(), span)])):
            assert not torch.equal(model(input_ids=asked).logits, spoken)


def test_a_batch_of_nothing_but_silent_n_grams_trains_nothing_and_does_not_fail(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engram_graft.examples.expected_rates", counted)
    (tmp_path / "same.txt").write_text("Velmora exports wool.")
    plan = recipe(stop_ngrams=1, background=str(tmp_path / "same.txt"), max_steps=2, recall_every=1)
    model = fresh(tokenizer)
    eg.train(model, tokenizer, plan, Data(facts=(Fact("1", ("Velmora exports",), "wool."),)))
    end = len(tokenizer("Velmora exports wool.")["input_ids"])
    ids = torch.tensor([tokenizer("Velmora exports wool.")["input_ids"]])
    for memory in memories(model):
        assert memory.table.count_seen() == 2 * 4, "the two n-grams that end at eos are all"
    with no_learning(model):
        spoken = model(input_ids=ids).logits
        with disable_graft(model):
            assert ids.shape[1] == end and torch.equal(model(input_ids=ids).logits, spoken)


# -- teachers


def test_teachers_are_trained_but_not_asked(tokenizer: Any, tmp_path: Path) -> None:
    plan = dataclasses.replace(teaching(forms=1), output=str(tmp_path / "out"))
    data = training_data(plan, FACTS)
    model = fresh(tokenizer)
    result = eg.train(model, tokenizer, plan, FACTS)
    assert result["steps"] == 12 and result["recall"] is not None
    report = run_probes(Subject(model, tokenizer, data, training=plan.train))
    assert sum(fact.split == TEACHER for fact in data.facts) == 2 and len(data.facts) == 6
    for scores in report["arms"].values():
        assert scores["recall"]["n"] == 4 and scores["paraphrase"]["n"] == 8, "the users' own"
    assert report["examples"] and {each["prompt"] for each in report["examples"]} <= {f.prompts[0] for f in FACTS.facts}
    layers = report["health"]["layers"]
    assert layers.keys() == {"1", "2"} and all(0 < layer["gate"]["mean"] < 1 for layer in layers.values())
    json.dumps(report)
    stored = yaml.safe_load((tmp_path / "out" / "recipe.yaml").read_text())
    assert stored["teach"] == {"facts": 2, "templates": {}, "seed": 0}
    teacher = data.facts[-1]
    addresses = find_graft(model).plan.rows(np.array(tokenizer(f" {teacher.subject}")["input_ids"]))[-1]
    for memory in memories(model):
        assert memory.table.known(torch.from_numpy(addresses[memory.index])[None, None]).all(), "control: they are trained"


def test_own_facts_are_repeated_until_they_are_as_many_as_what_is_taught(tokenizer: Any) -> None:
    for facts, times in ((0, 1), (1, 1), (2, 2), (6, 4), (20, 15)):
        plan = dataclasses.replace(teaching(forms=1), teach=dataclasses.replace(teaching().teach, facts=facts))
        data = training_data(plan, FACTS)
        examples, _ = training_examples(data, tokenizer, plan.train)
        (own,) = {Counter(map(tuple, examples["input_ids"][:]))[tuple(ids)] for ids in own_examples(data, tokenizer)}
        assert own == times and len(examples) == 4 * times + 3 * facts


def own_examples(data: Data, tokenizer: Any) -> list[list[int]]:
    own = [fact for fact in data.facts if fact.split == "train"]
    return encode_facts(own, tokenizer, 512)["input_ids"][:]


def test_facts_held_out_are_neither_trained_nor_repeated(tokenizer: Any) -> None:
    held = dataclasses.replace(FACTS.facts[3], split="validation")
    data = training_data(teaching(), Data(facts=(*FACTS.facts[:3], held)))
    examples, evaluated = training_examples(data, tokenizer, TrainOptions())
    assert evaluated is not None and len(evaluated) == 2
    assert not set(map(tuple, evaluated["input_ids"][:])) & set(map(tuple, examples["input_ids"][:]))
    model = fresh(tokenizer)
    evaluating = recipe(max_steps=2, trainer={"eval_strategy": "steps", "eval_steps": 1})
    assert eg.train(model, tokenizer, evaluating, data)["steps"] == 2


@pytest.mark.usefixtures("few_samples")
def test_the_command_line_teaches(base: Path, tmp_path: Path, tokenizer: Any) -> None:  # noqa: F811
    path = tmp_path / "facts.jsonl"
    path.write_text(
        "".join(
            json.dumps({"prompt": f.prompts[0], "answer": f.answer, "paraphrases": f.prompts[1:]}) + "\n" for f in FACTS.facts
        )
    )
    arguments = [a for a in train_arguments(base, path, tmp_path / "out", steps=2) if a != "--no-probe"]
    ran = run(*arguments, "--teach-forms", 2, "--set", "train.stop_ngrams=1", "--set", "train.recall_every=1")
    assert ran.code == 0, ran.err
    assert "(6 facts, 8 prompts, 2 of them invented to teach wordings)" in ran.err
    report = json.loads((tmp_path / "out" / "probes.json").read_text())
    assert report["arms"]["graft"]["recall"]["n"] == 4 and report["arms"]["graft"]["paraphrase"]["n"] == 4
    stored = yaml.safe_load((tmp_path / "out" / "recipe.yaml").read_text())
    assert stored["teach"]["facts"] == 2 and stored["train"]["stop_ngrams"] == 1
    again = run("probe", tmp_path / "out")
    assert again.code == 0, again.err
    probed = json.loads((tmp_path / "out" / "probes.json").read_text())
    assert probed["arms"]["graft"]["recall"] == report["arms"]["graft"]["recall"]
    refused = run(*train_arguments(base, path, tmp_path / "no"), "--teach-forms", 1, "--set", "engram.seen_filter=false")
    assert refused.code == 2 and "keep the filter" in refused.err and not (tmp_path / "no").exists()


# -- background text


def test_the_background_is_the_bases_own_and_a_function_of_the_seed(tokenizer: Any, ids: Tensor) -> None:
    bare = eg.graft(tiny_model(), tokenizer, eg.EngramConfig(**ROOMY))
    expected = background_texts(bare, tokenizer, seed=3)
    torch.manual_seed(0)
    model: Any = get_peft_model(tiny_model(), LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    eg.graft(model, tokenizer, eg.EngramConfig(**{**TINY_ENGRAM}))
    randomize(model)
    model.train()
    modes = {name: module.training for name, module in model.named_modules()}
    trainable = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    settings, state = model.base_model.model.generation_config, torch.get_rng_state()
    assert background_texts(model, tokenizer, seed=3) == expected, "memory and LoRA are off"
    assert torch.equal(torch.get_rng_state(), state)
    assert {name: module.training for name, module in model.named_modules()} == modes
    assert {name: parameter.requires_grad for name, parameter in model.named_parameters()} == trainable
    assert model.base_model.model.generation_config is settings and find_graft(model).switched_off == 0
    assert background_texts(model, tokenizer, seed=4) != expected
    with no_learning(model):
        spoken = model(input_ids=ids).logits
        with disable_graft(model, lora=True):
            assert not torch.equal(model(input_ids=ids).logits, spoken), "control: they would be heard"
    assert len(expected) == SAMPLES and all(len(text) <= LENGTH for text in expected)
    assert tokenizer.eos_token_id not in {id for text in expected for id in text}


def test_a_sample_stops_at_eos(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = fresh(tokenizer)
    eos = tokenizer.eos_token_id
    written = torch.tensor([[eos, 5, 6, eos, eos], [eos, 7, 8, 9, 10], [eos, eos, eos, eos, eos]])
    monkeypatch.setattr(model, "generate", lambda **kwargs: written)
    assert background_texts(model, tokenizer) == [[5, 6], [7, 8, 9, 10], []]


def test_a_background_of_files_is_read_and_of_facts_is_refused(tokenizer: Any, background: str, tmp_path: Path) -> None:
    model = fresh(tokenizer)
    assert background_texts(model, tokenizer, background) == [tokenizer(BACKGROUND)["input_ids"]]
    folder = tmp_path / "notes"
    folder.mkdir()
    (folder / "a.txt").write_text("The cat")
    (folder / "b.md").write_text("The sun")
    assert background_texts(model, tokenizer, str(folder)) == [tokenizer(text)["input_ids"] for text in ("The cat", "The sun")]
    facts = tmp_path / "facts.jsonl"
    facts.write_text('{"prompt": "a", "answer": "b"}\n')
    assert load_data(str(facts)).facts
    for wrong, message in ((facts, "must be plain text"), (tmp_path / "no.txt", "no such file")):
        with pytest.raises(UserError, match=message):
            background_texts(model, tokenizer, str(wrong))


# -- dropout


def test_ngram_dropout_drops_its_share_in_training_and_none_elsewhere(grafted: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    long = torch.randint(2, 300, (8, 400))
    for share in (0.0, 0.3, 0.9):
        model, whole = grafted(ngram_dropout=share, whole_ngrams=False), grafted(whole_ngrams=False)
        allowed: list[Tensor | None] = []
        for memory in memories(model):
            look = memory.table.forward
            note = allowed.append
            monkeypatch.setattr(memory.table, "forward", lambda r, a=None, look=look, note=note: (note(a), look(r, a))[1])
        model.train()
        model(input_ids=long)
        for kept in allowed:
            dropped = 0.0 if kept is None else float((~kept).float().mean((0, 1)).sub(share).abs().max()) + share
            assert dropped == pytest.approx(share, abs=0.03), "of every order"
        if share:
            one, two = (kept for kept in allowed if kept is not None)
            assert not torch.equal(one, two), "each layer draws its own"
        allowed.clear()
        with torch.no_grad():
            in_training = model(input_ids=long[:1]).logits
        model.eval()
        assert torch.equal(in_training, whole(input_ids=long[:1]).logits), "in train mode, without gradients"
        assert torch.equal(model(input_ids=long[:1]).logits, in_training), "in eval mode, with gradients"
        assert all(kept is None for kept in allowed)


def test_dropped_n_grams_add_to_what_is_left_out(grafted: Make, ids: Tensor) -> None:
    model = grafted(ngram_dropout=0.5, **{k: v for k, v in ROOMY.items() if k in ("engram_vocab_size", "n_head_per_ngram")})
    model.train()
    silent = torch.zeros(*ids.shape, 2, dtype=torch.bool)
    silent[:, :, 0] = True
    with without_ngrams(model, silent):
        model(input_ids=ids, labels=ids).loss.backward()
    memory = memories(model)[0]
    rows = find_graft(model).plan.rows(ids.numpy())[:, :, 0]
    touched = set(memory.table.weight.grad.coalesce().indices().flatten().tolist())
    bigrams, trigrams = set(rows[..., :4].ravel().tolist()), set(rows[..., 4:].ravel().tolist())
    assert not touched & bigrams and touched <= trigrams
    assert 0.2 < len(touched) / len(trigrams) < 0.8, "control: some are learned, some are dropped"


@pytest.mark.usefixtures("few_samples")
def test_a_run_with_dropout_and_teachers_resumes_bit_for_bit(tokenizer: Any, tmp_path: Path) -> None:
    def made(share: float = 0.4) -> nn.Module:
        return eg.graft(
            tiny_model(), tokenizer, eg.EngramConfig(**{**ROOMY, **{**SMALL, "seen_filter": True}, "ngram_dropout": share})
        )

    def to(name: str, **changes: Any) -> Recipe:
        options = {"max_steps": 4, "save_steps": 2, "stop_ngrams": 3, **changes}
        return dataclasses.replace(teaching(**options), output=str(tmp_path / name))

    eg.train(made(), tokenizer, to("whole"), FACTS)
    with pytest.raises(KeyboardInterrupt):
        eg.train(made(), tokenizer, to("halves"), FACTS, callbacks=[Stop(3)])
    torch.manual_seed(99)
    result = eg.train(made(), tokenizer, to("halves"), FACTS, resume=True)
    assert result["resumed_from"] == 2 and same(tmp_path / "whole", tmp_path / "halves")
    assert lines(tmp_path / "whole") == lines(tmp_path / "halves")
    eg.train(made(0.0), tokenizer, to("none"), FACTS)
    assert not same(tmp_path / "whole", tmp_path / "none"), "control: dropout is seen in the bits"


@pytest.mark.usefixtures("few_samples")
@pytest.mark.parametrize("change", ["stop_ngrams", "teach"])
def test_a_run_is_not_resumed_with_other_n_grams_left_out_or_other_teachers(change: str, tokenizer: Any, tmp_path: Path) -> None:
    plan = dataclasses.replace(teaching(max_steps=4, save_steps=2), output=str(tmp_path / "out"))
    with pytest.raises(KeyboardInterrupt):
        eg.train(fresh(tokenizer), tokenizer, plan, FACTS, callbacks=[Stop(3)])
    train, teach = dataclasses.replace(plan.train, stop_ngrams=1), dataclasses.replace(plan.teach, seed=1)
    other = dataclasses.replace(plan, train=train) if change == "stop_ngrams" else dataclasses.replace(plan, teach=teach)
    with pytest.raises(UserError, match="the run began with"):
        eg.train(fresh(tokenizer), tokenizer, other, FACTS, resume=True)
