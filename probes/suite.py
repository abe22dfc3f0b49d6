"""All probes over all arms, as the dictionary that becomes probes.json."""

from collections.abc import Callable, Sequence
from typing import Any

from engram_graft.data import Fact
from engram_graft.grafted import find_graft
from engram_graft.probes import heldout, locality, recall, task_exact
from engram_graft.probes.probe import Probe, Subject

PROBES: tuple[Probe, ...] = (
    recall.RECALL,
    recall.PARAPHRASE,
    task_exact.TASK_EXACT,
    heldout.TEXT,
    heldout.HELDOUT,
    locality.LOCALITY,
)


def run_probes(
    subject: Subject, probes: Sequence[Probe] = PROBES, started: Callable[[str], None] = lambda name: None
) -> dict[str, Any]:
    """Probe a grafted model on its facts, chats or text and on neutral text.

    Args:
        started: called with each probe's name as it begins.

    Returns:
        {"arms": {arm: {probe: scores}}, "locality": the graft's, "known": how many trained prompts the base answers already,
        "seen_filter": bool, "examples": [{"prompt", "answer", "base", "graft"}]}. A part is absent where the data has nothing for it.
    """
    report: dict[str, Any] = {"arms": {arm: {} for arm in subject.arms}}
    find_graft(subject.model)
    for probe in probes:
        started(probe.name)
        for arm, scores in probe.run(subject).items():
            report["arms"][arm][probe.name] = scores
    arms = report["arms"]
    if "locality" in arms.get("graft", {}):
        report["locality"] = arms["graft"]["locality"]
    report["seen_filter"] = find_graft(subject.model).config.seen_filter
    if "recall" in arms["base"]:
        report["known"] = round(arms["base"]["recall"]["greedy_exact"] * arms["base"]["recall"]["n"])
    answers = {arm: scores["task_exact"].pop("answers") for arm, scores in arms.items() if "task_exact" in scores}
    if answers:
        report["examples"] = _examples(subject.facts, answers["base"], answers["graft"])
    return report


def _examples(facts: Sequence[Fact], base: Sequence[str], grafted: Sequence[str]) -> list[dict[str, str]]:
    rows = zip(facts, base, grafted, strict=True)
    return [{"prompt": f.prompts[0], "answer": f.answer, "base": b, "graft": g} for f, b, g in rows]
