"""The verdict: what a report shows, in one sentence with its numbers.

A gain counts as nothing below 2 % of the prompts, or 0.01 nats a token. A part that keeps nine tenths of the gain holds it by itself;
one that adds less than a tenth adds nothing.
"""

from collections.abc import Callable, Mapping
from typing import Any

from engram_graft.probes.labels import arm_label, at, nats, small

SMALL_SHARE, SMALL_CE, MUCH_KL = 0.02, 0.01, 0.1
PARTS = ("base", "graft", "memory_off", "shuffled", "lora_off")


def verdict(report: Mapping[str, Any]) -> str:
    """Who holds what was trained: the memory, LoRA, both or neither; how far neutral text and related prompts moved.

    Args:
        report: as in probes.json. Facts and chats are judged by greedy recall of the trained prompts, else text by its loss, held-out
            where there is some.
    """
    graft = report["arms"].get("graft", {})
    if "recall" in graft:
        head, clauses, controls = _recall(report)
    elif "heldout" in graft or "text" in graft:
        head, clauses, controls = _loss(report)
    else:
        head, clauses, controls = "No probe of this report asked what was learnt", [], ""
    if moved := _moved(report):
        clauses.append(f"and {moved}" if clauses else moved)
    if near := at(report["arms"], "graft.neighborhood"):
        kept = round(near["same_answer"] * near["n"])
        clauses.append(
            f"while {'all' if kept == near['n'] else kept or 'none'} of {near['n']:,} related prompts keep the base's answer"
        )
    return head + (f"; {', '.join(clauses)}" if clauses else "") + controls + "."


def _values(report: Mapping[str, Any], path: str) -> dict[str, float]:
    found = {arm: at(scores, path) for arm, scores in report["arms"].items()}
    return {arm: value for arm, value in found.items() if value is not None}


def _recall(report: Mapping[str, Any]) -> tuple[str, list[str], str]:
    graft, n = report["arms"]["graft"], report["arms"]["graft"]["recall"]["n"]
    know = {arm: round(share * n) for arm, share in _values(report, "recall.greedy_exact").items()}
    trained = report.get("data", {}).get("trained", True)
    facts = at(graft, "task_exact.n") == n  # one prompt a fact, so a prompt is a fact
    of, verb = f"of {n:,} {'facts' if facts else 'trained prompts' if trained else 'prompts'}", "holds" if facts else "answers"
    base, all_, off, shuffled, alone = (know.get(arm) for arm in PARTS)
    assert all_ is not None
    said = lambda count: "none" if count == 0 else "all" if count == n else f"{count:,}"  # noqa: E731
    without = [] if off is None else [f"without it the model knows {said(off)}{' of them' if off == 0 else ''}"]
    controls = _controls(know, said, lambda count: count >= all_ - SMALL_SHARE * n)
    if base is None:
        return f"The graft {verb} {all_:,} {of}", without, controls
    if base >= (1 - SMALL_SHARE) * n:
        head = f"The base already answers {base:,} {of}, so that this data cannot show what was learnt"
        return head, [f"the graft knows {said(all_)}"], controls
    gain = all_ - base
    if gain <= SMALL_SHARE * n:
        nothing = "Nothing was learnt" if -gain <= SMALL_SHARE * n else "The graft does harm"
        if not trained and nothing == "Nothing was learnt":
            nothing = "This data was not trained on, and the graft answers it as the base does"
        alone_too = [f"the memory by itself knows {said(alone)}"] if alone is not None and alone > all_ else []
        return f"{nothing}: it knows {all_:,} {of} and the base {said(base)}", alone_too, controls
    before = [f"the base knew {base:,} already"] if base else []
    if (new := graft["recall"].get("new")) and base:
        before = [f"of the {new['n']:,} that the base did not know the graft knows {round(new['greedy_exact'] * new['n']):,}"]
    by_itself = all_ if alone is None else alone
    holds = by_itself - base >= 0.9 * gain
    if off is not None and all_ - off < 0.1 * gain:
        if alone is not None and holds:
            head = f"The memory and LoRA each hold what was learnt: together {all_:,} {of}, the memory alone {said(alone)}"
            return head, [f"LoRA alone {said(off)}", *before], controls
        head = f"The memory is not used: with it the model knows {all_:,} {of}, without it {said(off)}"
        lora = [] if alone is None else ["LoRA does it all", f"the memory by itself knows {said(alone)}"]
        return head, [*lora, *before], controls
    if shuffled is not None:
        still, so = "", ""
        if shuffled - (off or 0) >= 0.5 * (all_ - (off or 0)):
            still, so = "it still knows ", ", so that it is not the addressed rows that answer"
        without.append(f"with shuffled addresses {still}{said(shuffled)}{so}")
    if holds:
        with_lora = "" if alone is None or alone == all_ else f" ({all_:,} with LoRA)"
        count = f"all {of.removeprefix('of ')}" if by_itself == n > 1 else f"{by_itself:,} {of}"
        return f"The memory {verb} {count} by itself{with_lora}", [*without, *before], controls
    how = "need each other" if by_itself - base < 0.1 * gain and off is not None and off - base < 0.1 * gain else "share the work"
    head = f"The memory and LoRA {how}: together they know {all_:,} {of}, the memory alone {said(by_itself)}"
    return head, [*without, *before], controls


