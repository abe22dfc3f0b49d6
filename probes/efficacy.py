"""Efficacy: of facts that replace another, whether the new answer is likelier than the one that was true before.

The measures of CounterFact (Meng et al., ROME, arXiv 2202.05262). P is an answer's likelihood after its prompt by its mean
log-likelihood per token, and a success is one inequality.
"""

import statistics
from collections.abc import Sequence

from engram_graft.data import Fact
from engram_graft.encode import Question
from engram_graft.probes.probe import Probe, Scores, Subject
from engram_graft.scoring import teacher_forced

KINDS = ("efficacy", "paraphrase", "neighborhood")


def _prompts(fact: Fact) -> dict[str, Sequence[str]]:
    neighbours = [entry["prompt"] for entry in fact.neighborhood if entry["answer"] == fact.target_true]
    return dict(zip(KINDS, (fact.prompts, fact.paraphrases, neighbours), strict=True))


def _of(subject: Subject) -> dict[str, Scores]:
    """For each arm: {"efficacy", "paraphrase", "neighborhood", "score", "n"}, over the `n` facts that have a `target_true`.

    The first two are shares with P(new) > P(true), on trained prompts and on paraphrases; "neighborhood" is the share with
    P(true) > P(new) on those prompts of the neighborhood whose answer is the true one: others are unrelated questions. Shares are
    means over facts of each fact's own share, as in CounterFact's evaluation; None where no fact has such prompts. "score" is their
    harmonic mean; None unless all three are there.
    """
    facts = [fact for fact in subject.facts if fact.target_true]
    questions: list[Question] = []
    for fact in facts:
        assert fact.target_true is not None
        for prompts in _prompts(fact).values():
            questions += [(prompt, target) for prompt in prompts for target in (fact.answer, fact.target_true)]
    report: dict[str, Scores] = {}
    for arm in subject.each_arm() if facts else ():
        losses = iter(
            [score.ce for score in teacher_forced(subject.model, subject.tokenizer, questions, subject.options.batch_size)]
        )
        shares: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for fact in facts:
            for kind, prompts in _prompts(fact).items():
                pairs = [(next(losses), next(losses)) for _ in prompts]  # of the new answer, of the true one
                if pairs:
                    shares[kind].append(
                        statistics.fmean(true < new if kind == "neighborhood" else new < true for new, true in pairs)
                    )
        means = {kind: statistics.fmean(values) if values else None for kind, values in shares.items()}
        present = [value for value in means.values() if value is not None]
        report[arm] = {
            **means,
            "score": statistics.harmonic_mean(present) if len(present) == len(KINDS) else None,
            "n": len(facts),
        }
    return report


EFFICACY = Probe("efficacy", "whether a fact's new answer is likelier than what was true before (CounterFact)", _of)
