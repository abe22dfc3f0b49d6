"""The files of a graft: their names, how they describe themselves, and reading them with every check that needs no base."""

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from engram_graft.bases import fingerprint
from engram_graft.config import EngramConfig
from engram_graft.errors import UserError
from engram_graft.grafted import find_graft, memories
from engram_graft.hashing import HashPlan
from engram_graft.locate import unwrap
from engram_graft.params import is_memory

FORMAT = 2
CONFIG_FILE, TENSOR_FILE = "engram_config.json", "engram.safetensors"
ADAPTER_FILE, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
_INTEGERS = ("lookup", "multipliers", "primes", "offsets", "pad")


def read_graft(directory: Path) -> tuple[dict[str, Any], EngramConfig, dict[str, Tensor], HashPlan]:
    """What a directory holds, checked as far as it can be without its base: description, config, tensors, integers."""
    described = read_config(directory)
    config = EngramConfig.from_dict(described["config"])
    for name, expected in described["files"].items():
        if not (directory / name).is_file():
            raise UserError(f"{directory / name}: missing; {CONFIG_FILE} lists it")
        if file_hash(directory / name) != expected:
            raise UserError(f"{directory / name}: corrupt (its sha256 is not the one in {CONFIG_FILE}); copy the graft anew")
    tensors = read_tensors(directory, [name for name in described["files"] if name not in (ADAPTER_FILE, ADAPTER_CONFIG)])
    return described, config, tensors, _plan(directory, config, tensors)


def memory_parts(model: nn.Module, pack: str | None = None) -> dict[str, nn.Module]:
    """The modules of the memory (of this name) by the names they have on disk."""
    return {"hash": find_graft(model, pack)} | {f"layers.{memory.layer_id}": memory for memory in memories(model, pack)}


def memory_tensors(model: nn.Module, pack: str | None = None) -> dict[str, Tensor]:
    """All tensors of the memory by the names they have on disk: "hash.primes", "layers.2.value_proj.weight"."""
    parts = memory_parts(model, pack)
    return {f"{part}.{name}": tensor for part, module in parts.items() for name, tensor in module.state_dict().items()}


def canonical_name(name: str) -> str:
    """A tensor's name without the base's path: the same for every architecture and wrapper."""
    if addresses := re.search(r"(?:^|\.)engram_hash(?:_pack_[^.]+)?\.(.+)$", name):
        return f"hash.{addresses[1]}"
    layer = re.search(r"(\d+)\.engram(?:_pack_[^.]+)?\.(.+)$", name)
    assert layer is not None, name
    return f"layers.{layer[1]}.{layer[2]}"


def describe(
    model: nn.Module,
    files: Mapping[str, str],
    merged: bool = False,
    of_base: dict[str, Any] | None = None,
    pack: str | None = None,
) -> dict[str, Any]:
    """The contents of `engram_config.json`; `files` maps each safetensors file to its sha256, `of_base` is the base's fingerprint if
    it is known, `pack` the name of the memory if there are several."""
    ngram_hash, base = find_graft(model, pack), unwrap(model)
    dtype = str(memories(model, pack)[0].key_norm.dtype).removeprefix("torch.")  # model.to(dtype) takes the memory along
    return {
        "format": FORMAT,
        "config": {**ngram_hash.config.to_dict(), "dtype": dtype},
        "tokenizer": {
            "fingerprint": ngram_hash.token_map.fingerprint,
            "ids": len(ngram_hash.token_map.lookup),
            "compressed": ngram_hash.token_map.size,
        },
        "base": {
            "name": base.name_or_path,
            "dtype": str(base.dtype).removeprefix("torch."),
            "fingerprint": fingerprint(model) if of_base is None else of_base,
        },
        "merged": merged,
        "files": dict(files),
    }


def read_config(directory: Path) -> dict[str, Any]:
    """The checked contents of `engram_config.json`."""
    path = directory / CONFIG_FILE
    if not path.is_file():
        raise UserError(
            f"{directory}: no graft here ({CONFIG_FILE} is missing); give a directory that train, save_graft or export wrote"
        )
    try:
        described = json.loads(path.read_text(encoding="utf-8"))
        if described["format"] != FORMAT:
            raise UserError(
                f"{path}: format {described['format']!r}, this version reads {FORMAT}; use the version of engram-graft that wrote it"
            )
        for section, keys in {
            "tokenizer": {"fingerprint", "ids", "compressed"},
            "base": {"name", "dtype", "fingerprint"},
        }.items():
            if missing := keys - described[section].keys():
                raise KeyError(f"{section}.{min(missing)}")
        for name in described["files"]:
            if Path(name).name != name:
                raise UserError(f"{path}: file name {name!r} leaves the directory; refused")
        EngramConfig.from_dict(described["config"])
        bool(described["merged"])
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: corrupt ({type(error).__name__}: {error}); copy the graft anew") from error
    return dict(described)


def file_hash(path: Path) -> str:
    """sha256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_tensors(directory: Path, files: list[str]) -> dict[str, Tensor]:
    """The memory's tensors in these safetensors files, by canonical name; in a merged directory the base's are passed over."""
    tensors = {}
    for name in files:
        try:
            with safe_open(directory / name, framework="pt") as file:
                for key in file.keys():  # noqa: SIM118 (a safetensors file is no dict)
                    if name == TENSOR_FILE:
                        tensors[key] = file.get_tensor(key)
                    elif is_memory(key):
                        tensors[canonical_name(key)] = file.get_tensor(key)
        except (SafetensorError, OSError) as error:
            raise UserError(f"{directory / name}: corrupt or truncated ({error}); copy the graft anew") from error
    return tensors


def _plan(directory: Path, config: EngramConfig, tensors: Mapping[str, Tensor]) -> HashPlan:
    """The stored integers, checked against the config and the tables."""
    missing = [f"hash.{name}" for name in _INTEGERS if f"hash.{name}" not in tensors]
    if missing:
        raise UserError(f"{directory}: the graft lacks {', '.join(missing)}; without these integers its rows cannot be found")
    shapes = {"multipliers": config.max_ngram_size, "primes": config.heads, "offsets": config.heads}
    for name, columns in shapes.items():
        if tuple(tensors[f"hash.{name}"].shape) != (len(config.layer_ids), columns):
            raise UserError(
                f"{directory}: hash.{name} has shape {list(tensors[f'hash.{name}'].shape)}, the config asks for another"
            )
    arrays = {name: tensors[f"hash.{name}"].numpy() for name in _INTEGERS}
    plan = HashPlan(arrays["multipliers"], arrays["primes"], arrays["offsets"], arrays["lookup"], int(arrays["pad"]))
    for layer_id, rows in zip(config.layer_ids, plan.table_rows, strict=True):
        names = [f"layers.{layer_id}.table.{leaf}" for leaf in ("rows", "values")]
        if missing := [name for name in names if name not in tensors]:
            raise UserError(f"{directory}: the graft's tensors do not fit its config: missing {', '.join(missing)}")
        ids = tensors[names[0]]
        if ids.numel() and not 0 <= int(ids.flatten()[-1]) < rows:
            raise UserError(f"{directory}: {names[0]} goes up to {int(ids.flatten()[-1])}, its primes add up to {rows} rows")
    return plan
