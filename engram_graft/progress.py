"""What a run shows and writes while it trains: a progress bar, a line of metrics.jsonl a step, recall every so many steps."""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from torch import nn
from transformers import PreTrainedTokenizerBase, TrainerCallback

from engram_graft.encode import Question, spread
from engram_graft.gates import gate_summary
from engram_graft.grafted import find_graft
from engram_graft.ngrams import count_ngrams
from engram_graft.recipe import TrainOptions
from engram_graft.scoring import teacher_forced
from engram_graft.silence import SILENT

GATE_EXAMPLES = 16  # that gates are watched on, or a batch's if that is fewer: a small part of a run's time


class RecallProbe(TrainerCallback):
    """Teacher-forced recall on the trained questions every `recall_every` steps and at the end; ends the run at `stop_at_recall`."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, questions: Sequence[Question], options: TrainOptions):
        self.questions = [questions[n] for n in spread(len(questions), options.recall_prompts)]
        self.tokenizer, self.options = tokenizer, options
        self.seconds = 0.0  # spent measuring, not training

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step % self.options.recall_every and state.global_step != state.max_steps:
            return
        start = time.perf_counter()
        scores = teacher_forced(model, self.tokenizer, self.questions, self.options.batch_size)
        state.engram_recall = sum(score.exact for score in scores) / len(scores)
        self.seconds += time.perf_counter() - start
        if self.options.stop_at_recall is not None and state.engram_recall >= self.options.stop_at_recall:
            control.should_training_stop = True


class GateProbe(TrainerCallback):
    """Gates and losses at frequent n-grams and at others, on a few training examples, every `recall_every` steps and at the end.

    Like recall it is measured by every process on its own: nothing is exchanged, and a sharded base runs on all of them.
    """

    def __init__(self, model: nn.Module, examples: Dataset, options: TrainOptions):
        graft, chosen = find_graft(model), spread(len(examples), min(GATE_EXAMPLES, options.batch_size))
        self.examples, self.every = [examples[n] for n in chosen], options.recall_every
        learned = [~np.array(marks) for marks in examples[SILENT][:]] if SILENT in examples.column_names else None
        self.hot = count_ngrams(examples["input_ids"][:], graft.plan, graft.config.whole_ngrams, learned).of(chosen)
        self.seconds = 0.0  # spent measuring, not training

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step % self.every and state.global_step != state.max_steps:
            return
        start = time.perf_counter()
        state.engram_health = gate_summary(model, self.examples, self.hot)
        self.seconds += time.perf_counter() - start


class Progress(TrainerCallback):
    """The progress bar; a context manager, so that it is taken down whatever happens. On no terminal: a line every tenth."""

    def __init__(self, steps: int):
        self.console = Console(stderr=True)
        self.every = max(1, steps // 10)
        columns = (
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
        )
        self.bar = Bar(*columns, console=self.console, disable=not self.console.is_terminal)
        self.task = self.bar.add_task("", total=steps)

    def __enter__(self) -> "Progress":
        self.bar.start()
        return self

    def __exit__(self, *exception: Any) -> None:
        self.bar.stop()

    def show(self, line: dict[str, Any]) -> None:
        """Show one step's metrics."""
        recall = f" · recall {line['recall']:.1%}" if "recall" in line else ""
        text = f"loss {line['loss']:.3f} · rate {line['learning_rate']:.1e} · rows {line['rows_touched']:,}{recall}"
        self.bar.update(self.task, completed=line["step"], description=text)
        if not self.console.is_terminal and (line["step"] % self.every == 0 or recall):
            self.console.print(f"step {line['step']:>5} · {text} · {line['seconds']:.0f} s", highlight=False)

    def note(self, text: str) -> None:
        """A line beside the bar."""
        self.console.print(text, highlight=False)


class Metrics(TrainerCallback):
    """Writes metrics.jsonl: step, loss, learning_rate, table_rate, grad_norm, rows_touched, seconds, and recall and health when
    measured; step, eval_loss and seconds of an evaluation."""

    def __init__(self, path: Path, progress: Progress):
        self.path, self.progress = path, progress
        self.last: dict[str, Any] = {}
        self.start = time.perf_counter()
        self.tokens_before = 0  # seen before this process went on with the run

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.start = time.perf_counter()
        self.tokens_before = state.num_input_tokens_seen
        kept = []  # of a run that goes on: what its checkpoint had behind it
        if state.global_step and self.path.exists():
            lines = self.path.read_text(encoding="utf-8").splitlines(keepends=True)
            kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= state.global_step]
            self.start -= json.loads(kept[-1])["seconds"] if kept else 0
        self.path.write_text("".join(kept), encoding="utf-8")

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if logs and "eval_loss" in logs:
            self._write({"step": state.global_step, "eval_loss": logs["eval_loss"]})
            self.progress.note(f"step {state.global_step:>5} · evaluation loss {logs['eval_loss']:.3f}")
        if not logs or "loss" not in logs:
            return
        names = ("loss", "learning_rate", "table_rate", "grad_norm", "rows_touched")
        line = {"step": state.global_step, **{name: logs.get(name) for name in names}}
        for name in ("recall", "health"):
            measured = state.__dict__.pop(f"engram_{name}", None)
            if measured is not None:
                line[name] = measured
        self.last = {**self.last, **line}
        self._write(line)
        self.progress.show(line)

    def _write(self, line: dict[str, Any]) -> None:
        line["seconds"] = round(time.perf_counter() - self.start, 3)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
