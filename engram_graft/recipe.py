"""A recipe: every option of a run, in one typed tree that is read from YAML, overridden by flags, checked, and saved with the run."""

import dataclasses
import difflib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_type_hints

import yaml
from transformers import SchedulerType

from engram_graft.config import DTYPES, EngramConfig
from engram_graft.errors import UserError

TIERS = ("resident", "mmap")


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
    stop_ngrams: n-grams that the base itself would write this often or more in a million tokens are not learned: they would speak in
        any text; 0 learns all.
    background: text file or folder that this is judged on; null: some 6,000 tokens that the base writes by itself.
    max_length: tokens an encoded fact or chat may have.
    block_size: tokens of a block of plain text.
    recall_prompts: trained prompts, evenly spread, that recall is measured on while training.
    recall_every: steps between measurements of recall and of the gates while training; 0 measures none.
    stop_at_recall: end early once recall while training is this high; null trains all steps.
    save_steps: steps between checkpoints, all of which are kept; null: every 50 steps, the last one kept until the run is done, for
        `--resume`; 0: none.
    validation: share of a text's blocks that is held out for evaluation (`trainer: {eval_strategy: steps}`); facts are held out by
        their split "validation".
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
    stop_ngrams: float = 0.0
    background: str | None = None
    max_length: int = 512
    block_size: int = 256
    recall_every: int = 10
    recall_prompts: int = 100
    stop_at_recall: float | None = None
    save_steps: int | None = None
    validation: float = 0.0
    seed: int = 0
    trainer: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class TeachOptions:
    """Facts that are found in wordings they were not trained in; see `engram_graft.forms`.

    Args:
        facts: invented facts for each relation of the data, trained in every wording of it; 0 teaches none.
        templates: further wordings by any name, e.g. {exports: ["The main export of {} is", "{} sells"]}, each with {} for the subject;
            they join the relation of the data that one of them is a wording of.
        seed: of the invented names.
    """

    facts: int = 0
    templates: dict[str, Any] = dataclasses.field(default_factory=dict)
    seed: int = 0

    def __post_init__(self) -> None:
        _at_least("teach", self, 0, "facts", "seed")
        for name, forms in self.templates.items():
            if not isinstance(forms, list) or not all(
                isinstance(form, str) and form.count("{}") == 1 and form.strip() != "{}" for form in forms
            ):
                raise UserError(
                    f"teach.templates: {name} must be a list of wordings, each with words and one {{}} where the subject goes"
                )


