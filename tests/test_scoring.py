"""Scores are the model's, not the batch's: equal at any batch size, with cache and without; the model stays as it was."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import keep_seen, tiny_model
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedTokenizerFast

import engram_graft as eg
from engram_graft.encode import encode_answer, encode_prompt
from engram_graft.modes import no_learning
from engram_graft.scoring import greedy, teacher_forced

QUESTIONS = [
    ("The cat sleeps in the", "sun"),
    ("x", "y"),
    ("To make bread, mix flour, water, salt and", "yeast and more"),
    ("Velmora exports", "wool; Ostrenk exports honey"),
    ("The river rises in the hills and the cats sleep in the", "sun."),
]
PROMPTS = [prompt for prompt, _ in QUESTIONS]
ARCHITECTURES = ["llama", "gpt2", "falcon"]
Make = Callable[..., nn.Module]


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_case_39_teacher_forced_does_not_depend_on_the_batch_size(architecture: str, grafted: Make, tokenizer: Any) -> None:
    model = grafted(architecture)
    alone = teacher_forced(model, tokenizer, QUESTIONS, 1)
    assert len(alone) == len(QUESTIONS) and len({round(score.ce, 3) for score in alone}) == len(QUESTIONS)
    for size in (2, 3, 99):
        batched = teacher_forced(model, tokenizer, QUESTIONS, size)
        assert [score.exact for score in batched] == [score.exact for score in alone]
        assert max(abs(a.ce - b.ce) for a, b in zip(alone, batched, strict=True)) <= 1e-5


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_case_39_greedy_does_not_depend_on_the_batch_size(architecture: str, grafted: Make, tokenizer: Any) -> None:
    model = grafted(architecture)
    alone = greedy(model, tokenizer, PROMPTS, 8, 1)
    assert len({tuple(ids) for ids in alone}) > 1, "control: prompts are told apart"
    assert greedy(model, tokenizer, PROMPTS, 8, 3) == alone
    assert greedy(model, tokenizer, PROMPTS, 8, 99) == alone


def test_case_39_control_a_batch_without_its_mask_is_noticed(
    grafted: Make, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = grafted()
    alone = greedy(model, tokenizer, PROMPTS, 8, 1)
    generate = model.generate

    def unmasked(input_ids: Any, attention_mask: Any, **kwargs: Any) -> Any:
        return generate(input_ids=input_ids, attention_mask=torch.ones_like(attention_mask), **kwargs)

    monkeypatch.setattr(model, "generate", unmasked)
    assert greedy(model, tokenizer, PROMPTS, 8, 99) != alone


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_with_cache_equals_without(architecture: str, grafted: Make, tokenizer: Any) -> None:
    model = grafted(architecture)
    assert greedy(model, tokenizer, PROMPTS, 8) == greedy(model, tokenizer, PROMPTS, 8, use_cache=False)


def test_greedy_is_the_argmax_of_full_forwards_up_to_and_without_eos(grafted: Make, tokenizer: Any) -> None:
    model = grafted()
    for prompt, said in zip(PROMPTS, greedy(model, tokenizer, PROMPTS, 6), strict=True):
        ids = encode_prompt(tokenizer, prompt)
        expected: list[int] = []
        while len(expected) < 6:
            with torch.no_grad():
                token = int(model(input_ids=torch.tensor([ids + expected])).logits[0, -1].argmax())
            if token == tokenizer.eos_token_id:
                break
            expected.append(token)
        assert said == expected


def test_greedy_stops_at_eos_in_each_row_of_a_batch(grafted: Make, tokenizer: Any) -> None:
    model = grafted()
    plain = greedy(model, tokenizer, PROMPTS, 8)
    stop = plain[0][2]
    word = tokenizer.convert_ids_to_tokens(stop)
    other = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, pad_token="<pad>", eos_token=word)
    assert other.eos_token_id == stop
    assert greedy(model, other, PROMPTS, 8) == [ids[: ids.index(stop)] if stop in ids else ids for ids in plain]


def test_greedy_does_not_listen_to_the_models_own_generation_settings(grafted: Make, tokenizer: Any) -> None:
    model = grafted()
    plain = greedy(model, tokenizer, PROMPTS, 8)
    settings: Any = model.generation_config
    settings.do_sample, settings.temperature, settings.num_beams = True, 3.0, 2
    settings.repetition_penalty, settings.no_repeat_ngram_size, settings.min_new_tokens = 5.0, 1, 8
    settings.suppress_tokens = sorted({token for ids in plain for token in ids})
    assert greedy(model, tokenizer, PROMPTS, 8) == plain


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_teacher_forced_and_greedy_agree_on_what_the_model_would_say(architecture: str, grafted: Make, tokenizer: Any) -> None:
    """An answer made of the model's own greedy tokens is exact; with one token changed it is not."""
    model = grafted(architecture)
    for prompt, (first, *_) in zip(PROMPTS, greedy(model, tokenizer, PROMPTS, 1), strict=True):
        context = encode_prompt(tokenizer, prompt)
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([context])).logits[0, -1]
        assert int(logits.argmax()) == first
    said = greedy(model, tokenizer, PROMPTS, 3)
    for (prompt, answer), score, ids in zip(QUESTIONS, teacher_forced(model, tokenizer, QUESTIONS), said, strict=True):
        want = encode_answer(tokenizer, prompt, answer)[1][:3]
        assert not score.exact or ids[: len(want)] == want


