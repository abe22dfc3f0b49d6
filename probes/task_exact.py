"""Task exact: the model answers freely until it stops, and the whole answer has to be right."""

import re
import string
from collections.abc import Sequence
from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerBase

from engram_graft.data import Fact
from engram_graft.encode import encode_answer
from engram_graft.probes.probe import Probe, Scores, Subject
from engram_graft.scoring import greedy

_STOPS = (
    "\n",
    ".",
    ",",
)  # lm-evaluation-harness ends a short answer at these; not where the true answer has them itself


def normalised(text: str) -> str:
    """Lower case, without articles, punctuation and spare spaces: the convention of SQuAD's and TriviaQA's exact match.

    A text that is nothing else ("The", "%") stays as it is: it must not equal silence.
    """
    bare = "".join(character for character in text.lower() if character not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", bare).split()) or text.strip().lower()


def free_answers(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, facts: Sequence[Fact], max_new_tokens: int, batch_size: int
) -> list[str]:
    """What the model says to the first prompt of each fact, up to eos or the first stop; cut at `max_new_tokens`, or at what the
    fact's longest right answer needs."""
    limits = []
    for fact in facts:
        needed = [len(encode_answer(tokenizer, fact.prompts[0], form)[1]) for form in (fact.answer, *fact.aliases)]
        limits.append(max(max_new_tokens, *(n + 2 for n in needed)))
    said: dict[int, list[int]] = {}
    for limit in sorted(set(limits)):  # one long answer does not make all of them slow
        of_limit = [n for n, own in enumerate(limits) if own == limit]
        said.update(
            zip(of_limit, greedy(model, tokenizer, [facts[n].prompts[0] for n in of_limit], limit, batch_size), strict=True)
        )
    answers = []
    for n, fact in enumerate(facts):
        text = str(tokenizer.decode(said[n], skip_special_tokens=True)).strip()
        for stop in _STOPS:
            if not any(stop in form for form in (fact.answer, *fact.aliases)):
                text = text.split(stop)[0]
        answers.append(text.strip())
    return answers


def task_exact(facts: Sequence[Fact], answers: Sequence[str]) -> dict[str, Any]:
    """The share of answers that equal their fact's answer or an alias after normalisation."""
    exact = sum(right(fact, said) for fact, said in zip(facts, answers, strict=True))
    return {"exact_match": exact / len(facts), "n": len(facts)}


def right(fact: Fact, said: str) -> bool:
    """Whether `said` is the answer or an alias after normalisation."""
    return normalised(said) in {normalised(form) for form in (fact.answer, *fact.aliases)}


def _of(subject: Subject) -> dict[str, Scores]:
    if not subject.data.facts:
        return {}
    options, report = subject.options, {}
    for arm in subject.each_arm():
        answers = free_answers(subject.model, subject.tokenizer, subject.facts, options.max_new_tokens, options.batch_size)
        report[arm] = {**task_exact(subject.facts, answers), "answers": answers}
    return report


TASK_EXACT = Probe("task_exact", "free answers that are right as a whole, aliases allowed", _of)