@dataclasses.dataclass(frozen=True)
class ProbeOptions:
    """Args: batch_size: prompts at a time; max_new_tokens: of a free answer; examples: answers shown side by side at the end."""

    batch_size: int = 64
    max_new_tokens: int = 12
    examples: int = 3

    def __post_init__(self) -> None:
        _at_least("probe", self, 1, "batch_size", "max_new_tokens")
        _at_least("probe", self, 0, "examples")


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Args:
    base: hub id, directory, .gguf file or alias.
    data: facts, chats or text; see `engram_graft.data.load_data`.
    output: the graft directory to make.
    dtype: the base's.
    table_tier: where tables and their optimizer state are: "resident" in memory; "mmap" in files, for tables larger than memory; null:
        as table_dir says.
    table_dir: directory of those files.
    merged: also export a merged model to this directory; null does not.
    engram, lora, train, teach, probe: the parts.
    """

    base: str | None = None
    data: str | None = None
    output: str | None = None
    dtype: str = "float32"
    table_tier: str | None = None
    table_dir: str | None = None
    merged: str | None = None
    engram: EngramConfig = dataclasses.field(default_factory=EngramConfig)
    lora: LoraOptions = dataclasses.field(default_factory=LoraOptions)
    train: TrainOptions = dataclasses.field(default_factory=TrainOptions)
    teach: TeachOptions = dataclasses.field(default_factory=TeachOptions)
    probe: ProbeOptions = dataclasses.field(default_factory=ProbeOptions)

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise UserError(f"dtype={self.dtype!r}: must be one of {', '.join(DTYPES)}")
        require_tier(self.table_tier, self.table_dir)
        train, lora = self.train, self.lora
        _at_least(
            "train", train, 1, "forms", "max_steps", "batch_size", "gradient_accumulation_steps", "max_length", "recall_prompts"
        )
        _at_least("train", train, 2, "block_size")
        _at_least(
            "train",
            train,
            0,
            "recall_every",
            "save_steps",
            "stop_ngrams",
            "seed",
            "warmup_steps",
            "weight_decay",
            "max_grad_norm",
        )
        _at_least("lora", lora, 0, "rank")
        _at_least("lora", lora, 1, "alpha")
        if train.lr_scheduler_type not in (schedules := [schedule.value for schedule in SchedulerType]):
            raise UserError(f"train.lr_scheduler_type={train.lr_scheduler_type!r}: must be one of {', '.join(schedules)}")
        rates = {
            "train.learning_rate": train.learning_rate,
            "train.table_rate_multiplier": train.table_rate_multiplier,
            "lora.learning_rate": lora.learning_rate,
        }
        for name, value in rates.items():
            if not value > 0:
                raise UserError(f"{name}={value}: must be above 0")
        if not 0 <= train.validation < 1:
            raise UserError(f"train.validation={train.validation}: must be from 0 to below 1")
        if train.background is not None and not train.stop_ngrams:
            raise UserError(f"train.background={train.background}: is for train.stop_ngrams, which is 0; set both or neither")
        if not 0 <= lora.dropout < 1:
            raise UserError(f"lora.dropout={lora.dropout}: must be from 0 to below 1")
        if train.stop_at_recall is not None and not (0 < train.stop_at_recall <= 1 and train.recall_every):
            raise UserError(f"train.stop_at_recall={train.stop_at_recall}: must be in (0, 1], with train.recall_every above 0")

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as written to `recipe.yaml`."""
        return {k: _plain(v) for k, v in dataclasses.asdict(self).items()}


def require_tier(tier: str | None, directory: str | None) -> None:
    """Raise `UserError` unless tier and directory of the tables go together; a directory alone means files."""
    if tier is not None and tier not in TIERS:
        raise UserError(f"table_tier={tier!r}: must be one of {', '.join(TIERS)}")
    if tier is not None and (tier == "mmap") != (directory is not None):
        raise UserError(
            f"table_tier={tier!r} with table_dir={directory!r}: files need a directory and nothing else does; give --table-dir DIR "
            "for tables in files, or neither"
        )


def _at_least(section: str, options: Any, least: int, *names: str) -> None:
    for name in names:
        value = getattr(options, name)
        if value is not None and value < least:
            raise UserError(f"{section}.{name}={value}: must be {least} or more")


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
        raise UserError(f"recipe section {prefix.rstrip('.')!r}: must be a mapping of options, found {type(values).__name__}")
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


def _typed(name: str, hint: Any, given: Any) -> Any:
    """`given` as a field of type `hint` takes it; YAML reads 1e-3 as a text and 1 as a whole number."""
    wants = str(hint)
    if (given is None and "None" in wants) or wants.startswith("tuple[int"):
        return given  # of the latter EngramConfig says what is wrong
    value = given
    if wants.startswith("dict"):
        fits, kind = isinstance(given, dict), "a mapping"
    elif wants.startswith("tuple[str"):
        kind = "a list of names"
        fits = isinstance(given, list | tuple) and all(isinstance(v, str) for v in given)
        value = tuple(given) if fits else given
    elif "float" in wants:
        kind = "a number"
        try:
            value = float(given) if isinstance(given, str | int | float) and not isinstance(given, bool) else None
        except ValueError:
            value = None
        fits = value is not None and math.isfinite(value)
    else:
        kinds = tuple(k for k in getattr(hint, "__args__", (hint,)) if isinstance(k, type))
        kind = {int: "a whole number", str: "a text", bool: "true or false"}[kinds[0]]
        fits = isinstance(given, kinds) and (bool in kinds or not isinstance(given, bool))
    if not fits:
        raise UserError(f"recipe option {name}={given!r}: must be {kind}")
    return value


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return list(value) if isinstance(value, tuple) else value
