"""The gates of a model's memories on known texts: captured position by position, without changing the model."""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engram_graft.encode import IGNORED, Collator
from engram_graft.fresh import fresh_layer
from engram_graft.grafted import find_graft, memories
from engram_graft.layer import Engram
from engram_graft.locate import locate, unwrap
from engram_graft.modes import no_learning
from engram_graft.scoring import keeps_logits
from engram_graft.window import Window

TOKENS = 512  # of a call, or one text
Examples = Sequence[Mapping[str, Sequence[int]]]  # "input_ids" and "labels", as encoded for training
_Batch = list[tuple[int, int]]  # which texts, and their lengths


@dataclasses.dataclass(frozen=True)
class Reading:
    """One memory at the P positions of some texts, text after text.

    Args:
        known: bool `[P, orders]`: n-grams that training looked up (only whole ones where the config says so).
        gate: `[P]`, the mean over residual streams; to be read where some n-gram is known.
        square: `[P]` by part, the mean square over channels: "hidden" (the residual stream before the memory), "total" (what is added
            to it), "conv" (the convolution's part of that), "direct" (the rest).
    """

    known: np.ndarray
    gate: np.ndarray
    square: dict[str, np.ndarray]

    @property
    def active(self) -> np.ndarray:
        """bool `[P]`: positions with a known n-gram."""
        return np.asarray(self.known.any(-1))

    def longest(self, of_orders: np.ndarray) -> np.ndarray:
        """From a value for each order `[P, orders]` that of the longest known n-gram `[P]`; anything where none is known."""
        last = self.known.shape[1] - 1 - self.known[:, ::-1].argmax(-1)
        return np.take_along_axis(of_orders, last[:, None], -1)[:, 0]


@contextlib.contextmanager
def recorded(model: nn.Module) -> Iterator[dict[int, dict[str, Tensor]]]:
    """Inside the block, the last call of each memory by layer id: "gate" `[B, T, G, 1]` (absent when no n-gram contributed),
    "known" bool `[B, T, orders]`, "hidden" and "total" as the memory takes and gives them, "conv" `[B, T, G, D]` where there is one."""
    calls: dict[int, dict[str, Tensor]] = {}
    with contextlib.ExitStack() as stack:
        for memory in memories(model):
            calls[memory.layer_id] = {}
            _record(memory, calls[memory.layer_id], stack)
        yield calls


def _record(memory: Engram, call: dict[str, Tensor], stack: contextlib.ExitStack) -> None:
    gate, own = memory.gate, vars(memory).get("gate")

    def recording(embeddings: Tensor, hidden: Tensor) -> Tensor:
        call["gate"] = gate(embeddings, hidden)
        return call["gate"]

    def finish(module: nn.Module, args: Any, output: Any) -> None:
        hidden, rows, window = args[:3]
        known, whole = memory.table.known(rows), window.whole(memory.config.orders, rows.device)
        call["known"] = known & whole if memory.config.whole_ngrams and whole is not None else known
        call["hidden"], call["total"] = hidden, output[0]

    vars(memory)["gate"] = recording
    stack.callback(lambda: vars(memory).pop("gate") if own is None else vars(memory).update(gate=own))
    stack.callback(memory.register_forward_pre_hook(lambda *_: call.clear()).remove)
    stack.callback(memory.register_forward_hook(finish).remove)
    if memory.short_conv is not None:
        keep = memory.short_conv.register_forward_hook(lambda module, args, output: call.update(conv=output))
        stack.callback(keep.remove)


def read_gates(model: nn.Module, examples: Examples) -> tuple[np.ndarray, dict[int, Reading]]:
    """The next token's loss `[P]` in nats (nan where it is no label), and each memory's reading by layer id.

    Texts of like length run together, the same ones whatever the options say.
    """
    found: dict[str, list[tuple[_Batch, Tensor]]] = {}
    with recorded(model) as calls:
        for batch, _, _, loss in _run(model, examples):
            found.setdefault("loss", []).append((batch, loss))
            for layer_id, call in calls.items():
                gate = call["gate"].flatten(2).float().mean(-1) if "gate" in call else torch.full(loss.shape, torch.nan)
                hidden, total = (call[part].flatten(2).float() for part in ("hidden", "total"))
                conv = call["conv"].flatten(2).float() if "conv" in call else torch.zeros_like(total)
                parts = {"hidden": hidden, "total": total, "conv": conv, "direct": total - conv}
                values = {part: value.square().mean(-1) for part, value in parts.items()}
                for name, value in {**values, "gate": gate, "known": call["known"]}.items():
                    found.setdefault(f"{layer_id}.{name}", []).append((batch, value))
    flat = {name: _in_order(batches) for name, batches in found.items()}
    readings = {}
    for n in calls:
        square = {part: flat[f"{n}.{part}"] for part in ("hidden", "total", "conv", "direct")}
        readings[n] = Reading(flat[f"{n}.known"], flat[f"{n}.gate"], square)
    return flat["loss"], readings


