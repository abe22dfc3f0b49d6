"""`engram-graft train`: check identity, train memory and LoRA, check decoding, probe, save; optionally export."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from engram_graft.cli.common import Device, Dtype, Json, base_with_lora, emit, examples, parse_layers, pick_device, quiet, say
from engram_graft.errors import PromiseError, UserError

if TYPE_CHECKING:
    from engram_graft.recipe import Recipe

HELP_END = examples(
    "engram-graft train --base smollm2 --data facts.jsonl --layers 2,6 --output runs/mine",
    "engram-graft train --recipe recipes/smollm2-facts.yaml --set train.max_steps=40",
    "engram-graft train --base Qwen/Qwen3-0.6B --data notes/ --layers 2,6 --lora-rank 0 --output runs/notes",
)


def command(
    recipe: Annotated[str | None, typer.Option(help="YAML file that fills every option; flags override it.")] = None,
    base: Annotated[str | None, typer.Option(help="Hub id, directory, .gguf file, or alias: smollm2, qwen3.")] = None,
    data: Annotated[
        str | None, typer.Option(help="Facts (.jsonl .json .csv .parquet), text (file or folder), or a hub dataset.")
    ] = None,
    layers: Annotated[
        str | None, typer.Option(help="Decoder layers that get a memory, counted from 0.", show_default="2,6")
    ] = None,
    output: Annotated[str | None, typer.Option(help="Directory to make; must not exist or be empty.")] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps.", show_default="100")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Examples a step.", show_default="32")] = None,
    learning_rate: Annotated[
        float | None, typer.Option(help="Of the memory's dense parts; tables get 5 times it.", show_default="1e-3")
    ] = None,
    lora_rank: Annotated[int | None, typer.Option(help="0 trains the memory alone.", show_default="8")] = None,
    dtype: Dtype = None,
    seed: Annotated[int | None, typer.Option(help="Of data order, LoRA and memory.", show_default="0")] = None,
    merged: Annotated[str | None, typer.Option(help="Also export a merged model to this directory.")] = None,
    setting: Annotated[
        list[str] | None, typer.Option("--set", help="Any other option of a recipe, e.g. train.max_grad_norm=0.5.")
    ] = None,
    probe: Annotated[bool, typer.Option(help="Run the probes at the end.")] = True,
    device: Device = None,
    json: Json = False,
) -> None:
    """Train a memory (and LoRA) on your facts or text, on a frozen base.

    Refuses to start unless the fresh graft changes no bit of any logit.
    """
    from engram_graft.recipe import load_recipe, parse_setting

    flags = {
        "base": base,
        "data": data,
        "engram.layer_ids": None if layers is None else parse_layers(layers),
        "output": output,
        "train.max_steps": steps,
        "train.batch_size": batch_size,
        "train.learning_rate": learning_rate,
        "lora.rank": lora_rank,
        "dtype": dtype,
        "train.seed": seed,
        "engram.seed": seed,
        "merged": merged,
    }
    overrides = {name: value for name, value in flags.items() if value is not None}
    overrides |= dict(parse_setting(text) for text in setting or ())
    plan = load_recipe(recipe, overrides)
    result = run(plan, device, probe, quietly=json)
    if json:
        emit(result)


def run(recipe: "Recipe", device: str | None = None, probe: bool = True, quietly: bool = False) -> dict[str, Any]:
    """The whole of a training run; returns what it measured. Every input is checked before the first second is spent."""
    if recipe.output is None:
        raise UserError("no output directory: pass --output, e.g. --output runs/mine, or set output in the recipe")
    from engram_graft.data import load_data
    from engram_graft.output import new_directory, require_free

    quiet()
    if recipe.data is None:
        raise UserError("no training data: pass --data, a file of facts or text, or set data in the recipe")
    data = load_data(recipe.data).with_forms(recipe.train.forms)
    if recipe.merged is not None:
        require_free(recipe.merged)
        if Path(recipe.merged).resolve() == Path(recipe.output).resolve():
            raise UserError(f"merged={recipe.merged}: is the output directory; the merged model needs one of its own")
    with new_directory(recipe.output) as output:
        import engram_graft as eg
        from engram_graft.verify import verify_decoding

        if recipe.base is None:
            raise UserError("no base model: pass --base, e.g. --base smollm2, or set base in the recipe")
        pick_device(device)
        say(f"base      {recipe.base} in {recipe.dtype}, from {recipe.data} {_amount(data)}")
        model, tokenizer = base_with_lora(recipe, device)
        eg.graft(model, tokenizer, recipe.engram)
        memory, lora = _sizes(model)
        say(
            f"graft     layers {list(recipe.engram.layer_ids)}, {memory / 1e6:.1f} M memory and {lora / 1e6:.2f} M LoRA parameters"
        )
        say("check     comparing every logit of the fresh graft with the base's, then training")
        result = eg.train(model, tokenizer, recipe, data)
        identity = result["identity"]
        say(f"identity  {identity['logits']:,} logits were equal to the base's, bit for bit, before training")
        say(
            f"trained   {result['steps']} steps in {result['seconds']:.0f} s, {result['rows_touched']:,} rows touched, "
            f"{result['tokens_per_second']:.0f} tokens/s"
        )
    # the graft is whole by now: nothing that fails from here on takes it away
    decoding = verify_decoding(model, tokenizer)
    if not decoding["ok"]:
        raise PromiseError(f"the trained memory, saved in {recipe.output}, answers differently from a cache: {decoding}")
    result["decoding"] = decoding
    if probe:
        from engram_graft.cli.probe import probe_into, show

        checks = {"identity": identity, "decoding": decoding}
        result["probes"] = probe_into(model, tokenizer, data, recipe.probe, output, output, checks)
    if recipe.merged:
        from engram_graft.export import export_merged

        say(f"export    writing {recipe.merged}, reloading it, comparing it with the graft")
        result["export"] = export_merged(model, tokenizer, recipe.merged)
        if data.facts:
            result["export"]["same_answers"] = _same_answers(model, recipe.merged, data, recipe)
    if probe and not quietly:
        show(result["probes"], recipe.probe.examples)
    _say_where(result, recipe)
    return result


def _amount(data: Any) -> str:
    if data.facts:
        return f"({len(data.facts)} facts, {sum(len(fact.prompts) for fact in data.facts)} prompts)"
    return f"({len(data.texts)} documents)"


def _sizes(model: Any) -> tuple[int, int]:
    from engram_graft.grafted import trainable_parameters
    from engram_graft.params import is_memory

    trainable = trainable_parameters(model)
    memory = sum(p.numel() for name, p in trainable.items() if is_memory(name))
    return memory, sum(p.numel() for p in trainable.values()) - memory


def _same_answers(model: Any, merged: str, data: Any, recipe: "Recipe") -> dict[str, Any]:
    """Greedy answers of the graft, decoded with and without the cache, and of the export reloaded from disk, token by token."""
    from engram_graft.checkpoint import load_graft
    from engram_graft.locate import unwrap
    from engram_graft.scoring import greedy

    reloaded, tokenizer = load_graft(merged)
    reloaded.to(unwrap(model).device)
    prompts = [fact.prompts[0] for fact in data.facts]
    tokens, size = 6, recipe.probe.batch_size  # without a cache each token costs the whole text again
    cached = greedy(model, tokenizer, prompts, tokens, size)
    exported = greedy(reloaded, tokenizer, prompts, tokens, size)
    plain = greedy(model, tokenizer, prompts, tokens, size, use_cache=False)
    return {
        "n": len(prompts),
        "uncached": sum(a == b for a, b in zip(cached, plain, strict=True)),
        "exported": sum(a == b for a, b in zip(cached, exported, strict=True)),
    }


def _say_where(result: dict[str, Any], recipe: "Recipe") -> None:
    ways = {way: entry["max_difference"] for way, entry in result["decoding"].items() if way != "ok"}
    say("checks    " + ", ".join(f"{way} == full forward (max {difference:.1e})" for way, difference in ways.items()))
    if "export" in result:
        export = result["export"]
        say(
            f"export    {recipe.merged}: {export['bytes'] / 1e6:.0f} MB, reloaded: max logit difference {export['max_difference']:.1e}, "
            f"{export['flips']} of {export['positions']} most likely tokens differ"
        )
        if same := export.get("same_answers"):
            say(
                f"          same greedy answers as the graft's: {same['uncached']} of {same['n']} without cache, "
                f"{same['exported']} of {same['n']} by the export"
            )
    say(
        f"files     {recipe.output}: engram.safetensors, probes.json, report.png, metrics.jsonl, identity.json, recipe.yaml, README.md"
    )
    say(f'next      engram-graft generate {recipe.output} --prompt "..."')
