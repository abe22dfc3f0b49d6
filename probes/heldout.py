"""Loss on text: what was trained on, and what was held out of it.

Each block is read on its own, as in training; its first token has nothing before it and is not scored.
"""

import math

from datasets import Dataset
from torch.nn import functional as F

from engram_graft.probes.probe import Probe, Scores, Subject

TOKENS = 4096  # of either part that are scored


def text_loss(subject: Subject, blocks: Dataset | None) -> dict[str, Scores]:
    """For each arm: {"ce": nats a token, "perplexity", "bits_per_byte", "n": tokens}, over the first `TOKENS` of `blocks`."""
    if blocks is None:
        return {}
    texts = blocks.select(range(min(max(1, TOKENS // subject.training.block_size), len(blocks)))).with_format("torch")[
        "input_ids"
    ]
    n = sum(len(ids) - 1 for ids in texts)
    size = sum(len(subject.tokenizer.decode(ids[1:]).encode()) for ids in texts)
    report = {}
    for arm in subject.each_arm():
        total = 0.0
        for ids in texts:
            logits = subject.logits(ids[None])[0, :-1].float()
            total += float(F.cross_entropy(logits, ids[1:].to(logits.device), reduction="sum"))
        report[arm] = {
            "ce": total / n,
            "perplexity": math.exp(min(total / n, 700)),
            "bits_per_byte": total / math.log(2) / size,
            "n": n,
        }
    return report


TEXT = Probe("text", "loss on the text that was trained on, by arm", lambda subject: text_loss(subject, subject.blocks[0]))
HELDOUT = Probe(
    "heldout",
    "loss, perplexity and bits per byte on text that was held out",
    lambda subject: text_loss(subject, subject.blocks[1]),
)
