"""Asking a model: how likely it finds a known answer (teacher-forced), and what it says when free to (greedy)."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import GenerationConfig, PreTrainedTokenizerBase

from engram_graft.data import encode_answer, encode_prompt
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
    encoded = [encode_answer(tokenizer, prompt, answer) for prompt, answer in questions]
    for start in range(0, len(encoded), batch_size):
        batch = encoded[start : start + batch_size]
        length = max(len(prompt) + len(answer) for prompt, answer in batch)
        ids = torch.zeros(len(batch), length, dtype=torch.long, device=device)
        mask = torch.zeros_like(ids)
        for row, (prompt, answer) in enumerate(batch):
            ids[row, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
            mask[row, : len(prompt) + len(answer)] = 1
        with no_learning(model):
            logits = model(input_ids=ids, attention_mask=mask).logits
        for row, (prompt, answer) in enumerate(batch):
            at = logits[row, len(prompt) - 1 : len(prompt) + len(answer) - 1].float()
            target = torch.tensor(answer, device=at.device)
            scores.append(Score(bool((at.argmax(-1) == target).all()), float(F.cross_entropy(at, target))))
    return scores


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
        with no_learning(model):
            output = base.generate(input_ids=ids, attention_mask=mask, generation_config=settings)
        for row in output[:, length:].tolist():
            answers.append(row[: row.index(eos)] if eos in row else row)
    return answers
