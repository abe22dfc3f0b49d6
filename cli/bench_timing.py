"""What `bench` measures. Ratios come from turns taken in one run, and a number is the median of its turns: machines are noisy."""

import contextlib
import copy
import ctypes
import gc
import pydoc_data.topics
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedTokenizerBase

from engram_graft.config import EngramConfig
from engram_graft.grafted import find_graft, memories, trainable_parameters
from engram_graft.hooks import graft, ungraft
from engram_graft.locate import unwrap
from engram_graft.modes import no_learning
from engram_graft.optim import EngramAdamW, clip_grad_norm
from engram_graft.output import sync
from engram_graft.prefetch import read_rows_ahead
from engram_graft.window import Window

PROMPT_TOKENS, DECODED = 64, 24
BATCH = (4, 128)  # of a training step and of inference: 512 tokens
HASHED = (4, 8192)
HEADS, HEAD_DIM = 8, 8  # of the tables that are compared


def overhead(model: Any, tokenizer: PreTrainedTokenizerBase, layers: Sequence[int], rounds: int) -> dict[str, Any]:
    """{"step", "prefill": {"base_ms", "graft_ms", "silent_ms", "ratio", "silent_ratio"}}: one decode step, and the prefill of a prompt,
    with no graft, with one that knows every n-gram (the dearest case), and with one that knows none (the common one)."""
    times: dict[str, dict[str, list[float]]] = {side: {"prefill": [], "step": []} for side in ("base", "graft", "silent")}
    _decode(model)  # warm-up
    for _ in range(rounds):
        for side in times:
            if side != "base":
                graft(model, tokenizer, EngramConfig(layer_ids=tuple(layers)))
                for memory in memories(model):
                    memory.table.touch(torch.arange(len(memory.table.weight) if side == "graft" else 0))
            for part, seconds in zip(("prefill", "step"), _decode(model), strict=True):
                times[side][part] += seconds
            if side != "base":
                ungraft(model)
    report = {}
    for part in ("step", "prefill"):
        ms = {side: 1e3 * statistics.median(times[side][part]) for side in times}
        ratios = {"ratio": ms["graft"] / ms["base"], "silent_ratio": ms["silent"] / ms["base"]}
        report[part] = {**{f"{side}_ms": value for side, value in ms.items()}, **ratios}
    return report


def hashing(model: Any, tokenizer: PreTrainedTokenizerBase, layers: Sequence[int], rounds: int) -> dict[str, float]:
    """{"us_per_token", "host_us_per_token", "rows_per_token"}: from token ids to rows, in the model and on the host, one thread."""
    graft(model, tokenizer, EngramConfig(layer_ids=tuple(layers)))
    ngram_hash = find_graft(model)
    ids = torch.randint(len(ngram_hash.lookup), HASHED, generator=torch.Generator().manual_seed(0)).to(ngram_hash.lookup.device)
    window, plan, threads = Window(0, HASHED[1]), ngram_hash.plan, torch.get_num_threads()
    host_ids = ids.cpu().numpy()
    torch.set_num_threads(1)
    try:
        model_us = [_seconds(lambda: ngram_hash(ngram_hash.lookup[ids], window)) for _ in range(10 * rounds)]
        host_us = [_seconds(lambda: plan.rows(host_ids)) for _ in range(rounds)]
    finally:
        torch.set_num_threads(threads)
        ungraft(model)
    scale = 1e6 / ids.numel()
    medians = {"us_per_token": scale * statistics.median(model_us), "host_us_per_token": scale * statistics.median(host_us)}
    return {**medians, "rows_per_token": plan.primes.size}


def steps_by_rows(
    model: Any, tokenizer: PreTrainedTokenizerBase, layers: Sequence[int], sizes: Sequence[int], rounds: int
) -> dict[str, Any]:
    """{"sizes": [{"rows", "step_ms", "table_bytes", "memory_bytes", "rows_touched"}], "ratio": slowest over fastest}: a training step
    against the rows of all tables together; memory is what the process took beyond the base, optimizer and projections included."""
    batches = _Text(tokenizer, model.device)
    times: dict[int, list[float]] = {size: [] for size in sizes}
    about: dict[int, dict[str, Any]] = {}
    for turn in range(rounds + 1):
        for size in sizes:
            before = _memory(model)
            graft(model, tokenizer, _config(layers, size))
            train = _Stepper(model)
            train(next(batches))  # the first step of a table makes its optimizer state
            seconds = [_seconds(lambda train=train: train(next(batches)), model) for _ in range(2)]  # type: ignore[misc]
            if turn:  # the first turn warms up
                times[size] += seconds
            tables = [memory.table for memory in memories(model)]
            about[size] = {
                "rows": sum(len(table.weight) for table in tables),
                "table_bytes": sum(table.weight.nbytes for table in tables),
                "memory_bytes": max(_memory(model) - before, 0),
                "rows_touched": sum(table.count_seen() for table in tables),
            }
            del train, tables
            model.zero_grad()
            ungraft(model)
    report = [{"step_ms": 1e3 * statistics.median(times[size]), **about[size]} for size in sizes]
    steps = [entry["step_ms"] for entry in report]
    return {"sizes": report, "ratio": max(steps) / min(steps)}


