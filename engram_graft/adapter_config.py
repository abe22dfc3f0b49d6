"""The LoRA adapter of a graft directory, checked before PEFT sees it: PEFT's configs can name modules to import, repositories to fetch,
other layers to build and base weights to change."""

import dataclasses
import json
import warnings
from pathlib import Path
from typing import Any

from peft import LoraConfig
from safetensors import SafetensorError, safe_open

from engram_graft.errors import UserError, first_line

# what may differ from LoRA's defaults, and as what; the rest is for starting an adapter, or changes more than the layers it is on
_NAMES = (str, list, type(None))
_ALLOWED: dict[str, tuple[type, ...]] = {
    "r": (int,),
    "lora_alpha": (int, float),
    "lora_dropout": (int, float),
    "target_modules": _NAMES,
    "exclude_modules": _NAMES,
    "modules_to_save": (list, type(None)),
    "target_parameters": (list, type(None)),
    "layers_to_transform": (int, list, type(None)),
    "layers_pattern": _NAMES,
    "trainable_token_indices": (list, dict, type(None)),
    "rank_pattern": (dict,),
    "alpha_pattern": (dict,),
    "fan_in_fan_out": (bool,),
    "use_rslora": (bool,),
    "use_dora": (bool,),
    "lora_bias": (bool,),
    "ensure_weight_tying": (bool,),
    "init_lora_weights": (bool, str),  # how the values began that are in the file
}
# said about the adapter, of no account for loading it: left out of what PEFT gets
_NOTES = {"auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision", "task_type"}
_DTYPES = ("F32", "BF16", "F16")
STARTS = (True, False, "gaussian", "orthogonal", "mica")  # values of `init_lora_weights`; the others change the base's weights


def read_adapter(config_file: Path, tensor_file: Path) -> LoraConfig:
    """The checked config of an adapter whose tensors are in `tensor_file`; nothing is imported, fetched or allocated.

    Raises:
        UserError: it is none of LoRA's, asks for what loading a graft does not do, or for ranks its tensors do not have.
    """
    try:
        found = json.loads(config_file.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError(f"a {type(found).__name__}")
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{config_file}: corrupt ({first_line(error)}); copy the graft anew") from error
    if found.get("peft_type") != "LORA":
        raise UserError(f"{config_file}: peft_type {found.get('peft_type')!r}: grafts have LoRA adapters ('LORA') only")
    plain = json.loads(json.dumps(dataclasses.asdict(LoraConfig()), default=str))
    kept: dict[str, Any] = {}
    for name, value in found.items():
        if name in _ALLOWED:
            if not isinstance(value, _ALLOWED[name]) or (isinstance(value, bool) and bool not in _ALLOWED[name]):
                raise UserError(f"{config_file}: {name}={value!r} is a {type(value).__name__}, which it cannot be")
            kept[name] = value
        elif name not in _NOTES | {"peft_type"} and value not in (plain.get(name), None, {}, []):
            raise UserError(
                f"{config_file}: {name}={value!r} is not loaded with a graft; train without it, or merge it into the base"
            )
    if kept.get("init_lora_weights", True) not in STARTS:
        raise UserError(
            f"{config_file}: init_lora_weights={kept['init_lora_weights']!r} changes the base's weights, which a graft leaves as they "
            "are; start LoRA from its default"
        )
    _check_tensors(config_file, tensor_file, kept)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return LoraConfig(**kept, task_type=found.get("task_type"))
    except (ValueError, TypeError) as error:
        raise UserError(f"{config_file}: PEFT refuses it ({first_line(error)})") from error


def _check_tensors(config_file: Path, tensor_file: Path, kept: dict[str, Any]) -> None:
    """Matrices are made before they are filled: none may be asked for that is larger than the file's."""
    try:
        with safe_open(tensor_file, framework="pt") as file:
            slices = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118 (a safetensors file is no dict)
            longest = max((max(part.get_shape(), default=1) for part in slices.values()), default=0)
            odd = {key: part.get_dtype() for key, part in slices.items() if part.get_dtype() not in _DTYPES}
    except (SafetensorError, OSError) as error:
        raise UserError(f"{tensor_file}: corrupt or truncated ({first_line(error)}); copy the graft anew") from error
    if odd:
        raise UserError(f"{tensor_file}: {min(odd)} is {odd[min(odd)]}; the dtypes of adapters are {', '.join(_DTYPES)}")
    for name, rank in {"r": kept.get("r", 8), **kept.get("rank_pattern", {})}.items():
        if not isinstance(rank, int) or not 1 <= rank <= longest:
            raise UserError(f"{config_file}: rank {rank!r} ({name}): {tensor_file.name} has no tensor so large")
