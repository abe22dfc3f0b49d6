"""A recipe: every option of a run, in one typed tree that is read from YAML, overridden by flags, checked, and saved with the run."""

import dataclasses
import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_type_hints

import yaml

from engram_graft.config import DTYPES, EngramConfig
from engram_graft.errors import UserError


@dataclasses.dataclass(frozen=True)
class LoraOptions:
    """PEFT LoRA beside the memory. Args: rank: 0 trains the memory alone; learning_rate: keep it gentle, LoRA learns facts too and
    drifts; target_modules: names of the base's linear layers."""

    rank: int = 8
    alpha: int = 16
    dropout: float = 0.0
    learning_rate: float = 1e-4
    target_modules: tuple[str, ...] = ("q_proj", "v_proj")


@dataclasses.dataclass(frozen=True)
class TrainOptions:
    """Args:
    forms: prompts of each fact that are trained, the others are probed as paraphrases; null trains all.
    max_steps: optimizer steps at most.
    batch_size: examples (prompts, or blocks of text) a step, per device.
    gradient_accumulation_steps: batches a step.
    learning_rate: of the memory's dense parts; the tables' is `table_rate_multiplier` times as high.
    weight_decay: of dense weights; tables have none.
    lr_scheduler_type, warmup_steps: as transformers' TrainingArguments.
    max_grad_norm: joint norm that dense and row gradients are clipped to; 0 does not clip.
    max_length: tokens an encoded fact may have.
    block_size: tokens of a block of plain text.
    recall_every: steps between measurements of recall while training; 0 measures none.
    stop_at_recall: end early once recall on all trained prompts is this high; null trains all steps.
    save_steps: steps between checkpoints; 0 saves at the end only.
    seed: of the data order and of LoRA's initial values; the memory has its own in `engram`.
    trainer: further TrainingArguments by name, e.g. {bf16: true, report_to: [tensorboard]}.
    """

    forms: int | None = None
    max_steps: int = 100
    batch_size: int = 32
    gradient_accumulation_steps: int = 1
    learning_rate: float = 1e-3
    table_rate_multiplier: float = 5.0
    weight_decay: float = 0.0
    lr_scheduler_type: str = "constant"
    warmup_steps: int = 0
    max_grad_norm: float = 1.0
    max_length: int = 512
    block_size: int = 256
    recall_every: int = 10
    stop_at_recall: float | None = None
    save_steps: int = 0
    seed: int = 0
    trainer: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class ProbeOptions:
    """Args: batch_size: prompts at a time; max_new_tokens: of a free answer; examples: answers shown side by side at the end."""

    batch_size: int = 64
    max_new_tokens: int = 12
    examples: int = 3


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Args:
    base: hub id, directory, .gguf file or alias.
    data: facts or text; see `engram_graft.data.load_data`.
    output: the graft directory to make.
    dtype: the base's.
    merged: also export a merged model to this directory; null does not.
    engram, lora, train, probe: the parts.
    """

    base: str | None = None
    data: str | None = None
    output: str | None = None
    dtype: str = "float32"
    merged: str | None = None
    engram: EngramConfig = dataclasses.field(default_factory=EngramConfig)
    lora: LoraOptions = dataclasses.field(default_factory=LoraOptions)
    train: TrainOptions = dataclasses.field(default_factory=TrainOptions)
    probe: ProbeOptions = dataclasses.field(default_factory=ProbeOptions)

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise UserError(f"dtype={self.dtype!r}: must be one of {', '.join(DTYPES)}")
        train, lora, probe = self.train, self.lora, self.probe
        positive: tuple[tuple[str, float], ...] = (
            ("train.max_steps", train.max_steps),
            ("train.batch_size", train.batch_size),
            ("train.gradient_accumulation_steps", train.gradient_accumulation_steps),
            ("train.learning_rate", train.learning_rate),
            ("train.table_rate_multiplier", train.table_rate_multiplier),
            ("train.max_length", train.max_length),
            ("train.block_size", train.block_size - 1),
            ("lora.alpha", lora.alpha),
            ("probe.batch_size", probe.batch_size),
            ("probe.max_new_tokens", probe.max_new_tokens),
        )
        for name, value in positive:
            if not value > 0:
                raise UserError(f"{name}={value}: must be above {1 if name == 'train.block_size' else 0}")
        for name, value in (
            ("lora.rank", lora.rank),
            ("train.recall_every", train.recall_every),
            ("train.save_steps", train.save_steps),
        ):
            if value < 0:
                raise UserError(f"{name}={value}: must be 0 or more")
        if train.forms is not None and train.forms < 1:
            raise UserError(f"train.forms={train.forms}: must be 1 or more, or null for all prompts")
        if train.stop_at_recall is not None and not (0 < train.stop_at_recall <= 1 and train.recall_every):
            raise UserError(
                f"train.stop_at_recall={train.stop_at_recall}: must be in (0, 1], with train.recall_every above 0"
            )

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as written to `recipe.yaml`."""
        return {k: _plain(v) for k, v in dataclasses.asdict(self).items()}


