"""`engram-graft train`: check identity, train memory and LoRA, check decoding, probe, save; optionally export."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from engram_graft.cli.common import (
    PROCESSES,
    RANK,
    Device,
    Dtype,
    Json,
    TableDir,
    TableTier,
    base_with_lora,
    emit,
    examples,
    parse_layers,
    pick_device,
    quiet,
    say,
)
from engram_graft.cli.resume import resumed_recipe, run_directory
from engram_graft.errors import PromiseError, UserError

if TYPE_CHECKING:
    from engram_graft.recipe import Recipe

HELP_END = examples(
    "engram-graft train --base smollm2 --data facts.jsonl --layers 2,6 --output runs/mine",
    "engram-graft train --recipe recipes/smollm2-facts.yaml --set train.max_steps=40",
    "engram-graft train --base smollm2 --data facts.jsonl --output runs/mine --lora-rank 0 --teach-forms 20 --set train.stop_ngrams=2",
    "engram-graft train --base Qwen/Qwen3-0.6B --data notes/ --layers 2,6 --lora-rank 0 --output runs/notes",
    "engram-graft train --output runs/mine --resume",
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
    output: Annotated[str | None, typer.Option(help="New or empty directory; with --resume, the run's own.")] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps.", show_default="100")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Examples a step, of each process.", show_default="32")] = None,
    learning_rate: Annotated[
        float | None, typer.Option(help="Of the memory's dense parts; tables get 5 times it.", show_default="1e-3")
    ] = None,
    lora_rank: Annotated[int | None, typer.Option(help="0 trains the memory alone.", show_default="8")] = None,
    dtype: Dtype = None,
    teach_forms: Annotated[
        int | None,
        typer.Option(
            help="Invented facts for each relation of the data, trained in all its wordings, so that facts are found in wordings they "
            "were not trained in.",
            show_default="0",
        ),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of data order, LoRA and memory.", show_default="0")] = None,
    save_steps: Annotated[
        int | None,
        typer.Option(
            help="Steps between checkpoints that are kept; 0: none.", show_default="one every 50 steps, deleted at the end"
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run in --output, bit for bit; start it if it has not.")
    ] = False,
    table_tier: TableTier = None,
    table_dir: TableDir = None,
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
        "train.save_steps": save_steps,
        "table_tier": table_tier,
        "table_dir": table_dir,
        "teach.facts": teach_forms,
        "train.seed": seed,
        "engram.seed": seed,
        "merged": merged,
    }
    overrides = {name: value for name, value in flags.items() if value is not None}
    overrides |= dict(parse_setting(text) for text in setting or ())
    plan = resumed_recipe(recipe, overrides) if resume else load_recipe(recipe, overrides)
    result = run(plan, device, probe, quietly=json, resume=resume)
    if json:
        emit(result)


def run(
    recipe: "Recipe", device: str | None = None, probe: bool = True, quietly: bool = False, resume: bool = False
) -> dict[str, Any]:
    """The whole of a training run; returns what it measured. Every input is checked before the first second is spent."""
    if recipe.output is None:
        raise UserError("no output directory: pass --output, e.g. --output runs/mine, or set output in the recipe")
    from engram_graft.examples import training_data
    from engram_graft.output import require_free

    if recipe.train.trainer.get("fsdp") or os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true":
        raise UserError(
            "FSDP: this command's checks and probes run in one process, which has a shard of the base only; call "
            "engram_graft.train on every process and probe what it saves"
        )
    quiet()
    data = training_data(recipe)
    if recipe.merged is not None:
        require_free(recipe.merged)
        if Path(recipe.merged).resolve() == Path(recipe.output).resolve():
            raise UserError(f"merged={recipe.merged}: is the output directory; the merged model needs one of its own")
    with run_directory(recipe.output, resume, probe) as output:
        import engram_graft as eg
        from engram_graft.training_state import last_checkpoint
        from engram_graft.verify import verify_decoding

        if recipe.base is None:
            raise UserError("no base model: pass --base, e.g. --base smollm2, or set base in the recipe")
        pick_device(device)
        say(f"base      {recipe.base} in {recipe.dtype}, from {recipe.data} {_amount(data)}{_processes(recipe)}")
        model, tokenizer = base_with_lora(recipe, device)
        table_dir = None if recipe.table_dir is None else Path(recipe.table_dir) / (f"rank{RANK}" if PROCESSES > 1 else "")
        eg.graft(model, tokenizer, recipe.engram, table_dir)
        memory, lora = _sizes(model)
        say(
            f"graft     layers {list(recipe.engram.layer_ids)}, {memory / 1e6:.1f} M memory and {lora / 1e6:.2f} M LoRA parameters"
        )
        say("check     comparing every logit of the fresh graft with the base's, then training")
        checkpoint = last_checkpoint(output, clean=False) if resume else None
        if checkpoint is not None:
            say(f"resume    from {checkpoint}")
        result = eg.train(model, tokenizer, recipe, data, resume=resume)
        identity = result["identity"]
        say(f"identity  {identity['logits']:,} logits were equal to the base's, bit for bit, before training")
        steps = result["steps"] - (result["resumed_from"] or 0)
        say(
            f"trained   {steps} steps in {result['seconds']:.0f} s, {result['rows_touched']:,} rows touched, "
            f"{result['tokens_per_second']:.0f} tokens/s"
        )
    if RANK:
        return result
    # the graft is whole by now: nothing that fails from here on takes it away
    decoding = verify_decoding(model, tokenizer)
    if not decoding["ok"]:
        raise PromiseError(f"the trained memory, saved in {recipe.output}, answers differently from a cache: {decoding}")
    result["decoding"] = decoding
    if probe:
        from engram_graft.cli.probe import probe_into
        from engram_graft.cli.show import show
        from engram_graft.probes import Subject

        checks = {"identity": identity, "decoding": decoding}
        result["probes"] = probe_into(
            Subject(model, tokenizer, data, recipe.probe, recipe.train), output, output, checks, recipe.data
        )
    if recipe.merged:
        from engram_graft.agreement import same_without_cache
        from engram_graft.examples import fact_questions
        from engram_graft.export import export_merged

        say(f"export    writing {recipe.merged}, reopening it, comparing it with the graft")
        questions = fact_questions(data)
        result["export"] = export_merged(model, tokenizer, recipe.merged, questions=questions, results=recipe.output)
        if questions:
            prompts = [prompt for prompt, _ in questions]
            result["export"]["uncached"] = same_without_cache(model, tokenizer, prompts)
    if probe and not quietly:
        show(result["probes"], recipe.probe.examples)
    _say_where(result, recipe)
    return result


def _processes(recipe: "Recipe") -> str:
    batch = PROCESSES * recipe.train.batch_size * recipe.train.gradient_accumulation_steps
    return f", {PROCESSES} processes, {batch} examples a step" if PROCESSES > 1 else ""


def _amount(data: Any) -> str:
    from engram_graft.data import TEACHER

    if data.facts:
        held_out = sum(fact.split == "validation" for fact in data.facts)
        evaluated = f", {held_out} of them for evaluation" if held_out else ""
        taught = sum(fact.split == TEACHER for fact in data.facts)
        teachers = f", {taught} of them invented to teach wordings" if taught else ""
        return f"({len(data.facts)} facts, {sum(len(fact.prompts) for fact in data.facts)} prompts{evaluated}{teachers})"
    if data.chats:
        return f"({len(data.chats)} chats)"
    return f"({len(data.texts)} documents)"


def _sizes(model: Any) -> tuple[int, int]:
    from engram_graft.grafted import trainable_parameters
    from engram_graft.params import is_memory

    trainable = trainable_parameters(model)
    memory = sum(p.numel() for name, p in trainable.items() if is_memory(name))
    return memory, sum(p.numel() for p in trainable.values()) - memory


def _say_where(result: dict[str, Any], recipe: "Recipe") -> None:
    ways = {way: entry["max_difference"] for way, entry in result["decoding"].items() if way != "ok"}
    say("checks    " + ", ".join(f"{way} == full forward (max {difference:.1e})" for way, difference in ways.items()))
    if "export" in result:
        export = result["export"]
        say(
            f"export    {recipe.merged}: {export['bytes'] / 1e6:.0f} MB, reopened: max logit difference {export['max_difference']:.1e}, "
            f"{export['flips']} of {export['positions']} most likely tokens differ"
        )
        if "questions" in export:
            say(
                f"          same greedy answers as the graft's: {export['uncached']} of {export['questions']} without cache, "
                f"{export['same_answers']} of {export['questions']} by the export, opened by the code it carries"
            )
    names = sorted(path.name for path in Path(str(recipe.output)).iterdir() if not path.name.startswith("."))
    say(f"files     {recipe.output}: {', '.join(names)}")
    if recipe.table_dir is not None:
        say(f"tables    {recipe.table_dir}: this run's working files, of no further use")
    say(f'next      engram-graft generate {recipe.output} --prompt "..."')
