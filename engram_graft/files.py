"""The files of a graft: their names, how they describe themselves, and reading them with every check that needs no base."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from engram_graft.bases import fingerprint
from engram_graft.card import model_card
from engram_graft.codes import CODES
from engram_graft.config import EngramConfig
from engram_graft.errors import UserError
from engram_graft.grafted import find_graft, memories
from engram_graft.hashing import HashPlan
from engram_graft.integers import stored_plan
from engram_graft.integrity import (
    CODE_FILE,
    CONFIG_FILE,
    READ_OF_MERGED,
    check_files,
    check_listed,
    file_hash,
    read_description,
    write_description,
)
from engram_graft.locate import unwrap
from engram_graft.params import is_memory
from engram_graft.rows import TABLES
from engram_graft.stored import learned_rows

FORMAT = 3
TENSOR_FILE = "engram.safetensors"
ADAPTER_FILE, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
READ_OF_GRAFT = (TENSOR_FILE, "adapter_model.*", ADAPTER_CONFIG)


def read_graft(directory: Path) -> tuple[dict[str, Any], EngramConfig, dict[str, Tensor], HashPlan]:
    """What a directory holds, checked as far as it can be without its base: description, config, tensors, integers."""
    described = read_config(directory)
    config = EngramConfig.from_dict(described["config"])
    check_listed(directory, described["files"], READ_OF_MERGED if described["merged"] else READ_OF_GRAFT)
    unfetched = {CODE_FILE} if not (directory / CODE_FILE).exists() else set()  # code is not run here: a download leaves it out
    check_files(directory, {name: digest for name, digest in described["files"].items() if name not in unfetched})
    tensors = read_tensors(directory, memory_files(described))
    plan = stored_plan(directory, config, tensors)
    _check_taps(directory, config, tensors)
    for index, layer_id in enumerate(config.layer_ids):
        name, stored = f"layers.{layer_id}.table", described["tables"]
        wanted = plan.table_rows[index], config.head_dim, getattr(torch, config.dtype)
        try:
            rows, values = learned_rows(name, tensors, stored["layout"], stored["code"], *wanted)
        except UserError as error:
            raise UserError(f"{directory}: the graft's tensors do not fit its config: {error}") from error
        for leaf in ("seen", "scale"):
            tensors.pop(f"{name}.{leaf}", None)
        tensors |= {f"{name}.rows": rows, f"{name}.values": values}
    return described, config, tensors, plan


def memory_files(described: Mapping[str, Any]) -> list[str]:
    """The files that hold tensors of the memory, in a merged directory beside the base's."""
    return sorted(name for name in described["files"] if name.endswith(".safetensors") and name != ADAPTER_FILE)


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


def describe(model: nn.Module, of_base: dict[str, Any] | None = None, pack: str | None = None) -> dict[str, Any]:
    """What `engram_config.json` says of a graft beside its files; `of_base` is the base's fingerprint if it is known, `pack` the name of
    the memory if there are several."""
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
        "merged": False,
        "tables": {"layout": "sparse", "code": dtype},
    }


def write_graft(directory: Path, tensors: Mapping[str, Tensor], described: Mapping[str, Any], results: Path) -> None:
    """Write a memory's tensors (canonical names), its description and its model card beside the adapter that `directory` may hold;
    `results` is where identity and probe results lie."""
    save_file({name: t.contiguous() for name, t in tensors.items()}, directory / TENSOR_FILE, metadata={"format": "pt"})
    files = [name for name in (TENSOR_FILE, ADAPTER_FILE, ADAPTER_CONFIG) if (directory / name).exists()]
    described = {**described, "files": {name: file_hash(directory / name) for name in files}}
    write_description(directory, described)
    (directory / "README.md").write_text(model_card(results, described), encoding="utf-8")


def read_config(directory: Path) -> dict[str, Any]:
    """The checked contents of `engram_config.json`."""
    described, path = read_description(directory), directory / CONFIG_FILE
    try:
        if described["format"] != FORMAT:
            raise UserError(
                f"{path}: format {described['format']!r}, this version reads {FORMAT}; use the version of engram-graft that wrote it"
            )
        _check_structure(described)
        EngramConfig.from_dict(described["config"])
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: corrupt ({type(error).__name__}: {error}); copy the graft anew") from error
    return described


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


def _check_structure(described: Mapping[str, Any]) -> None:
    """Raise `TypeError` or `KeyError` where the description is not of the form that `describe` gives it."""
    _check_kinds("", described, merged=bool, files=dict, config=dict)
    _check_kinds("tokenizer.", described["tokenizer"], fingerprint=str, ids=int, compressed=int)
    _check_kinds("base.", described["base"], name=str, dtype=str, fingerprint=dict | None)
    _check_kinds("tables.", described["tables"], layout=str, code=str)
    layout, code, known = described["tables"]["layout"], described["tables"]["code"], described["base"]["fingerprint"]
    if layout not in TABLES or code not in CODES:
        raise TypeError(f"tables are {layout!r} of {code!r}")
    if known is None and described["merged"]:  # an export's own code saved it again
        return
    _check_kinds("base.fingerprint.", known, model_type=str, hidden_size=int, num_hidden_layers=int, vocab_size=int, samples=dict)
    for name, values in known["samples"].items():
        if not isinstance(values, list) or not all(isinstance(value, float) for value in values):
            raise TypeError(f"base.fingerprint.samples.{name} is no list of numbers")


def _check_kinds(section: str, found: Mapping[str, Any], **kinds: Any) -> None:
    """Raise `KeyError` for what is missing in a section, `TypeError` for what is of another kind."""
    for name, kind in kinds.items():
        if name not in found:
            raise KeyError(f"{section}{name}")
        if not isinstance(found[name], kind):
            raise TypeError(f"{section}{name} is {found[name]!r}")


def _check_taps(directory: Path, config: EngramConfig, tensors: Mapping[str, Tensor]) -> None:
    """Raise `UserError` if the config's convolutions are not the files': they are made before they are filled."""
    for layer_id in config.layer_ids if config.conv else ():
        name = f"layers.{layer_id}.short_conv.weight"
        shape = list(tensors[name].shape) if name in tensors else None
        if shape is None or shape[-1:] != [config.kernel_size]:
            raise UserError(f"{directory}: {name} has shape {shape}, the config says {config.kernel_size} taps")
