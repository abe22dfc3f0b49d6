"""Loss on text: what was trained on, and what was held out of it.

Each block is read on its own, as in training; its first token has nothing before it and is not scored.
"""

import math

import torch
from datasets import Dataset
from torch.nn import functional as F

from engram_graft.encode import spread
from engram_graft.probes.probe import Probe, Scores, Subject

TOKENS = 4096  # of either part that are scored


def text_loss(subject: Subject, blocks: Dataset | None) -> dict[str, Scores]:
    """For each arm: {"ce", "perplexity", "bits_per_byte", "n"}, over some `TOKENS` tokens of `blocks`, whole blocks evenly spread.

    `ce` is in nats a token and `perplexity` its exponential, over all `n` tokens, the ends of documents too. `bits_per_byte` is the loss
    of the text alone, without special tokens, over its bytes in UTF-8, so that bases of different tokenizers can be compared; a
    character that is cut by a block's start or end counts as the three bytes of U+FFFD.
    """
    if blocks is None:
        return {}
    chosen = spread(len(blocks), max(1, TOKENS // subject.training.block_size))
    texts = [torch.tensor(ids) for ids in blocks.select(chosen)["input_ids"]]
    n = sum(len(ids) - 1 for ids in texts)
    special = torch.tensor(subject.tokenizer.all_special_ids)
    size = sum(_bytes(subject, ids.tolist()) - _bytes(subject, ids[:1].tolist()) for ids in texts)
    report = {}
    for arm in subject.each_arm():
        total = of_text = 0.0
        for ids in texts:
            logits = subject.logits(ids[None])[0, :-1].float()
            losses = F.cross_entropy(logits, ids[1:].to(logits.device), reduction="none").double().cpu()
            total += float(losses.sum())
            of_text += float(losses[~torch.isin(ids[1:], special)].sum())
        report[arm] = {
            "ce": total / n,
            "perplexity": math.exp(min(total / n, 700)),
            "bits_per_byte": of_text / math.log(2) / size if size else None,
            "n": n,
        }
    return report


def _bytes(subject: Subject, ids: list[int]) -> int:
    text = subject.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return len(str(text).encode())


TEXT = Probe("text", "loss on the text that was trained on, by arm", lambda subject: text_loss(subject, subject.blocks[0]))
HELDOUT = Probe(
    "heldout",
    "loss, perplexity and bits per byte on text that was held out",
    lambda subject: text_loss(subject, subject.blocks[1]),
)
