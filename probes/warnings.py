"""Known pathologies of a memory, found in a report and named in words: the number, what it means, what to do.

Gates that favour frequent n-grams: arXiv 2601.16531. Thresholds are such that a healthy run, e.g. recipes/smollm2-facts-memory-only.yaml,
gets no warning.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

SHUT, OPEN = 0.05, 0.95
MOST = 0.9  # of the gates, or of a gain
LEAST_GAIN = {"recall": 0.02, "text": 0.01}  # share of exact answers; nats a token
FALSE_POSITIVES = 0.01  # of the seen filter
HOT_GAP = 0.3  # between the gates at hot and at cold n-grams
LOW_AUC = 0.4  # of gate and gain
DRIFT = 0.1  # nats a token of neutral text


def warnings(report: Mapping[str, Any]) -> list[str]:
    """Sentences about what is wrong in a report (probes.json); parts that it does not have are passed over."""
    arms = report.get("arms", {})
    trained = report.get("data", {}).get("trained", True)
    found = [*(_benefit(arms) if trained else ()), *_damage(report, arms)]
    recall = arms.get("base", {}).get("recall")
    if recall and report.get("known", 0) > recall["n"] / 2:
        found.append(
            f"The base already answers {report['known']} of {recall['n']} prompts: their recall says nothing of the memory. "
            "Judge by the others (recall: new), or take facts that the base does not know."
        )
    layers = report.get("health", {}).get("layers")
    if layers is not None and not layers:
        found.append(
            "No memory knows an n-gram of the training data: nothing was learned from it. Check that the graft is the trained one."
        )
    for name, layer in (layers or {}).items():
        found += [f"Layer {name}: {sentence}" for sentence in (*_gates(layer), *_addend(layer), *_crowding(layer))]
    return found


def _benefit(arms: Mapping[str, Any]) -> Iterator[str]:
    """What graft gains over memory_off, and whose gain it is."""
    probe = next((name for name in LEAST_GAIN if name in arms.get("graft", {})), None)
    if probe is None:
        return
    score = {
        arm: scores["recall"]["greedy_exact"] if probe == "recall" else -scores["text"]["ce"]
        for arm, scores in arms.items()
        if probe in scores
    }

    def shown(arm: str) -> str:
        return f"recall {score[arm]:.1%}" if probe == "recall" else f"loss {-score[arm]:.3f}"

    graft, base, off = score["graft"], score["base"], score.get("memory_off", score["base"])
    if probe == "recall" and base >= 1 - LEAST_GAIN[probe]:
        return  # there is nothing to gain
    gain = graft - off
    each = score.get("lora_off", base) - base >= MOST * (graft - base)  # the memory could do it as well
    if graft - base >= LEAST_GAIN[probe] and off - base > MOST * (graft - base) and not each:
        yield (
            f"LoRA did it alone: {shown('memory_off')} without the memory, {shown('graft')} with it, {shown('base')} for the base. "
            "Lower lora.learning_rate, or train the memory alone with lora.rank=0."
        )
    elif gain < LEAST_GAIN[probe] and not each:
        yield (
            f"The memory is not used: {shown('graft')} with it, {shown('memory_off')} without. Train longer, or raise "
            "train.learning_rate; the gates say whether it is shut out."
        )
    elif "shuffled" in score and score["shuffled"] - off > gain / 2:
        yield (
            f"Addresses hardly matter: with rows read at wrong addresses it is {shown('shuffled')}, with the right ones {shown('graft')}, "
            f"without memory {shown('memory_off')}. What was learned sits in the shared projections, not in the rows: raise "
            "train.table_rate_multiplier or lower train.learning_rate."
        )


def _damage(report: Mapping[str, Any], arms: Mapping[str, Any]) -> Iterator[str]:
    """What the graft changed where it should not."""
    kl = report.get("locality", {}).get("kl")
    if kl is not None and kl > DRIFT:
        off = arms.get("memory_off", {}).get("locality", {}).get("kl")
        lora = off is not None and off > kl / 2
        yield (
            f"The graft drifts on neutral text: KL {kl:.3f} nats a token from the base"
            + (f", {off:.3f} with the memory off. Lower lora.learning_rate." if lora else ". ")
            + ("" if lora else "Keep engram.seen_filter on, lower train.learning_rate or train fewer steps.")
        )
    graft, base = arms.get("graft", {}), arms.get("base", {})
    if "heldout" in graft and "text" in graft:
        fell, rose = base["text"]["ce"] - graft["text"]["ce"], graft["heldout"]["ce"] - base["heldout"]["ce"]
        if fell > 0 and rose > LEAST_GAIN["text"]:
            yield (
                f"Overfit: loss on held-out text rose by {rose:.3f} nats a token over the base's while that on trained text fell by "
                f"{fell:.3f}. Train fewer steps, take more text, or set engram.ngram_dropout."
            )


def _gates(layer: Mapping[str, Any]) -> Iterator[str]:
    gate, hot, cold, auc = layer["gate"], layer["hot"], layer["cold"], layer["utility_auc"]
    if gate["mean"] < SHUT or gate["below_05"] > MOST:
        yield (
            f"the gate has shut: mean {gate['mean']:.3f}, {gate['below_05']:.0%} of gates below {SHUT}. The memory is kept out of the "
            "stream and learns no more. Lower train.learning_rate, or give the memory another layer."
        )
    if gate["above_95"] > MOST:
        yield (
            f"the gate is stuck open: {gate['above_95']:.0%} of gates above {OPEN}. It no longer chooses by context. Lower "
            "train.learning_rate or train fewer steps."
        )
    n = hot["n"] + cold["n"]
    # three standard errors of an area that means nothing: few positions give any
    low = auc is not None and auc < min(LOW_AUC, 0.5 - 3 / math.sqrt(3 * max(n, 1)))
    gains = [side["base_ce"] - side["ce"] if side["n"] else -math.inf for side in (hot, cold)]
    bias = hot["n"] and 0 < gains[1] >= gains[0] and hot["gate"] - cold["gate"] > HOT_GAP
    evidence = [f"it is higher where the graft helps less (area {auc:.2f}, chance is 0.50)"] if low else []
    if bias:
        evidence.append(
            f"it is {hot['gate']:.2f} at frequent n-grams and {cold['gate']:.2f} at rare ones, though the graft lowers the loss by "
            f"{gains[0]:.2f} and {gains[1]:.2f} nats there"
        )
    if evidence:
        yield (f"hot bias of the gate: {'; '.join(evidence)}. Train longer, or raise train.table_rate_multiplier.")


def _addend(layer: Mapping[str, Any]) -> Iterator[str]:
    residual = layer["residual"]
    if residual["total"] > 1:
        yield (
            f"the memory drowns the stream: what it adds is {residual['total']:.1f} times the residual stream (rms). Lower "
            "train.learning_rate, or set train.max_grad_norm."
        )
    if residual["conv"] > 10 * residual["direct"]:
        yield (
            f"the convolution speaks in place of the values: {residual['conv']:.3f} against {residual['direct']:.3f} of the residual "
            "stream (rms). Set engram.conv=false, or lower train.learning_rate."
        )


def _crowding(layer: Mapping[str, Any]) -> Iterator[str]:
    """An unknown n-gram passes the seen filter when the rows of all heads of its order happen to be taken."""
    passing: dict[int, float] = {}
    for head in layer["heads"]:
        passing[head["order"]] = passing.get(head["order"], 1.0) * head["coverage"]
    for order, share in passing.items():
        if share > FALSE_POSITIVES:
            yield (
                f"the table is crowded: {share:.1%} of unknown {order}-grams pass for learned ones. Raise engram.engram_vocab_size or "
                "engram.n_head_per_ngram."
            )
