"""`engram-graft bench`: what the memory costs at inference on this machine, against the ungrafted base, in one run."""

import statistics
import time
from typing import Annotated, Any

import typer

from engram_graft.cli.common import Device, Dtype, Json, emit, examples, parse_layers, pick_device, quiet
from engram_graft.errors import UserError

HELP_END = examples("engram-graft bench --base smollm2 --layers 2,6", "engram-graft bench --base smollm2 --rounds 9 --json")
PROMPT_TOKENS, STEPS = 64, 24


def command(
    base: Annotated[str, typer.Option(help="Hub id, directory, .gguf file or alias.")],
    layers: Annotated[str, typer.Option(help="Layers that get a memory, counted from 0.")] = "2,6",
    rounds: Annotated[int, typer.Option(help="Times that base and graft take turns.")] = 5,
    dtype: Dtype = None,
    device: Device = None,
    json: Json = False,
) -> None:
    """Time one decode step and the prefill of a prompt, grafted over ungrafted: medians of turns taken in one run."""
    if rounds < 1:
        raise UserError(f"--rounds {rounds}: must be 1 or more")
    quiet()
    import torch

    from engram_graft.bases import load_base
    from engram_graft.config import EngramConfig
    from engram_graft.grafted import memories
    from engram_graft.hooks import graft, ungraft

    model: Any
    model, tokenizer = load_base(base, dtype or "float32")
    model.to(pick_device(device))
    config = EngramConfig(layer_ids=tuple(parse_layers(layers)))
    times: dict[str, dict[str, list[float]]] = {side: {"prefill": [], "step": []} for side in ("base", "graft", "silent")}
    _time(model)  # warm-up
    for _ in range(rounds):
        for side in times:
            if side != "base":
                graft(model, tokenizer, config)
                for memory in memories(model):  # every n-gram known, the dearest case; or none, the common one
                    memory.table.touch(torch.arange(len(memory.table.weight) if side == "graft" else 0))
            for part, seconds in zip(("prefill", "step"), _time(model), strict=True):
                times[side][part] += seconds
            if side != "base":
                ungraft(model)
    report: dict[str, Any] = {"base": base, "rounds": rounds, "prompt_tokens": PROMPT_TOKENS}
    for part in ("prefill", "step"):
        ms = {side: 1e3 * statistics.median(times[side][part]) for side in times}
        report[part] = {f"{side}_ms": value for side, value in ms.items()}
        report[part] |= {"ratio": ms["graft"] / ms["base"], "silent_ratio": ms["silent"] / ms["base"]}
    if json:
        emit(report)
        return
    for part, what in (("step", "one decode step"), ("prefill", f"prefill of {PROMPT_TOKENS} tokens")):
        row = report[part]
        print(f"{what:<24}base {row['base_ms']:8.2f} ms")
        for side, of, key in (("graft", "every n-gram known", "ratio"), ("silent", "no n-gram known", "silent_ratio")):
            print(f"{'  ' + of:<24}graft{row[side + '_ms']:8.2f} ms   graft/base {row[key]:.3f}")


def _time(model: Any) -> tuple[list[float], list[float]]:
    """Seconds of one prefill, and of each of the decode steps that follow it."""
    import torch
    from transformers import DynamicCache

    vocabulary = model.get_input_embeddings().weight.shape[0]
    ids = torch.randint(vocabulary, (1, PROMPT_TOKENS + STEPS), generator=torch.Generator().manual_seed(0)).to(model.device)
    cache, seconds, at = DynamicCache(config=model.config), [], 0
    with torch.no_grad():
        for length in [PROMPT_TOKENS] + [1] * STEPS:
            start = time.perf_counter()
            model(input_ids=ids[:, at : at + length], past_key_values=cache, use_cache=True)
            if model.device.type == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
            at += length
    return seconds[:1], seconds[1:]