def _loss(report: Mapping[str, Any]) -> tuple[str, list[str], str]:
    part = "heldout" if "heldout" in report["arms"]["graft"] else "text"
    loss = _values(report, f"{part}.ce")
    on = "On held-out text" if part == "heldout" else "On the trained text (none was held out)"
    base, all_, off, shuffled, alone = (loss.get(arm) for arm in PARTS)
    assert all_ is not None
    controls = _controls(loss, nats, lambda ce: ce <= all_ + SMALL_CE, best=min)
    without = [] if off is None or off == base else [f"without the memory it is {nats(off)}"]
    without += [] if alone is None else [f"by the memory alone {nats(alone)}"]
    if base is None:
        return f"{on} the graft's loss is {nats(all_)} nats a token", without, controls
    if base - all_ <= SMALL_CE:
        nothing = "nothing was learnt" if all_ - base <= SMALL_CE else "the graft does harm"
        trained = _values(report, "text.ce") if part == "heldout" else {}
        fell = [f"on the trained text it fell from {nats(trained['base'])} to {nats(trained['graft'])}"] if trained else []
        return f"{on} {nothing}: the loss is {nats(all_)} nats a token and the base's {nats(base)}", [*fell, *without], controls
    fell_to = f"{on} the loss falls from {nats(base)} to {nats(all_)} nats a token"
    if off is not None and off - all_ <= SMALL_CE:
        each = alone is not None and base - alone >= 0.9 * (base - all_)
        return f"{fell_to}, {'by the memory or LoRA alike' if each else 'but not by the memory'}", without, controls
    if shuffled is not None:
        kept = off is not None and off - shuffled >= 0.5 * (off - all_)
        still = ", so that it is not the addressed rows that help" if kept else ""
        without.append(f"with shuffled addresses {nats(shuffled)}{still}")
    return fell_to + (", all by the memory" if alone is None else ""), without, controls


def _controls(
    values: Mapping[str, Any], said: Callable[[Any], str], match: Callable[[Any], bool], best: Callable[..., Any] = max
) -> str:
    names = [name for name in values if name not in (*PARTS, "gate_open")]
    names.sort(key=lambda name: values[name], reverse=best is max)
    told = [
        f"{arm_label(name)} {said(values[name])}{' (as good as the graft or better)' if match(values[name]) else ''}"
        for name in names
    ]
    return f"; controls: {', '.join(told)}" if told else ""


def _moved(report: Mapping[str, Any]) -> str:
    scores = report.get("locality") or at(report["arms"], "graft.locality") or {}
    if scores.get("unchanged_positions") == 1:
        return "on neutral text not one logit changed"
    if scores.get("kl") is None:
        return ""
    much = "as much as " if scores["kl"] >= MUCH_KL else ""
    return f"on neutral text the graft moved the base by {much}{small(max(scores['kl'], 0.0))} nats a token"
