"""A model of transformers with a trained memory in it, rebuilt from its config and files alone.

An export ships this module, with those it stands on, as the directory's modelling code: `bundle` writes them into one file.
"""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping

from engram_graft.codes import CODES
from engram_graft.config import DTYPES, EngramConfig
from engram_graft.errors import UserError
from engram_graft.hashing import HashPlan
from engram_graft.integrity import (
    CODE_FILE,
    READ_OF_MERGED,
    check_files,
    check_listed,
    file_hash,
    read_description,
    write_description,
)
from engram_graft.layer import Engram
from engram_graft.recall import Recall, install, put
from engram_graft.rows import LearnedRows

_KINDS = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "int64": "I64", "uint8": "U8"}  # as safetensors names them
_KINDS |= {"float8_e4m3fn": "F8_E4M3", "float8_e8m0fnu": "F8_E8M0"}
_SHARDINGS = ("model.safetensors", "model.safetensors.index.json", "model-*-of-*.safetensors")  # of one model, only one is there


class EngramModel(PreTrainedModel):
    """What an exported model adds to its base's class. `config.engram_graft` says where and what the memory is; its keys:

    "described" (what `engram_config.json` says beside its files), "decoder" and "layers" (paths of modules), "width" (channels of a
    residual stream), "keywords" (whether the decoder hands keywords on), "ids" (rows of the look-up) and "rows" ({layer: [rows of its
    table, rows learned]}).
    """

    _auto_class = "AutoModelForCausalLM"  # `save_pretrained` takes this file along
    base_class: type

    def __init__(self, config: Any, *args: Any, **kwargs: Any):
        super().__init__(config, *args, **kwargs)
        told = config.engram_graft
        memory, stored = EngramConfig.from_dict(told["described"]["config"]), told["described"]["tables"]
        decoder: Any = self.get_submodule(told["decoder"])
        layers: Any = decoder.get_submodule(told["layers"])
        recall = Recall(memory, _no_plan(memory, told["ids"]), told["keywords"])
        parts = []
        device = torch.get_default_device()  # "meta" while transformers loads: a layer may have put some of its own elsewhere
        for index, layer_id in enumerate(memory.layer_ids):
            rows = told["rows"][str(layer_id)]
            table: Any = LearnedRows(memory, layer_id, rows[0], rows[1], stored["layout"], stored["code"], device)
            parts.append(Engram(memory, index, table, told["width"], device))
        put(decoder, layers, recall, parts)
        install(self, decoder, layers, told["keywords"])

    @classmethod
    def is_custom_code(cls) -> bool:
        """Not to transformers: for its custom code it leaves buffers out that the base's own class computes after loading."""
        return False

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """As transformers', but strict: missing, unexpected or misshapen tensors are errors, in a directory damaged files too."""
        source = Path(pretrained_model_name_or_path, kwargs.get("subfolder") or "")
        wanted = kwargs.pop("output_loading_info", False)
        if source.is_dir():
            files = read_description(source)["files"]
            check_listed(source, files, READ_OF_MERGED)
            check_files(source, files)
        try:
            loaded: Any = super().from_pretrained(pretrained_model_name_or_path, *args, output_loading_info=True, **kwargs)
        except SafetensorError as error:
            raise UserError(f"{source}: a file is corrupt or truncated ({error}); copy the export anew") from error
        model, found = loaded
        faults = {kind: found[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys") if found.get(kind)}
        if faults:
            raise UserError(f"{source}: its tensors do not fit its config: {faults}; copy the export anew")
        if source.is_dir():
            _require_dtypes(source, model)
        places = {str(place) for place in (getattr(model, "hf_device_map", None) or {}).values()}
        if places - {"meta"} and (away := [part.layer_id for part in _parts(model) if part.key_norm.is_meta]):
            raise UserError(
                f"device_map offloads the memory of layers {away}, which runs before its layer is fetched: keep them on a device"
            )
        return (model, found) if wanted else model

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """As transformers', and `engram_config.json` with the new files' sha256 and the dtypes that they now have."""
        if kwargs.get("push_to_hub"):
            raise UserError("save_pretrained(push_to_hub=True) would push unfinished files: call push_to_hub(name) instead")
        self.config.engram_graft = {**self.config.engram_graft, "described": self._described()}
        directory, main = Path(save_directory), kwargs.get("is_main_process", True)
        patterns = _SHARDINGS if main and not kwargs.get("variant") else ()
        before = [path for pattern in patterns for path in directory.glob(pattern)]
        for path in before:
            os.utime(path, (0, 0))  # a mark: what is written now has another time
        super().save_pretrained(save_directory, *args, **kwargs)
        for path in before:  # transformers leaves an earlier save's, sharded otherwise, and would open them
            if path.exists() and path.stat().st_mtime == 0:
                path.unlink()
        if main:
            describe_files(directory, self.config.engram_graft["described"], type(self).__name__)

    def _described(self) -> dict[str, Any]:
        """The memory as it is by now: `model.half()` takes it along."""
        told = self.config.engram_graft["described"]
        part = _parts(self)[0]
        dtype, base = (str(kind).removeprefix("torch.") for kind in (part.key_norm.dtype, self.dtype))
        if dtype not in DTYPES:
            raise UserError(f"the memory is in {dtype}: call model.float() before saving; the formats are {', '.join(DTYPES)}")
        code = next(name for name, kind in CODES.items() if kind == part.table.values.dtype)
        return {
            **told,
            "config": {**told["config"], "dtype": dtype},
            "base": {**told["base"], "dtype": base, "changed": True},  # it may have been tuned
            "tables": {**told["tables"], "code": code},
        }


def _parts(model: nn.Module) -> list[Engram]:
    return [module for module in model.modules() if isinstance(module, Engram)]


def _require_dtypes(directory: Path, model: nn.Module) -> None:
    """Raise `UserError` if a tensor of the memory has another dtype in its file: loading would have cast it."""
    own = model.state_dict()
    for path in sorted(directory.glob("model*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in (name for name in file.keys() if ".engram" in f".{name}" and name in own):  # noqa: SIM118
                kind, wanted = file.get_slice(name).get_dtype(), _KINDS[str(own[name].dtype).removeprefix("torch.")]
                if kind != wanted:
                    raise UserError(f"{path}: {name} is {kind}, its config says {wanted}; copy the export anew")


def describe_files(directory: Path, described: dict[str, Any], architecture: str) -> None:
    """Finish a directory that `save_pretrained` wrote: its config names the class that its code has, `architecture`, so that a server
    that goes by this name cannot take it for the base; `AutoModelForCausalLM` goes by the model type. `engram_config.json` holds each
    file's sha256."""
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    config["architectures"] = [architecture]
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    names = {*directory.glob("model*.safetensors"), *directory.glob("model*.safetensors.index.json")}
    files = [*sorted(names), directory / "config.json", directory / CODE_FILE]
    write_description(directory, {**described, "files": {path.name: file_hash(path) for path in files}})


def keep_conversions(cls: type[EngramModel]) -> None:
    """Let transformers rename stored tensors for `cls` as for its base's class: it looks the renamings up by class name."""
    base: Any = cls.base_class
    found = get_checkpoint_conversion_mapping(base.__name__) or get_checkpoint_conversion_mapping(base.config_class.model_type)
    if found is not None:
        register_checkpoint_conversion_mapping(cls.__name__, found, overwrite=True)


def _no_plan(config: EngramConfig, ids: int) -> HashPlan:
    """Integers of the right shapes, to be overwritten by the files'."""
    heads = np.ones((len(config.layer_ids), config.heads), dtype=np.int64)
    multipliers = np.ones((len(config.layer_ids), config.max_ngram_size), dtype=np.int64)
    return HashPlan(multipliers, heads, np.zeros_like(heads), np.zeros(ids, dtype=np.int64), 0, config.resets)
