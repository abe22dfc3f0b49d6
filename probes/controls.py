"""Controls: would something simpler have done as well? Each is made by the graft's own recipe on a fresh base and probed as an arm.

lora_only: LoRA alone, with as many parameters as the memory could move. one_row: the same graft whose tables have one row a head.
random_rows: the same graft whose addresses are drawn anew at every step. knn_lm: a look-up among the base's own states, untrained.
"""

import contextlib
import dataclasses
import gc
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase, Trainer
from transformers.pytorch_utils import Conv1D

from engram_graft.bases import load_base
from engram_graft.data import Data
from engram_graft.encode import Collator
from engram_graft.errors import UserError
from engram_graft.examples import training_data, training_examples
from engram_graft.grafted import disable_graft, disable_lora, find_graft, memories
from engram_graft.hooks import graft
from engram_graft.lora import with_lora
from engram_graft.params import adapter_names, is_memory
from engram_graft.probes.addresses import RandomRows, one_row
from engram_graft.probes.arms import Arm
from engram_graft.probes.knn import NEIGHBOURS, interpolated, make_store
from engram_graft.probes.probe import Probe, Scores, Subject
from engram_graft.recipe import Recipe
from engram_graft.run import train, training_arguments
from engram_graft.scoring import keeps_logits

LORA_RATE = 1e-3  # at which LoRA alone learns facts best (LOG.md)
_WATCHING = ("eval_", "report_to", "load_best_model", "metric_for_best", "greater_is_better", "logging_")  # no part of training


@dataclasses.dataclass(frozen=True)
class Task:
    """What a control is made from. Args: graft: the model it is compared with; data: what that was trained on; lora_rate: of lora_only."""

    graft: nn.Module
    tokenizer: PreTrainedTokenizerBase
    recipe: Recipe
    data: Data
    lora_rate: float


@dataclasses.dataclass(frozen=True)
class Made:
    """A control to probe. Args: base, arm: how the model is entered as the bare base and as the control; notes: for the report."""

    model: nn.Module
    base: Arm
    arm: Arm
    notes: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Control:
    """Args: about: one line for the report; make: the control, of a fresh base."""

    about: str
    make: Callable[[Task, nn.Module], Made]


def run_controls(
    subject: Subject,
    recipe: Recipe,
    probes: Sequence[Probe],
    names: Sequence[str] | None = None,
    started: Callable[[str], None] = lambda name: None,
    fresh: Callable[[], nn.Module] | None = None,
    lora_rate: float = LORA_RATE,
) -> tuple[dict[str, dict[str, Scores]], dict[str, dict[str, Any]]]:
    """Train and probe controls of a trained graft, one at a time; each is freed before the next is made.

    Each trains all of `max_steps`, on its last step's values: a graft that was stopped early or picked by evaluation had no more.

    Args:
        recipe: what the graft was trained by.
        names: of `CONTROLS`; None: all.
        started: called with each control's name as it begins.
        fresh: makes the bare base; by default it is loaded as the recipe says.
        lora_rate: learning rate of lora_only.

    Returns:
        For "arms" of the report {name: {probe: scores}}, and for "controls" {name: {"about", "parameters", ...}}.

    Raises:
        UserError: no such control, or a recipe that names no base or no data.
    """
    names = tuple(CONTROLS) if names is None else names
    for name in names:
        if name not in CONTROLS:
            raise UserError(f"control {name!r}: there is none; the controls are {', '.join(CONTROLS)}")
    task = Task(subject.model, subject.tokenizer, _alone(recipe), _trained_data(subject, recipe), lora_rate)
    arms: dict[str, dict[str, Scores]] = {}
    notes: dict[str, dict[str, Any]] = {}
    for name in names:
        started(name)
        with _randomness_kept():
            base = _base(recipe).to(subject.device) if fresh is None else fresh()
            made = CONTROLS[name].make(task, base)
            arms[name] = _scores(subject, name, made, probes)
            notes[name] = {"about": CONTROLS[name].about, **made.notes}
        del base, made
        gc.collect()  # a Trainer and its model hold each other
    return arms, notes


def _scores(subject: Subject, name: str, made: Made, probes: Sequence[Probe]) -> dict[str, Scores]:
    given = {"base": made.base, name: made.arm}
    of_control = dataclasses.replace(subject, model=made.model, given_arms=given, reference=subject.model)
    scores = {probe.name: probe.run(of_control).get(name) for probe in probes if not probe.of_memory}
    # what is listed question by question is for what compares arms
    return {probe: {k: v for k, v in found.items() if not isinstance(v, list)} for probe, found in scores.items() if found}


def movable(model: nn.Module) -> int:
    """Parameters that training could move: dense ones of the memory, rows that it looked up, adapters."""
    adapters = adapter_names(model)
    dense = [p for n, p in model.named_parameters() if n in adapters or (is_memory(n) and not n.endswith("table.weight"))]
    tables = [memory.table for memory in memories(model)]
    return sum(p.numel() for p in dense) + sum(table.count_seen() * table.weight.shape[1] for table in tables)


