"""How far two models are apart that should be one: what each says of the same texts and questions, measured one after the other."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from engram_graft.encode import Question, Text
from engram_graft.locate import unwrap
from engram_graft.modes import no_learning
from engram_graft.scoring import greedy, kl, teacher_forced
from engram_graft.verify import TEXTS, unfiltered

ANSWER_TOKENS = 6


@dataclasses.dataclass(frozen=True)
class Measured:
    """Args:
    logits: `[T, V]` of each of `verify.TEXTS`, float32 on the CPU, the seen filter off so that the memory speaks everywhere.
    answers: tokens of the greedy answer to each question.
    known: whether the model has each question's answer, every token the most likely one.
    """

    logits: list[Tensor]
    answers: list[list[int]]
    known: list[bool]


def measure(model: nn.Module, tokenizer: PreTrainedTokenizerBase, questions: Sequence[Question] = ()) -> Measured:
    """What `model` says; `questions` are (prompt, answer)."""
    logits = []
    with no_learning(model), unfiltered(model):
        for text in TEXTS:
            ids = tokenizer(text, return_tensors="pt")["input_ids"].to(unwrap(model).device)
            logits.append(model(input_ids=ids).logits[0].float().cpu())
    answers = greedy(model, tokenizer, [prompt for prompt, _ in questions], ANSWER_TOKENS) if questions else []
    known = [score.exact for score in teacher_forced(model, tokenizer, questions)] if questions else []
    return Measured(logits, answers, known)


def difference(before: Measured, after: Measured) -> dict[str, Any]:
    """How far `after` is from `before`.

    Returns:
        {"max_difference": of logits, "flips": positions whose most likely token differs, "positions": compared, "kl": mean
        KL(before || after) in nats a position} and, if there were questions, {"questions": n, "same_answers": greedy answers of
        equal tokens, "recall_before", "recall_after": shares of the answers known}.
    """
    pairs = list(zip(before.logits, after.logits, strict=True))
    report: dict[str, Any] = {
        "max_difference": max(float((a - b).abs().max()) for a, b in pairs),
        "flips": sum(int((a.argmax(-1) != b.argmax(-1)).sum()) for a, b in pairs),
        "positions": sum(len(a) for a, _ in pairs),
        "kl": float(torch.cat([kl(a, b) for a, b in pairs]).mean().clamp_min(0)),
    }
    if before.known:
        count = len(before.known)
        same = sum(a == b for a, b in zip(before.answers, after.answers, strict=True))
        report |= {"questions": count, "same_answers": same}
        report |= {"recall_before": sum(before.known) / count, "recall_after": sum(after.known) / count}
    return report


def same_without_cache(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Text], tokens: int = ANSWER_TOKENS
) -> int:
    """How many greedy answers are the same tokens with and without a cache. (Without one each token costs the whole text again.)"""
    cached, plain = (greedy(model, tokenizer, prompts, tokens, use_cache=use) for use in (True, False))
    return sum(a == b for a, b in zip(cached, plain, strict=True))
