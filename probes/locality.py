"""Locality: what the graft changed where it should have changed nothing, on neutral text.

KL(base || arm) in nats a token, the share of positions whose most likely next token is another, and the share whose logits are the
base's bit for bit. Each at positions where a learned n-gram was looked up (hit) and elsewhere (miss) apart: a position after a hit is a
miss, and may still have changed through attention and convolution. Before the first hit a filtered memory alone changes nothing.
"""

from collections.abc import Mapping
from importlib.resources import files
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from engram_graft.grafted import find_graft, memories
from engram_graft.locate import unwrap
from engram_graft.modes import no_learning
from engram_graft.probes.arms import Arm
from engram_graft.probes.probe import Probe
from engram_graft.scoring import kl
from engram_graft.window import Window

WINDOW = 128  # tokens a text is cut into


def neutral_text() -> str:
    """The bundled text: everyday English that no fact is about."""
    return files("engram_graft.probes").joinpath("neutral.txt").read_text(encoding="utf-8")


def known_ngrams(model: nn.Module, input_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Which n-grams of the unpadded texts `input_ids` `[B, T]` were learned.

    Returns:
        Those that each memory knows, bool `[layers, B, T, orders]`, and those that lie inside the text, bool `[1, T, orders]`.
    """
    ngram_hash = find_graft(model)
    input_ids = input_ids.to(unwrap(model).device)
    window = Window(0, input_ids.shape[1])
    rows = ngram_hash(ngram_hash.lookup[input_ids], window)
    known = torch.stack([m.table.known(rows[:, :, m.index]).cpu() for m in memories(model)])
    whole = window.whole(ngram_hash.config.orders, known.device)
    assert whole is not None, "a text without a past has n-grams that begin before it"
    return known, whole


def hits(model: nn.Module, input_ids: Tensor) -> Tensor:
    """bool `[B, T]`: positions where some memory looks up a learned n-gram of the unpadded texts `input_ids`."""
    known, whole = known_ngrams(model, input_ids)
    if find_graft(model).config.whole_ngrams:
        known = known & whole
    return known.any(-1).any(0)  # over orders, over layers


def locality(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    arms: Mapping[str, Arm],
    text: str | None = None,
    reference: nn.Module | None = None,
) -> dict[str, dict[str, Any]]:
    """What each arm changed, as means over positions; a mean over none is None.

    Args:
        arms: "base" among them.
        text: what is read; None: the neutral text.
        reference: the graft whose n-grams tell hit from miss; None: the model's own.

    Returns:
        For each arm: {"kl", "changed_argmax", "unchanged_positions", "hits", "n"}, the first three at hits and elsewhere apart as
        {"kl_hit", "kl_miss", "changed_argmax_hit", "changed_argmax_miss", "unchanged_hit", "unchanged_miss"}, and "unchanged_before_hit",
        over positions before the first hit of their window of `WINDOW` tokens.
    """
    ids = tokenizer(neutral_text() if text is None else text, add_special_tokens=False, verbose=False)["input_ids"]
    measured: dict[str, list[Tensor]] = {name: [] for name in arms}
    hit, before = [], []
    for start in range(0, len(ids), WINDOW):
        window = torch.tensor([ids[start : start + WINDOW]])
        hit.append(hits(reference or model, window)[0])
        before.append(hit[-1].cumsum(0) == 0)
        window = window.to(unwrap(model).device)
        with no_learning(model):
            with arms["base"](model):
                base = model(input_ids=window).logits[0]
            for name, arm in arms.items():
                logits = base
                if name != "base":
                    with arm(model):
                        logits = model(input_ids=window).logits[0]
                changed = logits.argmax(-1) != base.argmax(-1), (logits == base).all(-1)
                measured[name].append(torch.stack([kl(base, logits), *changed]).double().cpu())
    at_hit, before_hit = torch.cat(hit), torch.cat(before)
    report = {}
    for name in arms:
        values, argmax, same = torch.cat(measured[name], 1)
        report[name] = {
            "kl": _mean(values),
            "kl_hit": _mean(values[at_hit]),
            "kl_miss": _mean(values[~at_hit]),
            "changed_argmax": _mean(argmax),
            "changed_argmax_hit": _mean(argmax[at_hit]),
            "changed_argmax_miss": _mean(argmax[~at_hit]),
            "unchanged_positions": _mean(same),
            "unchanged_hit": _mean(same[at_hit]),
            "unchanged_miss": _mean(same[~at_hit]),
            "unchanged_before_hit": _mean(same[before_hit]),
            "hits": _mean(at_hit.double()),
            "n": len(values),
        }
    return report


def _mean(values: Tensor) -> float | None:
    return float(values.mean()) if len(values) else None


LOCALITY = Probe(
    "locality",
    "what changed on neutral text, at learned n-grams and elsewhere apart",
    lambda subject: locality(subject.model, subject.tokenizer, subject.arms, reference=subject.reference),
)
