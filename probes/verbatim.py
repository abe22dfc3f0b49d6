"""Verbatim: how much of a text the model continues word for word, of spans that were trained and of spans that were held out.

A span is 48 tokens of one document; the model reads the first 32 and decodes 16 greedily. A span was visited when every memory knows
every n-gram inside it, so that no record of the training has to be kept. The held-out spans say what a model that has not read them
would continue right. The measure is extraction's (Carlini et al., arXiv 2202.07646), with shorter spans.
"""

import torch
from datasets import Dataset
from torch import nn

from engram_graft.encode import spread
from engram_graft.probes.locality import known_ngrams
from engram_graft.probes.probe import Probe, Scores, Subject
from engram_graft.scoring import greedy

PREFIX, TARGET = 32, 16
SPANS = 64  # of either part, at most
SEARCHED = 1024  # blocks that spans are cut from, at most


def _spans(subject: Subject, blocks: Dataset | None) -> list[list[int]]:
    """Token ids of spans, side by side in their blocks; a block or a document that is shorter has none."""
    if blocks is None:
        return []
    length, end = PREFIX + TARGET, subject.tokenizer.eos_token_id
    texts = blocks.select(spread(len(blocks), SEARCHED))["input_ids"]
    spans = [ids[start : start + length] for ids in texts for start in range(0, len(ids) - length + 1, length)]
    return [span for span in spans if end not in span]


def visited(model: nn.Module, spans: list[list[int]]) -> list[list[int]]:
    """Those of the spans of which every memory knows every whole n-gram."""
    found: list[list[int]] = []
    for start in range(0, len(spans), SPANS):
        some = spans[start : start + SPANS]
        known, whole = known_ngrams(model, torch.tensor(some))
        found += [
            span for span, all_known in zip(some, (known | ~whole).all(-1).all(-1).all(0).tolist(), strict=True) if all_known
        ]
    return found


def _continued(subject: Subject, spans: list[list[int]]) -> Scores:
    said = greedy(subject.model, subject.tokenizer, [span[:PREFIX] for span in spans], TARGET, subject.options.batch_size)
    right = [sum(a == b for a, b in zip(ids, span[PREFIX:], strict=False)) for ids, span in zip(said, spans, strict=True)]
    n = len(spans)
    return {"token": sum(right) / (TARGET * n), "span": right.count(TARGET) / n, "n": n}


def _of(subject: Subject) -> dict[str, Scores]:
    """For each arm {"visited": {"token", "span", "n"}, "held_out": {same}}: shares of tokens, and of spans as a whole."""
    trained, held_out = subject.blocks
    parts = {
        "visited": visited(subject.reference or subject.model, _spans(subject, trained)),
        "held_out": _spans(subject, held_out),
    }
    chosen = {part: [spans[n] for n in spread(len(spans), SPANS)] for part, spans in parts.items() if spans}
    if not chosen:
        return {}
    return {arm: {part: _continued(subject, spans) for part, spans in chosen.items()} for arm in subject.each_arm()}


VERBATIM = Probe("verbatim", "how much of trained and of held-out text is continued word for word", _of)
