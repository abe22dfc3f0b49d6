"""Recall: does the model give a fact's answer, by its own greedy decoding and with the true answer as context, each labelled."""

import itertools
import re
import statistics
from collections.abc import Sequence
from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerBase

from engram_graft.data import Fact
from engram_graft.encode import Question, encode_answer
from engram_graft.probes.probe import Probe, Scores, Subject
from engram_graft.scoring import greedy, teacher_forced

LONGEST = 32  # answer tokens that are decoded at most: a turn of a chat can have hundreds


def recall(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, questions: Sequence[Question], batch_size: int
) -> dict[str, Any]:
    """Over (prompt, answer) pairs: shares of exact answers, mean nats per answer token, and how many pairs.

    `greedy_exact` decodes freely with the cache: the answer's tokens, and then the end or another word ("woollen" is not "wool"). Of
    an answer of more than `LONGEST` tokens the first `LONGEST` are asked for. `teacher_forced_exact` and `answer_ce` read the answer's
    own tokens, all of them. `first_token_rank` is the median rank of the answer's first token, 1 the most likely. `right` has
    `greedy_exact` for each pair, in their order. No score depends on the batch size.
    """
    answers = [encode_answer(tokenizer, prompt, answer)[1] for prompt, answer in questions]
    lengths = [min(len(answer), LONGEST) for answer in answers]
    said: dict[int, list[int]] = {}
    for length in sorted(set(lengths)):  # no prompt is decoded for much longer than its own answer
        of_length = [n for n, its_own in enumerate(lengths) if its_own == length]
        texts = greedy(model, tokenizer, [questions[n][0] for n in of_length], length + 2, batch_size)
        said.update(zip(of_length, texts, strict=True))
    forced = teacher_forced(model, tokenizer, questions, batch_size)
    right = [_says(tokenizer, said[n], answer) for n, answer in enumerate(answers)]
    return {
        "greedy_exact": statistics.fmean(right),
        "teacher_forced_exact": statistics.fmean(score.exact for score in forced),
        "first_token_rank": statistics.median(score.rank for score in forced),
        "answer_ce": statistics.fmean(score.ce for score in forced),
        "n": len(questions),
        "right": right,
    }


def _says(tokenizer: PreTrainedTokenizerBase, said: list[int], answer: list[int]) -> bool:
    if said[: min(len(answer), LONGEST)] != answer[:LONGEST]:
        return False
    if len(answer) > LONGEST:
        return True
    beyond = str(tokenizer.decode(said))[len(tokenizer.decode(answer)) :]
    # not a longer word, and not a longer number
    return not re.match(r"\w|[.,]\d", beyond)


def by_forms(facts: Sequence[Fact], trained: Sequence[bool], unseen: Sequence[bool]) -> dict[str, dict[str, Any]]:
    """Facts grouped by how many wordings of them were trained: {"1": {"facts", "trained", "unseen"}, ...}.

    Args:
        trained: for each prompt of each fact, whether it was answered (`right` of the recall probe).
        unseen: the same for each paraphrase; the share of a group without any is None.
    """
    asked, others = iter(trained), iter(unseen)
    groups: dict[int, list[tuple[list[bool], list[bool]]]] = {}
    for fact in facts:
        answered = list(itertools.islice(asked, len(fact.prompts))), list(itertools.islice(others, len(fact.paraphrases)))
        groups.setdefault(len(fact.prompts), []).append(answered)
    return {
        str(forms): {
            "facts": len(groups[forms]),
            "trained": statistics.fmean(right for prompts, _ in groups[forms] for right in prompts),
            "unseen": _share([right for _, paraphrases in groups[forms] for right in paraphrases]),
        }
        for forms in sorted(groups)
    }


def _share(right: Sequence[bool]) -> float | None:
    return statistics.fmean(right) if right else None


def _of(subject: Subject, questions: Sequence[Question]) -> dict[str, Scores]:
    if not questions:
        return {}
    return {arm: recall(subject.model, subject.tokenizer, questions, subject.options.batch_size) for arm in subject.each_arm()}


def _of_trained(subject: Subject) -> dict[str, Scores]:
    """With "new": {"greedy_exact", "n"}, the same over the prompts that the base did not answer already."""
    report = _of(subject, subject.questions)
    for scores in report.values():
        new = [right for right, known in zip(scores["right"], report["base"]["right"], strict=True) if not known]
        scores["new"] = {"greedy_exact": _share(new), "n": len(new)}
    return report


RECALL = Probe("recall", "greedy and teacher-forced answers to the trained prompts", _of_trained)
PARAPHRASE = Probe(
    "paraphrase", "the same in wordings that the fact was not trained in", lambda subject: _of(subject, subject.paraphrases)
)