def _lora_only(task: Task, base: nn.Module) -> Made:
    recipe, options = task.recipe, dataclasses.replace(task.recipe.train, learning_rate=task.lora_rate)
    lora = dataclasses.replace(recipe.lora, target_modules=_targets(base, recipe.lora.target_modules))
    narrow: Any = with_lora(base, dataclasses.replace(lora, rank=1), options.seed)
    wanted, each = movable(task.graft), sum(p.numel() for p in narrow.parameters() if p.requires_grad)
    rank = max(1, round(wanted / each))
    model = with_lora(narrow.unload(), dataclasses.replace(lora, rank=rank, alpha=2 * rank), options.seed)
    with tempfile.TemporaryDirectory() as scratch:
        arguments = training_arguments(options, Path(scratch), model, False)
        arguments._n_gpu = min(arguments.n_gpu, 1)  # as the graft was trained: DataParallel would make batches larger
        trainer = Trainer(
            model=model,
            args=arguments,
            train_dataset=training_examples(task.data, task.tokenizer, options)[0],
            data_collator=Collator(task.tokenizer.pad_token_id or 0, trim=keeps_logits(model)),
        )
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
        trainer.accelerator.unwrap_model(model, keep_fp32_wrapper=False)  # mixed precision is the training's, not the model's
    notes = {"parameters": rank * each, "wanted": wanted, "rank": rank, "learning_rate": task.lora_rate}
    return Made(model.eval(), disable_lora, lambda model: contextlib.nullcontext(), notes)


def _targets(base: nn.Module, wanted: tuple[str, ...]) -> tuple[str, ...]:
    """The linear layers that LoRA goes to: those of the recipe, or all but the output's where this base has none of these names (a
    recipe without LoRA says nothing of them)."""
    output = base.get_output_embeddings()  # type: ignore[operator]
    linear = {n.rpartition(".")[2] for n, m in base.named_modules() if isinstance(m, nn.Linear | Conv1D) and m is not output}
    return wanted if linear & set(wanted) else tuple(sorted(linear))


def _grafted(task: Task, base: nn.Module, address: Callable[..., Tensor], filtered: bool) -> Made:
    """The recipe's graft on `base`, its addresses replaced by what `address` gives."""
    recipe = task.recipe
    model = with_lora(base, recipe.lora, recipe.train.seed)
    graft(model, task.tokenizer, recipe.engram)
    find_graft(model).register_forward_hook(address)
    train(model, task.tokenizer, recipe, task.data)
    for memory in memories(model):
        memory.table.seen_filter &= filtered  # training is without it anyway
    notes = {"parameters": movable(model)}
    return Made(model, partial(disable_graft, lora=True), lambda model: contextlib.nullcontext(), notes)


def _one_row(task: Task, base: nn.Module) -> Made:
    return _grafted(task, base, one_row, True)


def _random_rows(task: Task, base: nn.Module) -> Made:
    # the filter knows n-grams by their rows: of rows drawn at random it would let hardly any through
    return _grafted(task, base, RandomRows(task.recipe.engram.seed), False)


def _knn_lm(task: Task, base: nn.Module) -> Made:
    store, share, temperature, tuned_on = make_store(base, task.tokenizer, task.data, task.recipe.train)
    notes: dict[str, Any] = {
        "parameters": store.keys.numel(),
        "entries": len(store.keys),
        "neighbours": min(NEIGHBOURS, len(store.keys)),
    }
    notes |= {"lambda": share, "temperature": temperature, "tuned_on": tuned_on}
    arm = partial(interpolated, store=store, share=share, temperature=temperature)
    return Made(base, lambda model: contextlib.nullcontext(), arm, notes)


CONTROLS = {
    "lora_only": Control("LoRA alone, of as many parameters as the memory could move", _lora_only),
    "one_row": Control("the same graft with one row a head: no n-gram is told from another", _one_row),
    "random_rows": Control("the same graft with its addresses drawn anew at every training call", _random_rows),
    "knn_lm": Control("no training: the base beside a look-up of its own nearest states in the training data", _knn_lm),
}


def _alone(recipe: Recipe) -> Recipe:
    """The recipe as a control runs it: all steps, in memory, nothing written, nothing measured on the way."""
    trainer = {name: value for name, value in recipe.train.trainer.items() if not name.startswith(_WATCHING)}
    options = dataclasses.replace(recipe.train, recall_every=0, stop_at_recall=None, trainer=trainer)
    return dataclasses.replace(recipe, output=None, merged=None, table_tier=None, table_dir=None, train=options)


def _trained_data(subject: Subject, recipe: Recipe) -> Data:
    if subject.trained:
        return subject.data
    if recipe.data is None:
        raise UserError("controls are trained on what the graft was, and its recipe names no data: probe without --data")
    return training_data(recipe)


def _base(recipe: Recipe) -> nn.Module:
    if recipe.base is None:
        raise UserError("controls are made of a fresh base, and the graft's recipe names none: set base in its recipe.yaml")
    return load_base(recipe.base, recipe.dtype)[0]


@contextlib.contextmanager
def _randomness_kept() -> Iterator[None]:
    """Training seeds every generator there is; afterwards they are as before."""
    python, state = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(python)
        np.random.set_state(state)
