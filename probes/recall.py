"""Recall: does the model give a fact's answer, by its own greedy decoding and with the true answer as context, each labelled."""

from collections.abc import Sequence
from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerBase

from engram_graft.data import encode_answer
from engram_graft.scoring import greedy, teacher_forced


def recall(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, questions: Sequence[tuple[str, str]], batch_size: int
) -> dict[str, Any]:
    """Over (prompt, answer) pairs: shares of exact answers, mean nats per answer token, and how many pairs.

    `greedy_exact` decodes freely with the cache and compares the answer's tokens; `teacher_forced_exact` and `answer_ce` read the
    answer's own tokens. No score depends on the batch size.
    """
    answers = [encode_answer(tokenizer, prompt, answer)[1] for prompt, answer in questions]
    said = greedy(model, tokenizer, [prompt for prompt, _ in questions], max(map(len, answers)), batch_size)
    forced = teacher_forced(model, tokenizer, questions, batch_size)
    n = len(questions)
    return {
        "greedy_exact": sum(got[: len(want)] == want for got, want in zip(said, answers, strict=True)) / n,
        "teacher_forced_exact": sum(score.exact for score in forced) / n,
        "answer_ce": sum(score.ce for score in forced) / n,
        "n": n,
    }
