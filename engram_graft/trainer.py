"""Training a graft on the Hugging Face Trainer: what row-sparse gradients, several processes and bit-exact resuming need there."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import Trainer
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint, rotate_checkpoints

from engram_graft.bases import check_base
from engram_graft.checkpoint import save_graft
from engram_graft.errors import UserError
from engram_graft.exchange import exchange_gradients, exchange_rows, memory_parameters
from engram_graft.files import TENSOR_FILE, canonical_name, read_config, read_tensors
from engram_graft.generators import load_random, save_random
from engram_graft.grafted import memories, trainable_parameters, without_ngrams
from engram_graft.optim import EngramAdamW, clip_grad_norm
from engram_graft.params import adapter_names
from engram_graft.prefetch import Prefetching
from engram_graft.restore import fill, fill_adapters
from engram_graft.silence import SILENT
from engram_graft.training_state import (
    OPTIMIZER_FILE,
    SCALER_FILE,
    SCHEDULER_FILE,
    load_numbers,
    load_optimizer,
    require_same_run,
    save_numbers,
    save_optimizer,
    seal,
    written_beside,
)

if TYPE_CHECKING:
    _Base = Trainer
else:
    _Base = object


class EngramTrainerMixin(_Base):
    """What a grafted model needs of a transformers Trainer: its own groups and rates, a clip that knows rows, rows exchanged between
    processes, checkpoints that are whole and resume bit for bit.

    Goes before any Trainer: `class EngramSFTTrainer(EngramTrainerMixin, trl.SFTTrainer)`.

    Args:
        table_rate_multiplier: the tables' learning rate over `args.learning_rate`; both follow the schedule.
        lora_learning_rate: of PEFT adapters; `args.learning_rate` by default.
        run: what a run has to have in common with one that it resumes, as plain values; checkpoints carry it.

    Other arguments are the Trainer's.

    Raises:
        UserError: DeepSpeed, or settings of FSDP that would cut or lose the memory; in `train`, tables whose files are only read, or a
            checkpoint that is damaged or of another run.
    """

    def __init__(
        self,
        *args: Any,
        table_rate_multiplier: float = 5.0,
        lora_learning_rate: float | None = None,
        run: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.table_rate_multiplier = table_rate_multiplier
        self.lora_learning_rate = lora_learning_rate
        self._scratch: Path | None = None  # where a checkpoint is being written
        super().__init__(*args, **kwargs)
        if self.args.fsdp or self.is_fsdp_enabled:
            _keep_memory_whole(getattr(self.accelerator.state, "fsdp_plugin", None))
        if getattr(self._model, "is_distributed_loading_by_transformers", False):
            raise UserError("the base was sharded when it was loaded: load it whole and give TrainingArguments fsdp=True")
        if self.is_deepspeed_enabled:
            raise UserError("DeepSpeed: its engine takes optimizer and checkpoints over; use DDP, or FSDP version 2")
        self.args._n_gpu = min(self.args.n_gpu, 1)  # DataParallel's replicas would forget which rows they saw
        self._train_batch_size = self.args.train_batch_size  # the Trainer reckoned with all GPUs
        self._run = {**(run or {}), "processes": self.args.world_size}
        tables = [memory.table for memory in memories(self._model)]
        if tables[0].storage.on_disk:
            self.data_collator: Any = Prefetching(self.data_collator, self)
        if dist.is_available() and dist.is_initialized():
            # rows are exchanged by us: DDP would send whole tables
            ours = {id(tensor) for table in tables for tensor in (table.weight, table.seen)}
            named = [*self._model.named_parameters(), *self._model.named_buffers()]
            names = [name for name, tensor in named if id(tensor) in ours]
            nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self._model, names)

    @property
    def _model(self) -> nn.Module:
        assert self.model is not None
        return self.model

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            table = memories(self._model)[0].table
            if table.storage.filled:
                raise UserError(
                    "the tables' files hold a loaded graft and are only read; to train it, load it with trainable=True"
                )
            if table.weight.dtype == torch.float16:
                raise UserError(
                    "a float16 memory cannot be trained (Adam's eps is 0 there): use dtype float32 or bfloat16 for it"
                )
            self.optimizer: Any = EngramAdamW(
                self.parameter_groups(model or self._model),
                lr=self.args.learning_rate,
                betas=(self.args.adam_beta1, self.args.adam_beta2),
                eps=self.args.adam_epsilon,
                weight_decay=0.0,
                storage=table.storage,
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

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        if resume_from_checkpoint is True:
            resume_from_checkpoint = get_last_checkpoint(str(self.args.output_dir))
        if resume_from_checkpoint:
            checkpoint = Path(str(resume_from_checkpoint))
            require_same_run(checkpoint, self._run)
            check_base(self._model, read_config(checkpoint)["base"]["fingerprint"])
        try:
            return super().train(resume_from_checkpoint, *args, **kwargs)
        finally:  # mixed precision is the training's, not the model's
            self.accelerator.unwrap_model(self._model, keep_fp32_wrapper=False)

    def log(self, logs: dict[str, float], *args: Any) -> None:
        if "loss" in logs and self.optimizer is not None:
            # from the optimizer's own count: telemetry must not cost what the table does
            tables = [table for group in self.optimizer.param_groups if group["table"] for table in group["params"]]
            logs["rows_touched"] = sum(self.optimizer.state.get(table, {}).get("touched", 0) for table in tables)
            logs["table_rate"] = logs["learning_rate"] * self.table_rate_multiplier
        super().log(logs, *args)

    def _has_mixed_mesh_grads(self, model: nn.Module) -> bool:
        return False  # the Trainer's clip for such cannot take sparse gradients; ours takes all

    def compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        silent = inputs.pop(SILENT, None)
        with without_ngrams(self._model, silent):
            return super().compute_loss(model, inputs, *args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        memory_parameters(self._model)  # a version of accelerate that shards them all the same is found out here
        loss = super().training_step(*args, **kwargs)
        if dist.is_available() and dist.is_initialized() and self.accelerator.sync_gradients:
            if self.is_fsdp_enabled:
                exchange_gradients(self._model)
            else:
                exchange_rows([memory.table for memory in memories(self._model)])
        return loss

    def _get_output_dir(self, trial: Any) -> str:
        return str(self._scratch or super()._get_output_dir(trial))

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        run = Path(self._get_output_dir(trial))
        name = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        with written_beside(run / name, self.accelerator.wait_for_everyone, self.args.should_save) as self._scratch:
            try:
                super()._save_checkpoint(model, trial)
                best = self.state.best_model_checkpoint
                if best is not None and Path(best).parent == self._scratch:  # the Trainer noted where it wrote it
                    self.state.best_model_checkpoint = str(run / name)
                    if self.args.should_save:
                        self.state.save_to_json(str(self._scratch / name / TRAINER_STATE_NAME))
                self.accelerator.wait_for_everyone()
                if self.args.should_save:
                    seal(self._scratch / name, self._run)
            finally:
                self._scratch = None
        if self.args.should_save:
            rotate_checkpoints(str(run), self.args.save_total_limit, self.state.best_model_checkpoint, use_mtime=True)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if not self.is_fsdp_enabled:
            return super().save_model(output_dir, _internal_call)
        self._save(output_dir)  # the Trainer would gather the base first, which is not written
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        if self.args.should_save or self.is_fsdp_enabled:
            save_graft(self._model, output_dir or str(self.args.output_dir))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        assert self.optimizer is not None and self.lr_scheduler is not None
        if self.args.should_save or self.is_fsdp_enabled:
            save_optimizer(self.optimizer, Path(output_dir) / OPTIMIZER_FILE, self.args.should_save)
        if self.args.should_save:
            save_numbers(self.lr_scheduler, Path(output_dir) / SCHEDULER_FILE)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            assert self.optimizer is not None and self.lr_scheduler is not None
            load_optimizer(self.optimizer, Path(checkpoint) / OPTIMIZER_FILE)
            load_numbers(self.lr_scheduler, Path(checkpoint) / SCHEDULER_FILE)

    def _save_scaler(self, output_dir: str) -> None:
        if self.args.should_save and getattr(self.accelerator, "scaler", None) is not None:
            save_numbers(self.accelerator.scaler, Path(output_dir) / SCALER_FILE)

    def _load_scaler(self, checkpoint: str | None) -> None:
        if checkpoint is not None and getattr(self.accelerator, "scaler", None) is not None:
            load_numbers(self.accelerator.scaler, Path(checkpoint) / SCALER_FILE)

    def _save_rng_state(self, output_dir: str) -> None:
        Path(output_dir).mkdir(parents=True, exist_ok=True)  # a process can be here before the first has written
        save_random(Path(output_dir) / f"random_{self.args.process_index}.safetensors")

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            load_random(Path(checkpoint) / f"random_{self.args.process_index}.safetensors")

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        model = model or self._model  # read here: the Trainer would open whatever weights, pickles too, lie in the directory
        if adapter_names(model):
            fill_adapters(model, Path(resume_from_checkpoint))
        fill(model, read_tensors(Path(resume_from_checkpoint), [TENSOR_FILE]))

    def _load_best_model(self) -> None:
        assert self.state.best_model_checkpoint is not None
        self._load_from_checkpoint(self.state.best_model_checkpoint)


class EngramTrainer(EngramTrainerMixin, Trainer):
    """transformers' Trainer for a grafted model; see `EngramTrainerMixin`."""


def _keep_memory_whole(plugin: Any) -> None:
    """Have accelerate shard the base without the memory. Raises `UserError` where the memory would be lost or cut."""
    if plugin is None:
        raise UserError(
            "fsdp: accelerate shards on accelerators only, these processes are on CPUs: leave fsdp out and train with DDP"
        )
    if getattr(plugin, "fsdp_version", 1) != 2:
        raise UserError("fsdp version 1 would cut tables into its flat shards: use version 2 (fsdp_config={'version': 2})")
    for option, instead in {
        "cpu_ram_efficient_loading": "it would leave the memory without values; load the base on every process",
        "activation_checkpointing": "it would hide the layers that carry a memory; use gradient_checkpointing=True",
    }.items():
        if getattr(plugin, option, False):
            raise UserError(f"fsdp_config sets {option}: {instead}")
    if not isinstance(plugin.ignored_modules, str | None):
        raise UserError("fsdp ignored_modules: give names as a pattern (a text), the memory's are added to it")
    plugin.ignored_modules = "|".join(filter(None, [plugin.ignored_modules, r".*\.engram(_pack_[^.]+)?"]))