def load_recipe(path: str | Path | None = None, overrides: Mapping[str, Any] | None = None) -> Recipe:
    """The recipe in a YAML file, with overrides by dotted name, e.g. {"train.max_steps": 40}.

    Raises:
        UserError: no such file, not YAML, an unknown key or a value of the wrong type.
    """
    values: dict[str, Any] = {}
    if path is not None:
        try:
            loaded = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"recipe {path}: cannot be read ({getattr(error, 'strerror', None) or error})") from error
        except yaml.YAMLError as error:
            raise UserError(f"recipe {path}: not YAML ({' '.join(str(error).split())})") from error
        if not isinstance(loaded, dict):
            raise UserError(f"recipe {path}: must be a mapping of options, found {type(loaded).__name__}")
        values = loaded
    for dotted, value in (overrides or {}).items():
        part = values
        *parents, last = dotted.split(".")
        for parent in parents:
            if not isinstance(part.setdefault(parent, {}), dict):
                raise UserError(f"recipe option {dotted!r}: {parent} is a value, not a section")
            part = part[parent]
        part[last] = value
    return _build(Recipe, values, "")


def parse_setting(text: str) -> tuple[str, Any]:
    """ "train.max_steps=40" as a dotted name and a YAML value."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise UserError(f"--set {text!r}: must look like train.max_steps=40")
    try:
        return name, yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise UserError(f"--set {text!r}: the value is not YAML") from error


def _build(kind: type, values: Any, prefix: str) -> Any:
    if not isinstance(values, dict):
        raise UserError(
            f"recipe section {prefix.rstrip('.')!r}: must be a mapping of options, found {type(values).__name__}"
        )
    fields = {field.name: field for field in dataclasses.fields(kind)}
    hints = get_type_hints(kind)
    built = {}
    for name, value in values.items():
        if name not in fields:
            close = difflib.get_close_matches(str(name), fields, 1)
            hint = f"did you mean {prefix}{close[0]}?" if close else f"the options here are {', '.join(fields)}"
            raise UserError(f"unknown recipe option {prefix}{name!s}: {hint}")
        if dataclasses.is_dataclass(hints[name]):
            built[name] = _build(hints[name], value, f"{prefix}{name}.")
        else:
            built[name] = _typed(f"{prefix}{name}", hints[name], value)
    return kind(**built)


def _typed(name: str, hint: Any, value: Any) -> Any:
    """`value` as a field of type `hint` takes it; YAML reads 1e-3 as a text and 1 as a whole number."""
    wants = str(hint)
    if value is None and "None" in wants:
        return None
    if hint is dict or wants.startswith("dict"):
        fits = isinstance(value, dict)
    elif wants.startswith("tuple[str"):
        fits, value = isinstance(value, list | tuple) and all(isinstance(v, str) for v in value), tuple(value or ())
    elif wants.startswith("tuple[int"):
        return value  # EngramConfig says what is wrong
    elif "float" in wants:
        try:
            value = float(value) if isinstance(value, str) else value
        except ValueError:
            value = None
        fits = isinstance(value, int | float) and not isinstance(value, bool)
        value = float(value) if fits else value
    else:
        kinds = tuple(k for k in (hint.__args__ if hasattr(hint, "__args__") else (hint,)) if isinstance(k, type))
        fits = isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))
    if not fits:
        raise UserError(f"recipe option {name}={value!r}: must be {getattr(hint, '__name__', hint)}")
    return value


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return list(value) if isinstance(value, tuple) else value
