"""Locality: what the graft changed where it should have changed nothing, on neutral text.

KL(base || arm) in nats a token, at positions where a learned n-gram was looked up (hit) and elsewhere (miss) apart, and the share of
positions whose logits are the base's bit for bit.
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
from engram_graft.window import Window

WINDOW = 128  # tokens a text is cut into


def neutral_text() -> str:
    """The bundled text: everyday English that no fact is about."""
    return files("engram_graft.probes").joinpath("neutral.txt").read_text(encoding="utf-8")


def hits(model: nn.Module, input_ids: Tensor) -> Tensor:
    """bool `[B, T]`: positions where some memory knows an n-gram of the unpadded texts `input_ids`."""
    ngram_hash = find_graft(model)
    window = Window(0, input_ids.shape[1])
    rows = ngram_hash(ngram_hash.lookup[input_ids], window)
    known = torch.stack([m.table.known(rows[:, :, m.index]) for m in memories(model)])
    if ngram_hash.config.whole_ngrams and (whole := window.whole(ngram_hash.config.orders, input_ids.device)) is not None:
        known = known & whole
    return known.any(-1).any(0)  # over orders, over layers


def locality(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, arms: Mapping[str, Arm], text: str | None = None
) -> dict[str, dict[str, Any]]:
    """For each arm: {"kl", "kl_hit", "kl_miss", "unchanged_positions", "hits", "n"}; a KL over no positions is None."""
    ids = tokenizer(neutral_text() if text is None else text, add_special_tokens=False, verbose=False)["input_ids"]
    windows = [torch.tensor([ids[start : start + WINDOW]]) for start in range(0, len(ids), WINDOW)]
    kl: dict[str, list[Tensor]] = {name: [] for name in arms}
    same: dict[str, list[Tensor]] = {name: [] for name in arms}
    hit = []
    for window in windows:
        window = window.to(unwrap(model).device)
        hit.append(hits(model, window)[0])
        with no_learning(model):
            with arms["base"](model):
                base = model(input_ids=window).logits[0]
            log_base = base.float().log_softmax(-1)
            for name, arm in arms.items():
                logits = base
                if name != "base":
                    with arm(model):
                        logits = model(input_ids=window).logits[0]
                same[name].append((logits == base).all(-1))
                log_arm = logits.float().log_softmax(-1)
                kl[name].append((log_base.exp() * (log_base - log_arm)).sum(-1))
    at_hit = torch.cat(hit)
    report = {}
    for name in arms:
        values, unchanged = torch.cat(kl[name]), torch.cat(same[name])
        report[name] = {
            "kl": _mean(values),
            "kl_hit": _mean(values[at_hit]),
            "kl_miss": _mean(values[~at_hit]),
            "unchanged_positions": _mean(unchanged.float()),
            "hits": _mean(at_hit.float()),
            "n": len(values),
        }
    return report


def _mean(values: Tensor) -> float | None:
    return float(values.double().mean()) if len(values) else None


LOCALITY = Probe(
    "locality",
    "what changed on neutral text, at learned n-grams and elsewhere apart",
    lambda subject: locality(subject.model, subject.tokenizer, subject.arms),
)