def tiers(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    layers: Sequence[int],
    resident_rows: int,
    mapped_rows: int,
    directory: Path,
    rounds: int,
) -> dict[str, Any]:
    """Tokens a second with the tables in files over tables in memory, every row of both filled and known.

    Returns:
        {"mapped_bytes", "resident_bytes", part: {"resident", "mapped" (tokens a second), "ratio"}} with the parts "training",
        "inference" (batches of text) and "decoding" (one text, token by token).
    """
    sides = {"resident": model, "mapped": copy.deepcopy(model, {id(p): p for p in model.parameters()})}  # one base, two memories
    graft(sides["resident"], tokenizer, _config(layers, resident_rows))
    graft(sides["mapped"], tokenizer, _config(layers, mapped_rows), directory)
    report: dict[str, Any] = {f"{side}_bytes": _fill(sides[side]) for side in sides}
    for path in directory.glob("layer*.bin"):
        sync(path)
    batches, trainers = _Text(tokenizer, model.device), {side: _Stepper(sides[side]) for side in sides}
    tokens = {"training": BATCH[0] * BATCH[1], "inference": BATCH[0] * BATCH[1], "decoding": DECODED}
    times: dict[str, dict[str, list[float]]] = {part: {side: [] for side in sides} for part in tokens}
    for turn in range(rounds + 1):  # the first turn of each warms up
        for side, subject in sides.items():
            with no_learning(subject):
                read = [next(batches) for _ in range(3)]
                infer = [_seconds(lambda subject=subject, ids=ids: subject(ids), model) for ids in read]  # type: ignore[misc]
            decode = [sum(_decode(subject, next(batches)[:1])[1])]
            if turn:
                times["inference"][side] += infer
                times["decoding"][side] += decode
    for turn in range(rounds + 1):  # apart from inference, which the writing back of trained rows would slow down
        for side in sides:
            train, following = trainers[side], next(batches)
            for _ in range(3):
                now, following = following, next(batches)
                train.read_ahead(following)  # as the Trainer does while the batch before is trained
                seconds = _seconds(lambda train=train, now=now: train(now), model)  # type: ignore[misc]
                if turn:
                    times["training"][side].append(seconds)
    for part, count in tokens.items():
        rates = {side: count / statistics.median(times[part][side]) for side in sides}
        report[part] = {**rates, "ratio": rates["mapped"] / rates["resident"]}
    for subject in sides.values():
        ungraft(subject)
    for pattern in ("layer*.bin", "optimizer*.bin"):
        for path in directory.glob(pattern):
            path.unlink()
    return report


class _Text:
    """Batches of token ids of real text: the language reference that comes with Python, over and over."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, device: torch.device):
        text = "\n".join(pydoc_data.topics.topics.values())
        self.ids = torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], device=device)
        self.at = 0

    def __next__(self) -> Tensor:
        count = BATCH[0] * BATCH[1]
        self.at = self.at if self.at + count <= len(self.ids) else 0
        self.at += count
        return self.ids[self.at - count : self.at].view(BATCH)


class _Stepper:
    """One optimizer step on a batch, as the Trainer does it, without the Trainer."""

    def __init__(self, model: Any):
        self.model = model
        tables = [memory.table.weight for memory in memories(model)]
        dense = [p for p in trainable_parameters(model).values() if all(p is not table for table in tables)]
        groups = [{"params": dense}, {"params": tables, "table": True, "lr": 5e-3}]
        self.optimizer = EngramAdamW(groups, lr=1e-3, weight_decay=0.0, storage=memories(model)[0].table.storage)
        self.plan = find_graft(model).plan

    def __call__(self, ids: Tensor) -> None:
        self.model.train()
        self.model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        clip_grad_norm(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.model.eval()

    def read_ahead(self, ids: Tensor) -> None:
        """Ask for the rows of a later batch."""
        read_rows_ahead(self.model.train(), self.plan, ids, self.optimizer)


def _config(layers: Sequence[int], rows: int) -> EngramConfig:
    a_head = max(2, rows // (len(layers) * 2 * HEADS))
    return EngramConfig(
        layer_ids=tuple(layers), engram_vocab_size=(a_head, a_head), n_head_per_ngram=HEADS, n_embed_per_ngram=HEADS * HEAD_DIM
    )


@torch.no_grad()
def _fill(model: Any) -> int:
    """Give every row a value and mark it as known; returns the bytes of the tables."""
    block = torch.randn(2**20, HEAD_DIM, generator=torch.Generator().manual_seed(0))
    total = 0
    for memory in memories(model):
        weight = memory.table.weight
        for start in range(0, len(weight), len(block)):
            part = weight[start : start + len(block)]
            part.copy_(block[: len(part)])
        memory.table.seen.fill_(255)
        memory.value_proj.weight.normal_(0, 1e-3)
        total += weight.nbytes
    return total


def _decode(model: Any, ids: Tensor | None = None) -> tuple[list[float], list[float]]:
    """Seconds of one prefill, and of each of the decode steps that follow it."""
    if ids is None:
        vocabulary = model.get_input_embeddings().weight.shape[0]
        ids = torch.randint(vocabulary, (1, PROMPT_TOKENS + DECODED), generator=torch.Generator().manual_seed(0)).to(model.device)
    cache, seconds, at = DynamicCache(config=model.config), [], 0
    with no_learning(model):
        for length in [PROMPT_TOKENS] + [1] * DECODED:
            piece = ids[:, at : at + length]
            seconds.append(_seconds(lambda piece=piece: model(input_ids=piece, past_key_values=cache, use_cache=True), model))  # type: ignore[misc]
            at += length
    return seconds[:1], seconds[1:]


def _seconds(work: Callable[[], object], model: Any = None) -> float:
    start = time.perf_counter()
    work()
    if model is not None and model.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def _memory(model: nn.Module) -> int:
    """Bytes that the process holds, on the model's device."""
    device = unwrap(model).device
    gc.collect()
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)  # glibc keeps what a step has freed
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else int(psutil.Process().memory_info().rss)
