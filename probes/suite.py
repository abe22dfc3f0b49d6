"""All probes over all arms, as the dictionary that becomes probes.json."""

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from typing import Any

from engram_graft.data import TEACHER, Fact
from engram_graft.errors import UserError
from engram_graft.grafted import find_graft
from engram_graft.probes import efficacy, health, heldout, locality, neighborhood, recall, task_exact, verbatim
from engram_graft.probes.probe import Probe, Subject
from engram_graft.probes.task_exact import right
from engram_graft.probes.verdict import verdict
from engram_graft.probes.warnings import warnings

DIVERGED = (
    "The run diverged: {} figures are infinite or no number, and are left out here. Lower train.learning_rate, or keep "
    "train.max_grad_norm above 0."
)
PROBES: tuple[Probe, ...] = (
    recall.RECALL,
    recall.PARAPHRASE,
    task_exact.TASK_EXACT,
    efficacy.EFFICACY,
    neighborhood.NEIGHBORHOOD,
    heldout.TEXT,
    heldout.HELDOUT,
    verbatim.VERBATIM,
    locality.LOCALITY,
    health.HEALTH,
)


def pick_probes(names: Sequence[str] | None) -> Sequence[Probe]:
    """The probes of these names; None: all. Raises `UserError` for a name that none has."""
    if names is None:
        return PROBES
    known = {probe.name: probe for probe in PROBES}
    if unknown := [name for name in names if name not in known]:
        raise UserError(f"probe {unknown[0]!r}: there is none; the probes are {', '.join(known)}")
    return [known[name] for name in names]


def run_probes(
    subject: Subject, probes: Sequence[Probe] = PROBES, started: Callable[[str], None] = lambda name: None
) -> dict[str, Any]:
    """Probe a grafted model on its facts, chats or text and on neutral text.

    Args:
        started: called with each probe's name as it begins.

    Returns:
        {"arms": {arm: {probe: scores}}, "locality": the graft's, "known": how many trained prompts the base answers already,
        "seen_filter": bool, "by_forms": the graft's recall by number of trained wordings, "health", "examples": [{"prompt", "answer",
        "right", "base", "graft"}], "data": {"sha256", "trained", "teachers"}}. A part is absent where the data has nothing for it.
    """
    report: dict[str, Any] = {"arms": {arm: {} for arm in subject.arms}}
    find_graft(subject.model)
    for probe in probes:
        started(probe.name)
        for arm, scores in probe.run(subject).items():
            report["arms"][arm][probe.name] = scores
    arms = report["arms"]
    if found := arms["graft"].pop("health", None):
        report["health"] = found
    if "locality" in arms.get("graft", {}):
        report["locality"] = arms["graft"]["locality"]
    report["seen_filter"] = find_graft(subject.model).config.seen_filter
    if "recall" in arms["base"]:
        report["known"] = round(arms["base"]["recall"]["greedy_exact"] * arms["base"]["recall"]["n"])
    answered = {arm: {part: s[part].pop("right") for part in ("recall", "paraphrase") if part in s} for arm, s in arms.items()}
    if subject.facts and subject.trained and "recall" in answered.get("graft", {}):
        report["by_forms"] = recall.by_forms(subject.facts, answered["graft"]["recall"], answered["graft"].get("paraphrase", ()))
    answers = {arm: scores["task_exact"].pop("answers") for arm, scores in arms.items() if "task_exact" in scores}
    if answers:
        report["examples"] = _examples(subject.facts, answers["base"], answers["graft"])
    report["data"] = {
        "sha256": hashlib.sha256(json.dumps(_asked(subject)).encode()).hexdigest()[:16],
        "trained": subject.trained,
        "teachers": sum(fact.split == TEACHER for fact in subject.data.facts),
    }
    return report


def _finite(part: Any) -> int:
    """Put None for every infinite or undefined number in a report; how many there were."""
    count = 0
    for key, value in part.items() if isinstance(part, dict) else enumerate(part):
        if isinstance(value, dict | list):
            count += _finite(value)
        elif isinstance(value, float) and not math.isfinite(value):
            part[key], count = None, count + 1
    return count


def _asked(subject: Subject) -> list[Any]:
    """What the probes ask, whatever it was trained with."""
    facts = [
        (
            fact.prompts,
            fact.answer,
            fact.aliases,
            fact.paraphrases,
            [dict(entry) for entry in fact.neighborhood],
            fact.target_true,
        )
        for fact in subject.facts
    ]
    return [facts, subject.data.chats, *(None if blocks is None else blocks["input_ids"][:] for blocks in subject.blocks)]


def conclude(report: dict[str, Any]) -> None:
    """Add to a report, all arms of which are there, what it says in words: "verdict", a sentence, and "warnings".

    What is no number (of a run that diverged) becomes None.
    """
    lost = _finite(report)
    report["warnings"] = [DIVERGED.format(lost)] if lost else warnings(report)
    report["verdict"] = verdict(report)


def _examples(facts: Sequence[Fact], base: Sequence[str], grafted: Sequence[str]) -> list[dict[str, Any]]:
    rows = zip(facts, base, grafted, strict=True)
    return [{"prompt": f.prompts[0], "answer": f.answer, "right": right(f, g), "base": b, "graft": g} for f, b, g in rows]