def test_teacher_forced_is_exact_and_cheap_where_greedy_says_the_answer(
    grafted: Make, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = grafted()
    said = dict(zip(PROMPTS, greedy(model, tokenizer, PROMPTS, 3), strict=True))

    def own_words(tokenizer: Any, prompt: str, answer: str) -> tuple[list[int], list[int]]:
        ids = said[prompt]
        return encode_prompt(tokenizer, prompt), ids if answer == "said" else [*ids[:-1], (ids[-1] + 1) % 300]

    monkeypatch.setattr("engram_graft.scoring.encode_answer", own_words)
    right = teacher_forced(model, tokenizer, [(prompt, "said") for prompt in PROMPTS])
    wrong = teacher_forced(model, tokenizer, [(prompt, "other") for prompt in PROMPTS])
    assert all(score.exact for score in right) and not any(score.exact for score in wrong)
    assert all(a.ce < b.ce for a, b in zip(right, wrong, strict=True))


def test_teacher_forced_ce_is_the_mean_over_the_answers_tokens(grafted: Make, tokenizer: Any) -> None:
    model = grafted()
    for (prompt, answer), score in zip(QUESTIONS, teacher_forced(model, tokenizer, QUESTIONS), strict=True):
        context, ids = encode_answer(tokenizer, prompt, answer)
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([context + ids])).logits[0]
        losses = [F.cross_entropy(logits[len(context) - 1 + n], torch.tensor(id)) for n, id in enumerate(ids)]
        assert abs(score.ce - float(torch.stack(losses).mean())) <= 1e-5


@pytest.mark.parametrize("ask", [lambda m, t: teacher_forced(m, t, QUESTIONS), lambda m, t: greedy(m, t, PROMPTS, 2)])
def test_scoring_restores_each_modules_mode_and_keeps_seen_weights_and_gradients(ask: Any, grafted: Make, tokenizer: Any) -> None:
    model = grafted(base={"attention_dropout": 0.5})
    keep_seen(model, torch.arange(0, 100, 3))
    model.train()
    modules = list(model.modules())
    modules[3].eval()
    modes = [module.training for module in modules]
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert ask(model, tokenizer) == ask(model, tokenizer), "no dropout"
    assert [module.training for module in modules] == modes and any(modes) and not all(modes)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items()), "nothing is marked seen"
    assert all(parameter.grad is None for parameter in model.parameters())


def test_no_learning_restores_modes_after_an_error(grafted: Make) -> None:
    model = grafted()
    model.train()
    with pytest.raises(KeyError), no_learning(model):
        assert not model.training and not torch.is_grad_enabled()
        raise KeyError
    assert all(module.training for module in model.modules()) and torch.is_grad_enabled()


def test_scoring_works_through_peft(tokenizer: Any, config: eg.EngramConfig) -> None:
    bare = tiny_model()
    expected = greedy(bare, tokenizer, PROMPTS, 4), teacher_forced(bare, tokenizer, QUESTIONS)
    model = get_peft_model(tiny_model(), LoraConfig(r=2, target_modules=["q_proj"]))  # LoRA adds 0 at first
    eg.graft(model, tokenizer, config)
    assert (greedy(model, tokenizer, PROMPTS, 4), teacher_forced(model, tokenizer, QUESTIONS)) == expected
