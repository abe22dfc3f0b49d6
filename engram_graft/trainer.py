"""Training a graft on the Hugging Face Trainer: what row-sparse gradients need there, and `train`, which runs a recipe."""

import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase, Trainer, TrainerCallback, TrainingArguments

from engram_graft.checkpoint import fill, save_graft
from engram_graft.data import Data, load_data
from engram_graft.encode import Collator, encode_facts, encode_texts
from engram_graft.errors import UserError
from engram_graft.files import TENSOR_FILE, canonical_name, read_tensors
from engram_graft.grafted import memories, trainable_parameters
from engram_graft.locate import unwrap
from engram_graft.optim import EngramAdamW, clip_grad_norm
from engram_graft.output import all_or_nothing
from engram_graft.params import adapter_names
from engram_graft.progress import Metrics, Progress, RecallProbe
from engram_graft.recipe import Recipe, TrainOptions
from engram_graft.scoring import keeps_logits
from engram_graft.verify import verify_identity


class EngramTrainer(Trainer):
    """transformers' Trainer for a grafted model: tables keep sparse gradients, get their own rate and no decay, and are clipped.

    Args:
        table_rate_multiplier: the tables' learning rate over `args.learning_rate`; both follow the schedule.
        lora_learning_rate: of PEFT adapters; `args.learning_rate` by default.

    Other arguments are the Trainer's.
    """

    def __init__(
        self, *args: Any, table_rate_multiplier: float = 5.0, lora_learning_rate: float | None = None, **kwargs: Any
    ) -> None:
        self.table_rate_multiplier = table_rate_multiplier
        self.lora_learning_rate = lora_learning_rate
        super().__init__(*args, **kwargs)
        if self.args.world_size > 1:
            raise UserError(f"{self.args.world_size} processes: rows are not exchanged between processes yet; start one")
        self.args._n_gpu = min(self.args.n_gpu, 1)  # DataParallel's replicas would forget which rows they saw

    @property
    def _model(self) -> nn.Module:
        assert self.model is not None
        return self.model

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            if memories(self._model)[0].key_norm.dtype == torch.float16:
                raise UserError(
                    "a float16 memory cannot be trained (Adam's eps is 0 there): use dtype float32 or bfloat16 for it"
                )
            self.optimizer = EngramAdamW(
                self.parameter_groups(model or self._model),
                lr=self.args.learning_rate,
                betas=(self.args.adam_beta1, self.args.adam_beta2),
                eps=self.args.adam_epsilon,
                weight_decay=0.0,
            )
        return self.optimizer

    def parameter_groups(self, model: nn.Module) -> list[dict[str, Any]]:
        """Tables; the memory's matrices and its norms; LoRA. Norms and tables are never decayed."""
        trainable, adapters = trainable_parameters(model), adapter_names(model)
        rate = self.args.learning_rate
        lora_rate = rate if self.lora_learning_rate is None else self.lora_learning_rate
        groups: dict[str, list[nn.Parameter]] = {"table": [], "dense": [], "norm": [], "lora": []}
        for name, parameter in trainable.items():
            if name in adapters:
                groups["lora"].append(parameter)
            elif canonical_name(name).endswith("table.weight"):
                groups["table"].append(parameter)
            else:
                groups["norm" if "norm" in name or name.endswith("bias") else "dense"].append(parameter)
        options = {
            "dense": {"lr": rate, "weight_decay": self.args.weight_decay},  # first: the rate that the Trainer logs
            "norm": {"lr": rate},
            "lora": {"lr": lora_rate, "weight_decay": self.args.weight_decay},
            "table": {"lr": rate * self.table_rate_multiplier, "table": True},
        }
        return [{"params": groups[name], **option} for name, option in options.items() if groups[name]]

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.accelerator.clip_grad_norm_ = self._clip  # accelerate's own raises on sparse gradients

    def _clip(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor:
        if norm_type != 2:
            raise UserError(f"norm_type={norm_type}: only the 2-norm is clipped")
        self.accelerator.unscale_gradients()
        return clip_grad_norm(parameters, max_norm)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        if self.args.should_save:
            save_graft(self._model, output_dir or str(self.args.output_dir))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        model = model or self._model
        if adapter_names(model):
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        fill(model, read_tensors(Path(resume_from_checkpoint), [TENSOR_FILE]))

    def _load_best_model(self) -> None:
        assert self.state.best_model_checkpoint is not None
        self._load_from_checkpoint(self.state.best_model_checkpoint)


def train(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    recipe: Recipe,
    data: Data | None = None,
    callbacks: Sequence[TrainerCallback] = (),
) -> dict[str, Any]:
    """Train the memory of a grafted model, and its PEFT adapters if it has any; the base stays frozen.

    A fresh graft is first checked to be the identity. With `recipe.output` the directory gets recipe.yaml, identity.json,
    metrics.jsonl and the graft itself; without, nothing is written.

    Args:
        recipe: its `data` and `train` sections decide; `engram` and `lora` describe a model made before.
        data: what to train on, if it is not to be read from `recipe.data`.
        callbacks: further transformers callbacks.

    Returns:
        {"steps", "seconds", "loss" (last), "tokens_per_second", "rows_touched", "recall" (last measured, or None), "identity"}.

    Raises:
        UserError: no memory, no data, or a bad TrainingArguments name in `train.trainer`.
        PromiseError: the fresh graft is not the identity; nothing was trained.
    """
    options = recipe.train
    if data is None:
        if recipe.data is None:
            raise UserError("no training data: set data to a file of facts or text (--data)")
        data = load_data(recipe.data)
    data = data.with_forms(options.forms)
    if data.facts:
        examples = encode_facts([fact for fact in data.facts if fact.split == "train"], tokenizer, options.max_length)
    else:
        examples = encode_texts(data.texts, tokenizer, options.block_size)
    if not len(examples):
        raise UserError('no fact has split "train": nothing to learn from')
    fresh = not any(bool(memory.table.seen.any()) for memory in memories(model))
    identity = verify_identity(model, tokenizer) if fresh else None
    trainable_parameters(model)

    questions = [(prompt, fact.answer) for fact in data.facts if fact.split == "train" for prompt in fact.prompts]
    with tempfile.TemporaryDirectory() as scratch:
        output = Path(recipe.output or scratch)
        if recipe.output:
            with all_or_nothing(output) as files:
                (files / "recipe.yaml").write_text(yaml.safe_dump(recipe.to_dict(), sort_keys=False), encoding="utf-8")
                if identity is not None:
                    (files / "identity.json").write_text(json.dumps(identity, indent=1) + "\n", encoding="utf-8")
        recall = RecallProbe(tokenizer, questions, options) if questions and options.recall_every else None
        progress = Progress(options.max_steps)
        metrics = Metrics(output / "metrics.jsonl", progress, options.table_rate_multiplier)
        trainer = EngramTrainer(
            model=model,
            args=_arguments(options, output, model),
            train_dataset=examples,
            data_collator=Collator(tokenizer.pad_token_id or 0, trim=keeps_logits(model)),
            callbacks=[*([recall] if recall else []), metrics, progress, *callbacks],
            table_rate_multiplier=options.table_rate_multiplier,
            lora_learning_rate=recipe.lora.learning_rate,
        )
        for default in (transformers.PrinterCallback, transformers.trainer_callback.ProgressCallback):
            trainer.remove_callback(default)
        start = time.perf_counter()
        with progress:
            trainer.train()
        seconds = time.perf_counter() - start
        if recipe.output:
            save_graft(model, output)
    model.eval()
    return {
        "steps": trainer.state.global_step,
        "seconds": seconds,
        "loss": metrics.last.get("loss"),
        "tokens_per_second": trainer.state.num_input_tokens_seen / max(seconds - (recall.seconds if recall else 0), 1e-9),
        "rows_touched": rows_touched(model),
        "recall": metrics.last.get("recall"),
        "identity": identity,
    }


def rows_touched(model: nn.Module) -> int:
    """Rows of all tables that training has looked up so far."""
    return sum(int(memory.table.seen.sum()) for memory in memories(model))


def _arguments(options: TrainOptions, output: Path, model: nn.Module) -> TrainingArguments:
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
        "save_strategy": "steps" if options.save_steps else "no",
        "save_steps": options.save_steps or 500,
        "report_to": "none",
        "include_num_input_tokens_seen": "non_padding",
        "remove_unused_columns": False,
        "label_names": ["labels"],
        "disable_tqdm": True,
        "dataloader_pin_memory": unwrap(model).device.type == "cuda",
        "use_cpu": unwrap(model).device.type == "cpu",
    }
    if owned := sorted(((settings.keys() | {"optim", "optim_args"}) - {"report_to"}) & options.trainer.keys()):
        raise UserError(f"train.trainer sets {', '.join(owned)}: those are set by the train section's own options")
    try:
        return TrainingArguments(**settings | options.trainer)
    except (TypeError, ValueError) as error:
        raise UserError(f"training options: transformers' TrainingArguments refuses them ({error})") from error
