"""Neighborhood: what the model says to prompts near a fact that must stay as they were (the facts' `neighborhood`)."""

from collections.abc import Sequence

from engram_graft.encode import encode_answer
from engram_graft.probes.probe import Probe, Scores, Subject
from engram_graft.probes.recall import LONGEST
from engram_graft.scoring import greedy, kl, next_token_logits


def _of(subject: Subject) -> dict[str, Scores]:
    """For each arm: {"kl", "same_answer", "n"} over the prompts of all neighborhoods.

    `kl` is KL(base || arm) of the token after the prompt, in nats. `same_answer` is the share whose greedy answer is the base's, whether
    that is right or not, over as many tokens as the entry's own answer has (`LONGEST` at most) and two more.
    """
    entries = [(entry["prompt"], entry["answer"]) for fact in subject.facts for entry in fact.neighborhood]
    if not entries:
        return {}
    prompts = [prompt for prompt, _ in entries]
    lengths = [min(len(encode_answer(subject.tokenizer, *entry)[1]), LONGEST) + 2 for entry in entries]
    said = {}
    for arm in subject.each_arm():
        ids = greedy(subject.model, subject.tokenizer, prompts, max(lengths), subject.options.batch_size)
        said[arm] = [answer[:length] for answer, length in zip(ids, lengths, strict=True)]
    moved = _mean_kl(subject, prompts)
    return {
        arm: {
            "kl": moved[arm],
            "same_answer": sum(a == b for a, b in zip(said[arm], said["base"], strict=True)) / len(entries),
            "n": len(entries),
        }
        for arm in said
    }


def _mean_kl(subject: Subject, prompts: Sequence[str]) -> dict[str, float]:
    """All arms batch by batch, so that one batch's logits are kept, not all."""
    total = dict.fromkeys(subject.arms, 0.0)
    for start in range(0, len(prompts), subject.options.batch_size):
        batch = prompts[start : start + subject.options.batch_size]
        with subject.arms["base"](subject.model):
            base = next_token_logits(subject.model, subject.tokenizer, batch)
        for arm in subject.each_arm():
            logits = base if arm == "base" else next_token_logits(subject.model, subject.tokenizer, batch)
            total[arm] += float(kl(base, logits).double().sum())
    return {arm: value / len(prompts) for arm, value in total.items()}


NEIGHBORHOOD = Probe("neighborhood", "answers near the facts that must stay the base's", _of)
