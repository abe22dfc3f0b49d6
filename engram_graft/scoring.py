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

from engram_graft.data import IGNORED, Collator, encode_answer, encode_prompt
from engram_graft.locate import unwrap
from engram_graft.modes import no_learning


@dataclasses.dataclass(frozen=True)
class Score:
    """Args: exact: every answer token is the most likely one, given those before it; ce: nats per answer token."""

    exact: bool
    ce: float


def teacher_forced(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, questions: Sequence[tuple[str, str]], batch_size: int = 32
) -> list[Score]:
    """Score the answer of each (prompt, answer) with the true answer as context. The result does not depend on `batch_size`."""
    scores: list[Score] = []
    device = unwrap(model).device
    collate = Collator(0, trim=keeps_logits(model))
    examples = []
    for prompt, answer in questions:
        context, target = encode_answer(tokenizer, prompt, answer)
        examples.append({"input_ids": context + target, "labels": [IGNORED] * len(context) + target})
    for start in range(0, len(examples), batch_size):
        batch = collate(examples[start : start + batch_size])
        labels = batch.pop("labels")[:, 1:].to(device)
        inputs = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in batch.items()}
        with no_learning(model):
            logits = model(**inputs).logits[:, :-1].float()
        answered = labels != IGNORED
        right = (logits.argmax(-1) == labels) | ~answered
        losses = F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=IGNORED, reduction="none")
        means = losses.sum(1) / answered.sum(1)
        scores += [Score(*row) for row in zip(right.all(1).tolist(), means.tolist(), strict=True)]
    return scores


def keeps_logits(model: nn.Module) -> bool:
    """Whether the model can be asked for the logits of its last positions only."""
    return "logits_to_keep" in inspect.signature(unwrap(model).forward).parameters


def greedy(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    max_new_tokens: int,
    batch_size: int = 32,
    use_cache: bool = True,
) -> list[list[int]]:
    """The tokens the model continues each prompt with, up to and without eos; left-padded batches of equal results at any size."""
    answers: list[list[int]] = []
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
    for start in range(0, len(prompts), batch_size):
        encoded = [encode_prompt(tokenizer, prompt) for prompt in prompts[start : start + batch_size]]
        length = max(map(len, encoded))
        ids = torch.zeros(len(encoded), length, dtype=torch.long, device=base.device)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(encoded):
            ids[row, length - len(prompt) :] = torch.tensor(prompt)
            mask[row, length - len(prompt) :] = 1
        with no_learning(model), _only(settings, base):
            output = base.generate(input_ids=ids, attention_mask=mask, generation_config=settings)
        for row in output[:, length:].tolist():
            answers.append(row[: row.index(eos)] if eos in row else row)
    return answers


@contextlib.contextmanager
def _only(settings: GenerationConfig, base: Any) -> Iterator[None]:
    """generate() fills what its config leaves open from the model's own (penalties, suppressed tokens): take that away."""
    before = base.generation_config
    base.generation_config = settings
    try:
        yield
    finally:
        base.generation_config = before
