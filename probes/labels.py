"""The words and numbers of a report: what its arms and scores are called and mean, and how a figure is written."""

from collections.abc import Mapping
from typing import Any

ARM_LABELS = {
    "base": "base",
    "graft": "graft",
    "memory_off": "memory off",
    "shuffled": "shuffled addresses",
    "gate_open": "gate open",
    "lora_off": "LoRA off",
    "lora_only": "LoRA only",
    "one_row": "one row",
    "random_rows": "random rows",
    "knn_lm": "kNN-LM",
}
ARM_MEANINGS = {
    "base": "the model before the graft",
    "graft": "the model with all that was trained",
    "memory_off": "the graft without its memory; LoRA stays",
    "shuffled": "the same memory, every seen row read at another row's address",
    "gate_open": "the same memory, every gate held at 1",
    "lora_off": "the graft without LoRA: the memory by itself",
}
DEFINITIONS = (  # path in an arm's scores, what it is called, how it is asked, what it is
    (
        "recall.greedy_exact",
        "trained wordings, greedy",
        "greedy",
        "the model's own answer to a trained prompt is the true one, then an end or a new word",
    ),
    ("paraphrase.greedy_exact", "unseen wordings, greedy", "greedy", "the same for wordings that the fact was not trained in"),
    ("recall.new.greedy_exact", "new", "greedy", "trained prompts, only those that the base did not answer"),
    (
        "task_exact.exact_match",
        "free answers",
        "greedy",
        "the whole answer, up to the first line end, full stop or comma, is the true one or an alias",
    ),
    (
        "recall.teacher_forced_exact",
        "forced",
        "teacher-forced",
        "each token of the answer is the likeliest one after the true tokens before it",
    ),
    ("recall.answer_ce", "answer CE", "teacher-forced", "mean nats a token of the true answer"),
    ("recall.first_token_rank", "rank", "teacher-forced", "median rank of the answer's first token; 1 is the top"),
    ("text.ce", "trained text", "teacher-forced", "mean nats a token on text that was trained on"),
    ("heldout.ce", "held-out text", "teacher-forced", "mean nats a token on text that was not trained on"),
    ("heldout.bits_per_byte", "bits a byte", "teacher-forced", "loss over the text's bytes: comparable between tokenizers"),
    (
        "verbatim",
        "verbatim",
        "greedy",
        "a text goes on as it was written, 16 tokens after the first 32: share of tokens, of whole spans",
    ),
    ("efficacy.efficacy", "efficacy", "teacher-forced", "the new answer is likelier than the one that was true before"),
    ("efficacy.paraphrase", "paraphrase", "teacher-forced", "the same in wordings that the fact was not trained in"),
    (
        "efficacy.neighborhood",
        "neighbourhood",
        "teacher-forced",
        "to a related prompt the true answer is likelier than the new one",
    ),
    ("efficacy.score", "score", "teacher-forced", "harmonic mean of efficacy, paraphrase and neighbourhood"),
    ("neighborhood.same_answer", "same answer", "greedy", "to related prompts that were not trained, the answer is the base's"),
    ("locality.kl", "KL", "teacher-forced", "from the base's next-token distribution to the arm's on neutral text, nats a token"),
    ("locality.kl_hit", "at hits, elsewhere", "teacher-forced", "where a learned n-gram was looked up, and where not"),
    (
        "locality.changed_argmax",
        "other top token",
        "teacher-forced",
        "share of positions whose likeliest token is not the base's",
    ),
    ("locality.unchanged_positions", "unchanged", "teacher-forced", "share of positions whose logits are the base's bit for bit"),
)


def at(scores: Mapping[str, Any], path: str) -> Any:
    """The value at "recall.greedy_exact"; None where there is none."""
    value: Any = scores
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def percent(share: float) -> str:
    """ "99.7 %", with as many digits as it takes not to say 0 or 100 of what is neither."""
    if share in (0, 1):
        return f"{share:.0%}"[:-1] + "\u00a0%"
    digits = next((n for n in range(1, 5) if 0 < float(f"{100 * share:.{n}f}") < 100), 1)
    return f"{100 * share:.{digits}f}\u00a0%"


def bare_percent(share: float) -> str:
    """The same without the sign, for an axis that has it."""
    return percent(share).removesuffix("\u00a0%")


def nats(value: float) -> str:
    """A loss: "2.633"."""
    return f"{value:.3f}"


def small(value: float) -> str:
    """A divergence to two digits without exponent: "0.0007"; "0" is exactly that."""
    if 0 < abs(value) < 1e-5:
        return "<\u00a00.00001"
    return f"{value:.{max(2, 1 - _exponent(value))}f}" if value else "0"


def _exponent(value: float) -> int:
    return int(f"{value:e}".partition("e")[2]) if abs(value) < float("inf") else 0


def number(value: float) -> str:
    """A count with separators, or a measure to three digits."""
    return f"{value:,}" if isinstance(value, int) else f"{value:,.0f}" if value == round(value) else f"{value:,.2f}"


def arm_label(arm: str) -> str:
    """An arm's name in words."""
    return ARM_LABELS.get(arm, arm.replace("_", " "))
