"""Asking a model: how likely it finds a known answer (teacher-forced), and what it says when free to (greedy)."""

import contextlib
import dataclasses
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GenerationConfig, PreTrainedTokenizerBase

from engram_graft.encode import IGNORED, Collator, Question, Text, encode_answer, encode_prompt
from engram_graft.locate import unwrap
from engram_graft.modes import no_learning

TOKENS = 4096  # of a batch at most: a large vocabulary has many logits


@dataclasses.dataclass(frozen=True)
class Score:
    """Args: exact: every answer token is the most likely one, given those before it; ce: nats per answer token; rank: of the
    answer's first token by its likelihood, 1 is the most likely."""

    exact: bool
    ce: float
    rank: int


def teacher_forced(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, questions: Sequence[Question], batch_size: int = 32
) -> list[Score]:
    """Score the answer of each (prompt, answer) with the true answer as context. The result does not depend on `batch_size`."""
    device = unwrap(model).device
    collate = Collator(0, trim=keeps_logits(model))
    examples = []
    for prompt, answer in questions:
        context, target = encode_answer(tokenizer, prompt, answer)
        examples.append({"input_ids": context + target, "labels": [IGNORED] * len(context) + target})
    scores: dict[int, Score] = {}
    for rows in _batches([len(example["input_ids"]) for example in examples], batch_size):
        batch = collate([examples[row] for row in rows])
        labels = batch.pop("labels")[:, 1:].to(device)
        inputs = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in batch.items()}
        with no_learning(model):
            logits = model(**inputs).logits[:, :-1].float()
        answered = labels != IGNORED
        right = (logits.argmax(-1) == labels) | ~answered
        losses = F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=IGNORED, reduction="none")
        means = losses.sum(1) / answered.sum(1)
        at = torch.arange(len(rows), device=device), answered.int().argmax(1)  # where each answer begins
        ranks = 1 + (logits[at] > logits[at].gather(1, labels[at][:, None])).sum(1)
        for row, exact, ce, rank in zip(rows, right.all(1).tolist(), means.tolist(), ranks.tolist(), strict=True):
            scores[row] = Score(exact, ce, rank)
    return [scores[row] for row in range(len(examples))]


def next_token_logits(model: nn.Module, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Text]) -> Tensor:
    """Logits `[B, V]` (float32) of what comes after each prompt, from one left-padded batch."""
    encoded = [encode_prompt(tokenizer, prompt) for prompt in prompts]
    batch = Collator(0, trim=keeps_logits(model))(
        [{"input_ids": ids, "labels": [IGNORED] * (len(ids) - 1) + ids[-1:]} for ids in encoded]
    )
    del batch["labels"]  # they only marked the last position
    inputs = {name: value.to(unwrap(model).device) for name, value in batch.items()}
    with no_learning(model):
        return model(**inputs).logits[:, -1].float()


def kl(base: Tensor, other: Tensor) -> Tensor:
    """KL(base || other) in nats `[...]`, of logits `[..., V]`."""
    log_base, log_other = base.float().log_softmax(-1), other.float().log_softmax(-1)
    return (log_base.exp() * (log_base - log_other)).sum(-1)


def _batches(lengths: Sequence[int], batch_size: int) -> list[list[int]]:
    """Rows of like length together (on a CPU padding costs what tokens do), fewer than `batch_size` where they are long."""
    batches: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda row: lengths[row]):
        if not batches or len(batches[-1]) >= min(batch_size, max(1, TOKENS // max(lengths[row], 1))):
            batches.append([])
        batches[-1].append(row)
    return batches


def keeps_logits(model: nn.Module) -> bool:
    """Whether the model can be asked for the logits of its last positions only."""
    return "logits_to_keep" in inspect.signature(unwrap(model).forward).parameters


def greedy(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Text],
    max_new_tokens: int,
    batch_size: int = 32,
    use_cache: bool = True,
    streamer: Any = None,
) -> list[list[int]]:
    """The tokens the model continues each prompt with, up to and without eos; left-padded batches of equal results at any size. A
    `streamer` of transformers' kind gets those of a single prompt as they are made."""
    answers: dict[int, list[int]] = {}
    base: Any = unwrap(model)
    eos = tokenizer.eos_token_id
    settings = GenerationConfig(
        do_sample=False,
        num_beams=1,
        max_new_tokens=max_new_tokens,
        repetition_penalty=1.0,
        use_cache=use_cache,
        eos_token_id=eos,
        pad_token_id=0 if tokenizer.pad_token_id is None else tokenizer.pad_token_id,
    )
    encoded = [encode_prompt(tokenizer, prompt) for prompt in prompts]
    for rows in _batches([len(prompt) for prompt in encoded], batch_size):
        length = max(len(encoded[row]) for row in rows)
        ids = torch.zeros(len(rows), length, dtype=torch.long, device=base.device)
        mask = torch.zeros_like(ids)
        for at, row in enumerate(rows):
            ids[at, length - len(encoded[row]) :] = torch.tensor(encoded[row])
            mask[at, length - len(encoded[row]) :] = 1
        with no_learning(model), alone(settings, base):
            output = base.generate(input_ids=ids, attention_mask=mask, generation_config=settings, streamer=streamer)
        for row, said in zip(rows, output[:, length:].tolist(), strict=True):
            answers[row] = said[: said.index(eos)] if eos in said else said
    return [answers[row] for row in range(len(prompts))]


@contextlib.contextmanager
def alone(settings: GenerationConfig, base: Any) -> Iterator[None]:
    """generate() fills what its config leaves open from the model's own (penalties, suppressed tokens): take that away."""
    before = base.generation_config
    base.generation_config = settings
    try:
        yield
    finally:
        base.generation_config = before