def read_initial(model: nn.Module, examples: Examples) -> tuple[np.ndarray, dict[int, np.ndarray]]:
    """The next token's loss `[P]`, and the gates `[P]` that each memory had before training, by layer id.

    To be called with memory and LoRA off: those gates are a function of the base's hidden states, the seed and the initial rows.
    """
    ngram_hash, layers = find_graft(model), locate(model).layers
    hidden: dict[int, Tensor] = {}
    losses: list[tuple[_Batch, Tensor]] = []
    gates: dict[int, list[tuple[_Batch, Tensor]]] = {memory.layer_id: [] for memory in memories(model)}
    fresh = {m.layer_id: fresh_layer(m.config, m.index, 1, m.key_norm.shape[1], m.key_norm.device) for m in memories(model)}
    with contextlib.ExitStack() as stack:
        for layer_id in gates:
            stack.callback(layers[layer_id].register_forward_pre_hook(_keep(hidden, layer_id), with_kwargs=True).remove)
        for batch, ids, window, loss in _run(model, examples):
            losses.append((batch, loss))
            rows = ngram_hash(ngram_hash.lookup[ids.to(ngram_hash.lookup.device)], window)
            for memory in memories(model):
                before, state = fresh[memory.layer_id], hidden[memory.layer_id]
                embeddings = memory.table.initial(rows[:, :, memory.index].to(state.device))  # (B, T, orders*heads, dim)
                whole = window.whole(memory.config.orders, state.device) if memory.config.whole_ngrams else None
                if whole is not None:
                    embeddings = embeddings.masked_fill(~whole.repeat_interleave(memory.table.n_head, -1)[..., None], 0)
                streams = state.reshape(*ids.shape, *before.key_norm.shape).to(before.key_norm.dtype)
                with torch.no_grad():
                    gate = before.gate(embeddings.flatten(-2).to(streams.dtype), streams)
                gates[memory.layer_id].append((batch, gate.flatten(2).float().mean(-1)))
    return _in_order(losses), {layer_id: _in_order(batches) for layer_id, batches in gates.items()}


def _keep(hidden: dict[int, Tensor], layer_id: int) -> Any:
    """A pre-hook that leaves a layer's input in `hidden`."""

    def hook(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden[layer_id] = args[0] if args else kwargs["hidden_states"]

    return hook


def gate_summary(model: nn.Module, examples: Examples, hot: np.ndarray) -> dict[str, Any]:
    """What a run is watched by: {layer id: {"gate_hot", "gate_cold"}, ..., "ce_hot", "ce_cold"}.

    Means over the positions whose next token is a label and whose longest known n-gram is hot, or is not; None over no positions. The
    losses' positions are those of the first memory.

    Args:
        hot: bool `[P, orders]` of the examples, from `Ngrams`.
    """
    loss, readings = read_gates(model, examples)
    summary: dict[str, Any] = {}
    for layer_id, reading in readings.items():
        frequent, counted = reading.longest(hot), reading.active & ~np.isnan(loss)
        at = {"hot": counted & frequent, "cold": counted & ~frequent}
        summary[str(layer_id)] = {f"gate_{name}": mean(reading.gate[where]) for name, where in at.items()}
        for name, where in at.items():
            summary.setdefault(f"ce_{name}", mean(loss[where]))
    return summary


def mean(values: np.ndarray) -> float | None:
    """The mean; None of no values."""
    return float(values.mean()) if len(values) else None


def spread_tokens(lengths: Sequence[int], tokens: int) -> list[int]:
    """Which of some texts to read, evenly spread, so that they have about `tokens` tokens at most."""
    return list(range(0, len(lengths), max(1, -(-sum(lengths) // tokens))))


def _run(model: nn.Module, examples: Examples) -> Iterator[tuple[_Batch, Tensor, Window, Tensor]]:
    """Batches of like length, padded on the left: their ids `[B, T]`, their window, the next token's loss `[B, T]` (nan: no label)."""
    device = unwrap(model).device
    order = sorted(range(len(examples)), key=lambda at: -len(examples[at]["input_ids"]))
    while order:
        size = max(1, TOKENS // len(examples[order[0]]["input_ids"]))
        chosen, order = order[:size], order[size:]
        rows = [{key: list(examples[at][key]) for key in ("input_ids", "labels")} for at in chosen]
        labelled = any(label != IGNORED for row in rows for label in row["labels"])
        inputs = Collator(0, trim=labelled and keeps_logits(model))(rows)
        inputs = {name: value.to(device) for name, value in inputs.items()}
        ids, labels, mask = inputs["input_ids"], inputs.pop("labels")[:, 1:], inputs["attention_mask"].bool()
        loss = torch.full(ids.shape, torch.nan, device=device)
        with no_learning(model):
            logits = model(**inputs, use_cache=False).logits[:, :-1].float()
            losses = F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=IGNORED, reduction="none")
        loss[:, ids.shape[1] - 1 - labels.shape[1] : -1] = losses.masked_fill(labels == IGNORED, torch.nan)
        batch = [(at, len(row["input_ids"])) for at, row in zip(chosen, rows, strict=True)]
        yield batch, ids, Window(0, ids.shape[1], None if bool(mask.all()) else mask), loss


def _in_order(batches: list[tuple[_Batch, Tensor]]) -> np.ndarray:
    """`[B, T, ...]` of batches without their padding, text after text `[P, ...]`; numbers in double precision."""
    texts = {}
    for batch, values in batches:
        for (at, length), row in zip(batch, values.cpu().numpy(), strict=True):
            texts[at] = row[-length:]
    flat = np.concatenate([texts[at] for at in range(len(texts))])
    return flat if flat.dtype == bool else flat.astype(np.float64)
