"""Recall: does the model give a fact's answer, by its own greedy decoding and with the true answer as context, each labelled."""

import re
from collections.abc import Sequence
from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerBase

from engram_graft.encode import Question, encode_answer
from engram_graft.probes.probe import Probe, Scores, Subject
from engram_graft.scoring import greedy, teacher_forced


def recall(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, questions: Sequence[Question], batch_size: int
) -> dict[str, Any]:
    """Over (prompt, answer) pairs: shares of exact answers, mean nats per answer token, and how many pairs.

    `greedy_exact` decodes freely with the cache: the answer's tokens, and then the end or another word ("woollen" is not "wool").
    `teacher_forced_exact` and `answer_ce` read the answer's own tokens. No score depends on the batch size.
    """
    answers = [encode_answer(tokenizer, prompt, answer)[1] for prompt, answer in questions]
    said: dict[int, list[int]] = {}
    for length in sorted(set(map(len, answers))):  # no prompt is decoded for much longer than its own answer
        of_length = [n for n, answer in enumerate(answers) if len(answer) == length]
        texts = greedy(model, tokenizer, [questions[n][0] for n in of_length], length + 2, batch_size)
        said.update(zip(of_length, texts, strict=True))
    forced = teacher_forced(model, tokenizer, questions, batch_size)
    n = len(questions)
    return {
        "greedy_exact": sum(_says(tokenizer, said[i], answer) for i, answer in enumerate(answers)) / n,
        "teacher_forced_exact": sum(score.exact for score in forced) / n,
        "answer_ce": sum(score.ce for score in forced) / n,
        "n": n,
    }


def _says(tokenizer: PreTrainedTokenizerBase, said: list[int], answer: list[int]) -> bool:
    if said[: len(answer)] != answer:
        return False
    beyond = tokenizer.decode(said)[len(tokenizer.decode(answer)) :]
    # not a longer word, and not a longer number
    return not re.match(r"\w|[.,]\d", beyond)


def _of(subject: Subject, questions: Sequence[Question]) -> dict[str, Scores]:
    if not questions:
        return {}
    return {arm: recall(subject.model, subject.tokenizer, questions, subject.options.batch_size) for arm in subject.each_arm()}


RECALL = Probe(
    "recall", "greedy and teacher-forced answers to the trained prompts", lambda subject: _of(subject, subject.questions)
)
PARAPHRASE = Probe("paraphrase", "the same in wordings that were not trained", lambda subject: _of(subject, subject.paraphrases))
