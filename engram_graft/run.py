"""`train`: run a recipe on a grafted model, from its data to the saved graft; killed at any moment, it can be resumed."""

import hashlib
import json
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from torch import nn
from transformers import PreTrainedTokenizerBase, TrainerCallback, TrainingArguments

from engram_graft.checkpoint import save_graft
from engram_graft.data import Data
from engram_graft.encode import Collator, Question, chat_questions
from engram_graft.errors import UserError
from engram_graft.examples import find_silence, training_data, training_examples
from engram_graft.grafted import find_graft, memories, trainable_parameters
from engram_graft.locate import unwrap
from engram_graft.output import all_or_nothing
from engram_graft.progress import GateProbe, Metrics, Progress, RecallProbe
from engram_graft.recipe import Recipe, TrainOptions
from engram_graft.scoring import keeps_logits
from engram_graft.sharding import is_sharded
from engram_graft.trainer import EngramTrainer
from engram_graft.training_state import last_checkpoint
from engram_graft.verify import verify_identity

SAVE_STEPS = 50  # between checkpoints that are kept for resuming alone


def train(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    recipe: Recipe,
    data: Data | None = None,
    callbacks: Sequence[TrainerCallback] = (),
    resume: bool = False,
) -> dict[str, Any]:
    """Train the memory of a grafted model, and its PEFT adapters if it has any; the base stays frozen.

    A fresh graft is first checked to be the identity. With `recipe.output` the directory gets recipe.yaml, identity.json,
    metrics.jsonl and the graft itself; without, nothing is written. Under `accelerate launch` every process calls this and the first
    writes.

    Args:
        recipe: its `data` and `train` sections decide; `engram` and `lora` describe a model made before.
        data: what to train on, if it is not to be read from `recipe.data`.
        callbacks: further transformers callbacks.
        resume: go on from the last checkpoint in `recipe.output`, bit for bit as if the run had not stopped; without one, start.
            The model must be what the run began with.

    Returns:
        {"steps", "seconds", "loss" (last), "tokens_per_second", "rows_touched", "recall" (last measured, or None), "identity",
        "resumed_from" (step, or None)}.

    Raises:
        UserError: no memory, no data, or a bad TrainingArguments name in `train.trainer`.
        PromiseError: the fresh graft is not the identity; nothing was trained.
    """
    options = recipe.train
    data = training_data(recipe, data)
    examples, held_out = training_examples(data, tokenizer, options, find_silence(model, tokenizer, data, options))
    fresh = not any(memory.table.count_seen() for memory in memories(model))
    identity = verify_identity(model, tokenizer) if fresh else None
    trainable_parameters(model)

    of_facts = [(prompt, fact.answer) for fact in data.facts if fact.split == "train" for prompt in fact.prompts]
    questions: list[Question] = [*of_facts, *chat_questions(data.chats, tokenizer)]
    if options.stop_at_recall is not None and not questions:
        raise UserError(f"train.stop_at_recall={options.stop_at_recall}: of plain text no recall is measured; set it to null")
    with tempfile.TemporaryDirectory() as scratch:
        output = Path(recipe.output or scratch)
        arguments = training_arguments(options, output, model, bool(recipe.output))
        if (arguments.eval_strategy != "no" or arguments.eval_on_start) and held_out is None:
            asked = options.trainer.get("eval_strategy", "at the start")
            raise UserError(
                f'eval_strategy={asked}: nothing is held out to evaluate on; give facts the split "validation", or hold out a share '
                "of text with train.validation=0.1"
            )
        lead = arguments.process_index == 0
        checkpoint = last_checkpoint(output, clean=lead) if resume else None
        others = set(output.glob("checkpoint-*")) - {checkpoint}
        if others and not resume:
            raise UserError(
                f"output {output}: has checkpoints of another run ({min(others).name}); resume it, or choose another directory"
            )
        if recipe.output and lead:
            with all_or_nothing(output) as files:
                (files / "recipe.yaml").write_text(yaml.safe_dump(recipe.to_dict(), sort_keys=False), encoding="utf-8")
                if identity is not None:
                    (files / "identity.json").write_text(json.dumps(identity, indent=1) + "\n", encoding="utf-8")
        recall = RecallProbe(tokenizer, questions, options) if questions and options.recall_every else None
        gates = GateProbe(model, examples, options) if options.recall_every else None
        progress = Progress(options.max_steps)
        measuring = [probe for probe in (recall, gates) if probe]
        metrics = Metrics(output / "metrics.jsonl", progress)
        trainer = EngramTrainer(
            model=model,
            args=arguments,
            train_dataset=examples,
            eval_dataset=held_out,
            data_collator=Collator(tokenizer.pad_token_id or 0, trim=keeps_logits(model)),
            callbacks=[*measuring, *([metrics, progress] if lead else []), *callbacks],
            table_rate_multiplier=options.table_rate_multiplier,
            lora_learning_rate=recipe.lora.learning_rate,
            run={
                **{f"train.{name}": value for name, value in recipe.to_dict()["train"].items()},
                **{f"lora.{name}": value for name, value in recipe.to_dict()["lora"].items()},
                **{f"engram.{name}": value for name, value in find_graft(model).config.to_dict().items()},
                "data": hashlib.sha256(
                    json.dumps([examples[column][:] for column in examples.column_names]).encode()
                ).hexdigest()[:16],
            },
        )
        for default in (transformers.PrinterCallback, transformers.trainer_callback.ProgressCallback):
            trainer.remove_callback(default)
        start = time.perf_counter()
        with progress:
            trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        seconds = time.perf_counter() - start
        if not trainer.state.global_step:
            raise UserError(f"not one step was trained: {len(examples)} examples make no whole batch of {options.batch_size}")
        if recipe.output and (lead or is_sharded(model)):
            save_graft(model, output)
        if recipe.output and lead and options.save_steps is None:
            for path in set(output.glob("checkpoint-*")) - others:
                shutil.rmtree(path)
        trainer.accelerator.wait_for_everyone()
    model.eval()
    tokens = trainer.state.num_input_tokens_seen - metrics.tokens_before
    return {
        "steps": trainer.state.global_step,
        "seconds": seconds,
        "loss": metrics.last.get("loss"),
        "tokens_per_second": tokens / max(seconds - sum(probe.seconds for probe in measuring), 1e-9),
        "rows_touched": rows_touched(model),
        "recall": metrics.last.get("recall"),
        "identity": identity,
        "resumed_from": None if checkpoint is None else int(checkpoint.name.rpartition("-")[2]),
    }


