"""Health of each memory on its training data: are the gates open where it helps, how much does it add, how full is its table.

Figures are of the arm "graft" unless they say otherwise, at positions where the memory knows an n-gram. What concerns losses counts only
positions whose next token is a label. "Hot" is a position whose longest known n-gram is (see `engram_graft.ngrams.Ngrams`).
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor

from engram_graft.examples import training_examples
from engram_graft.gates import Reading, mean, read_gates, read_initial, spread_tokens
from engram_graft.grafted import find_graft, memories
from engram_graft.hashing import HashPlan
from engram_graft.layer import Engram
from engram_graft.ngrams import count_ngrams
from engram_graft.probes.probe import Probe, Subject
from engram_graft.table import CHUNK, EngramTable

TOKENS = 4096  # of the training data that are read, evenly spread
BUCKETS = 5  # of the gate: the table of arXiv 2601.16531
TOUCHES = {"1": 1, "2-3": 2, "4-9": 4, "10-99": 10, "100+": 100}  # look-ups of a row, and where each bin begins


def health(subject: Subject) -> dict[str, Any]:
    """{"layers": {layer id: {"gate", "gate_step0", "buckets", "hot", "cold", "utility_auc", "residual", "heads", "displacement"}}}.

    - gate, gate_step0: now, and before training on the base's own hidden states: see `distribution`.
    - buckets: by gate, {"from", "to", "n", "ce" (nats, next token), "hot" (share)}.
    - hot, cold: {"n", "gate", "ce" (the graft's, LoRA included), "base_ce"}.
    - utility_auc: see `utility_auc`, of the gate and of base loss - loss.
    - residual: root mean square of what is added over that of the residual stream: "total", its "conv" part, the "direct" rest.
    - heads, displacement: see there.

    A layer that knows no n-gram of the data is absent; {} where the subject's data was not trained on.
    """
    examples = _training_examples(subject)
    if examples is None or not len(examples):
        return {}
    model, graft = subject.model, find_graft(subject.model)
    texts = examples["input_ids"][:]
    ngrams = count_ngrams(texts, graft.plan, graft.config.whole_ngrams, _learned(memories(model)[0], graft.plan, texts))
    chosen = spread_tokens([len(text) for text in texts], TOKENS)
    sample, hot = [examples[n] for n in chosen], ngrams.of(chosen)
    with subject.arms["graft"](model):
        loss, readings = read_gates(model, sample)
    with subject.arms["base"](model):
        base_loss, initial = read_initial(model, sample)
    layers = {}
    for memory in memories(model):
        reading = readings[memory.layer_id]
        if reading.active.any():
            gates = {
                "gate": distribution(reading.gate[reading.active]),
                "gate_step0": distribution(initial[memory.layer_id][reading.active]),
            }
            rows = list(ngrams.rows(graft.plan, memory.index))
            table = {"heads": heads(memory, graft.plan, rows), "displacement": displacement(memory, rows, ngrams.counts)}
            layers[str(memory.layer_id)] = {**gates, **_use(reading, hot, loss, base_loss), **table}
    return {"layers": layers}


def _training_examples(subject: Subject) -> Dataset | None:
    """What was trained, encoded as in training; None if the subject's data was not."""
    facts = subject.data.facts
    if not subject.trained or (facts and all(fact.split != "train" for fact in facts)):
        return None
    return training_examples(subject.data, subject.tokenizer, subject.training)[0]


def _learned(memory: Engram, plan: HashPlan, texts: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """For each text, bool `[T, orders]`: the n-grams that training looked up. Not all are: see `engram_graft.silence`."""
    found = []
    for text in texts:
        rows = torch.from_numpy(plan.rows(np.asarray(text, np.int64))[None, :, memory.index])
        found.append(memory.table.known(rows.to(memory.table.seen.device))[0].cpu().numpy())
    return found


def distribution(gates: np.ndarray) -> dict[str, Any]:
    """{"mean", "sd", "q01", "q50", "q99", "below_05" (share below .05), "above_95", "histogram" (20 counts over 0..1)}."""
    low, middle, high = np.quantile(gates, [0.01, 0.5, 0.99]).tolist()
    return {
        **{"mean": float(gates.mean()), "sd": float(gates.std()), "q01": low, "q50": middle, "q99": high},
        **{"below_05": float((gates < 0.05).mean()), "above_95": float((gates > 0.95).mean())},
        "histogram": np.histogram(gates, 20, (0, 1))[0].tolist(),
    }


def _use(reading: Reading, hot: np.ndarray, loss: np.ndarray, base_loss: np.ndarray) -> dict[str, Any]:
    """Where one memory's gate is open and whether that helps: the parts of a layer from "buckets" to "residual"."""
    counted = reading.active & ~np.isnan(loss)
    gate, ce, base_ce, hot = reading.gate[counted], loss[counted], base_loss[counted], reading.longest(hot)[counted]
    bucket = np.minimum((gate * BUCKETS).astype(int), BUCKETS - 1)
    buckets = [
        {"from": n / BUCKETS, "to": (n + 1) / BUCKETS, "n": int(at.sum()), "ce": mean(ce[at]), "hot": mean(hot[at])}
        for n, at in ((n, bucket == n) for n in range(BUCKETS))
    ]
    sides = {
        name: {"n": int(at.sum()), "gate": mean(gate[at]), "ce": mean(ce[at]), "base_ce": mean(base_ce[at])}
        for name, at in (("hot", hot), ("cold", ~hot))
    }
    rms = {part: math.sqrt(square[reading.active].mean()) for part, square in reading.square.items()}
    return {
        "buckets": buckets,
        **sides,
        "utility_auc": utility_auc(gate, base_ce - ce),
        "residual": {part: rms[part] / rms["hidden"] for part in ("total", "direct", "conv")},
    }


def utility_auc(gates: np.ndarray, gains: np.ndarray) -> float | None:
    """The probability that a position whose gain is above the median has a higher gate than one whose gain is not, a tie counting half
    (Mann-Whitney). None where all of them are on one side.
    """
    high = gains > np.median(gains) if len(gains) else np.zeros(0, dtype=bool)
    if not high.any():
        return None
    lower = np.sort(gates[~high])
    wins = np.searchsorted(lower, gates[high], "left") + np.searchsorted(lower, gates[high], "right")
    return float(wins.mean() / 2 / len(lower))


def heads(memory: Engram, plan: HashPlan, ngram_rows: list[np.ndarray]) -> list[dict[str, Any]]:
    """How full each head of a memory's table is: {"order", "head", "rows", "seen", "coverage", "collisions", "expected_collisions"}.

    collisions: the share of the training data's distinct n-grams that share their row of this head with another one;
    expected_collisions: the same for m random addresses among p rows, 1 - (1 - 1/p)**(m - 1).

    Args:
        ngram_rows: for each order, int64 `[n, heads]`, from `Ngrams.rows`.
    """
    seen = memory.table.seen_rows().cpu().numpy()
    found = []
    for order, rows in enumerate(ngram_rows, 2):
        for head, of_head in enumerate(rows.T):
            at = (order - 2) * rows.shape[1] + head
            start, size = int(plan.offsets[memory.index, at]), int(plan.primes[memory.index, at])
            used = int(np.diff(np.searchsorted(seen, [start, start + size]))[0])
            shared = np.unique(of_head, return_counts=True)[1]
            found.append(
                {
                    **{"order": order, "head": head, "rows": size, "seen": used, "coverage": used / size},
                    "collisions": float(shared[shared > 1].sum() / max(len(of_head), 1)),
                    "expected_collisions": 1 - (1 - 1 / size) ** max(len(of_head) - 1, 0),
                }
            )
    return found


def displacement(memory: Engram, ngram_rows: list[np.ndarray], counts: list[np.ndarray]) -> list[dict[str, Any]]:
    """How far training moved the rows, by how often one pass of the training data looks a row up: {"touches", "n", "rms"}, the root
    mean square of row - initial row over rows that were looked up.

    Args:
        ngram_rows, counts: for each order, int64 `[n, heads]` and `[n]`, from `Ngrams`.
    """
    rows, at = np.unique(np.concatenate([rows.ravel() for rows in ngram_rows]), return_inverse=True)
    lookups = np.concatenate([np.repeat(count, rows.shape[1]) for rows, count in zip(ngram_rows, counts, strict=True)])
    touches = np.bincount(at, lookups, len(rows))
    bins = np.searchsorted(list(TOUCHES.values()), touches, "right") - 1
    found = []
    for n, name in enumerate(TOUCHES):
        of_bin = torch.from_numpy(rows[bins == n]).to(memory.table.weight.device)
        of_bin = of_bin[memory.table.is_seen(of_bin)]
        found.append({"touches": name, "n": len(of_bin), "rms": _moved(memory.table, of_bin)})
    return found


@torch.no_grad()
def _moved(table: EngramTable, rows: Tensor) -> float | None:
    if not len(rows):
        return None
    total = sum(float((table.weight[part] - table.initial(part)).double().square().sum()) for part in rows.split(CHUNK))
    return math.sqrt(total / (len(rows) * table.weight.shape[1]))


HEALTH = Probe(
    "health",
    "gates, residual, rows and collisions of each memory on its training data",
    lambda subject: {"graft": found} if (found := health(subject)) else {},
    of_memory=True,
)
