"""`engram-graft verify`: the promises, checked on the user's own model; one line each."""

import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from engram_graft.cli.common import (
    Device,
    Dtype,
    Json,
    TableDir,
    TableTier,
    base_with_lora,
    emit,
    examples,
    local,
    open_graft,
    parse_layers,
    quiet,
)
from engram_graft.errors import PromiseError, UserError

HELP_END = examples("engram-graft verify --base smollm2 --layers 2,6", "engram-graft verify runs/demo")


def command(
    directory: Annotated[
        str | None, typer.Argument(help="A graft directory, or a hub id; or give --base to check a fresh graft.")
    ] = None,
    base: Annotated[str | None, typer.Option(help="Hub id, directory, .gguf file or alias of a base to graft and check.")] = None,
    layers: Annotated[str, typer.Option(help="Layers of the fresh graft, counted from 0.")] = "2,6",
    lora_rank: Annotated[int, typer.Option(help="Of LoRA beside the fresh graft; 0 for none.")] = 8,
    dtype: Dtype = None,
    table_tier: TableTier = None,
    table_dir: TableDir = None,
    device: Device = None,
    json: Json = False,
) -> None:
    """Check a fresh graft for identity (every logit, bit for bit), or a trained one for answering the same however it is run."""
    from engram_graft.recipe import require_tier

    if (directory is None) == (base is None):
        raise UserError("give either a graft directory or --base, e.g. engram-graft verify --base smollm2 --layers 2,6")
    require_tier(table_tier, table_dir)
    quiet()
    if base is not None:
        report = _fresh(base, layers, lora_rank, dtype, table_dir, device, quietly=json)
    else:
        assert directory is not None
        report = _trained(local(directory), dtype, table_dir, device, quietly=json)
    if json:
        emit(report)
    if not report["ok"]:
        raise PromiseError("a promise does not hold: see the lines marked FAIL" if not json else "a promise does not hold")


def _line(ok: bool, text: str, quietly: bool) -> None:
    if not quietly:
        print(f"{'ok  ' if ok else 'FAIL'}  {text}", flush=True)


def _skipped(text: str, quietly: bool) -> None:
    if not quietly:
        print(f"--    not checked: {text}", flush=True)


def _fresh(
    base: str, layers: str, lora_rank: int, dtype: str | None, table_dir: str | None, device: str | None, quietly: bool
) -> dict[str, Any]:
    import engram_graft as eg
    from engram_graft.recipe import load_recipe

    overrides = {
        "base": base,
        "engram.layer_ids": parse_layers(layers),
        "lora.rank": lora_rank,
        "dtype": dtype or "float32",
    }
    recipe = load_recipe(None, overrides)
    model, tokenizer = base_with_lora(recipe, device)
    eg.graft(model, tokenizer, recipe.engram, table_dir)
    report = eg.verify_identity(model, tokenizer)
    for check in report["checks"]:
        where = f"{check['check']}, {check['mode']} mode, base in {check['dtype']}"
        _line(
            True,
            f"identity: {where}: {check['logits']:,} logits equal, max difference {check['max_difference']:g}",
            quietly,
        )
    for nudge in report["nudges"]:
        where = f"layer {nudge['layer']}, base in {nudge['dtype']}"
        _line(
            True,
            f"the check can fail: {where}: a nudged zero factor moved a logit by {nudge['max_difference']:.2g}",
            quietly,
        )
    for skipped, why in report["skipped"].items():
        _skipped(f"base in {skipped}: {why}", quietly)
    return {"ok": True, "identity": report}


def _trained(directory: str, dtype: str | None, table_dir: str | None, device: str | None, quietly: bool) -> dict[str, Any]:
    from engram_graft.verify import verify_decoding

    model, tokenizer = open_graft(directory, device, dtype, table_dir=table_dir)
    report: dict[str, Any] = {"decoding": verify_decoding(model, tokenizer)}
    ok = report["decoding"].pop("ok")
    for way, entry in report["decoding"].items():
        numbers = f"max difference {entry['max_difference']:.2g} (bare base: {entry['base']:.2g})"
        _line(entry["ok"], f"{way} == full forward: {numbers}", quietly)
    report["greedy"] = _greedy(model, tokenizer, directory)
    if isinstance(report["greedy"], str):
        _skipped(f"greedy answers with and without cache: {report['greedy']}", quietly)
    else:
        same = report["greedy"]["same"] == report["greedy"]["n"]
        ok = ok and same
        _line(
            same,
            f"greedy answers with cache == without: {report['greedy']['same']} of {report['greedy']['n']}",
            quietly,
        )
    report["reload"] = _reload(model, directory)
    _line(
        report["reload"]["bitwise"],
        f"saved again == the files: {report['reload']['tensors']} tensors, bit for bit",
        quietly,
    )
    return {"ok": bool(ok and report["reload"]["bitwise"]), **report}


def _greedy(model: Any, tokenizer: Any, directory: str) -> dict[str, int] | str:
    """Answers to the first prompt of each trained fact, decoded with and without the cache; or why there are none to decode."""
    from engram_graft.agreement import same_without_cache
    from engram_graft.cli.probe import trained_by
    from engram_graft.examples import fact_questions, training_data

    try:
        prompts = [prompt for prompt, _ in fact_questions(training_data(trained_by(directory)))]
    except UserError as error:  # a graft that was copied here without its data
        return str(error)
    if not prompts:
        return "it was trained on text, not on facts"
    return {"same": same_without_cache(model, tokenizer, prompts, 12), "n": len(prompts)}


def _reload(model: Any, directory: str) -> dict[str, Any]:
    import torch

    from engram_graft.checkpoint import save_graft
    from engram_graft.files import memory_tensors, read_graft

    own = memory_tensors(model)
    described, _, tensors, _ = read_graft(Path(directory))
    stored = [tensors]
    if not described["merged"]:
        with tempfile.TemporaryDirectory() as scratch:
            save_graft(model, scratch)
            stored.append(read_graft(Path(scratch))[2])
    equal = all(
        found.keys() == own.keys() and all(torch.equal(t, own[name].cpu()) for name, t in found.items()) for found in stored
    )
    return {"bitwise": equal, "tensors": len(own)}