def rows_touched(model: nn.Module) -> int:
    """Rows of all tables that training has looked up so far."""
    return sum(memory.table.count_seen() for memory in memories(model))


def training_arguments(options: TrainOptions, output: Path, model: nn.Module, saves: bool) -> TrainingArguments:
    """The options as transformers has them; raises `UserError` where `options.trainer` is none of them."""
    every = SAVE_STEPS if options.save_steps is None else options.save_steps
    settings: dict[str, Any] = {
        "output_dir": str(output),
        "max_steps": options.max_steps,
        "per_device_train_batch_size": options.batch_size,
        "gradient_accumulation_steps": options.gradient_accumulation_steps,
        "learning_rate": options.learning_rate,
        "weight_decay": options.weight_decay,
        "lr_scheduler_type": options.lr_scheduler_type,
        "warmup_steps": options.warmup_steps,
        "max_grad_norm": options.max_grad_norm,
        "seed": options.seed,
        "logging_steps": 1,
        "save_strategy": "steps" if every and saves else "no",
        "save_steps": every or 500,
        "include_num_input_tokens_seen": "non_padding",
        "remove_unused_columns": False,
        "label_names": ["labels"],
        "disable_tqdm": True,
        "dataloader_pin_memory": unwrap(model).device.type == "cuda",
        # FSDP moves what it shards
        "use_cpu": unwrap(model).device.type == "cpu" and not (options.trainer.get("fsdp") and torch.accelerator.is_available()),
    }
    if owned := sorted((settings.keys() | {"optim", "optim_args", "num_train_epochs"}) & options.trainer.keys()):
        raise UserError(f"train.trainer sets {', '.join(owned)}: those are set by the train section's own options")
    defaults = {
        "report_to": "none",
        "ddp_find_unused_parameters": False,
        "restore_callback_states_from_checkpoint": True,
        "save_total_limit": 1 if options.save_steps is None else None,
    }
    try:
        return TrainingArguments(**settings | defaults | options.trainer)
    except (TypeError, ValueError) as error:
        raise UserError(f"training options: transformers' TrainingArguments refuses them ({error})") from error
