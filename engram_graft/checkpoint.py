"""Saving and loading a graft: one JSON file, one safetensors file, PEFT's adapter beside them. Nothing is ever unpickled.

The files describe themselves: the integers of the addresses are stored and read back, never drawn again, and fingerprints of the
tokenizer and the base refuse the wrong ones.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import PeftModel, get_peft_model_state_dict
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from engram_graft.bases import check_base, fingerprint, load_base
from engram_graft.card import model_card
from engram_graft.compress import TokenMap, compress, extend_lookup
from engram_graft.config import EngramConfig
from engram_graft.errors import UserError, first_line
from engram_graft.hashing import HashPlan
from engram_graft.hooks import attach, find_graft, memories, require_bare, ungraft
from engram_graft.locate import embedding_weight, locate, unwrap
from engram_graft.output import all_or_nothing
from engram_graft.params import adapter_names, is_memory

FORMAT = 1
CONFIG_FILE, TENSOR_FILE = "engram_config.json", "engram.safetensors"
ADAPTER_FILE, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
_INTEGERS = ("lookup", "multipliers", "primes", "offsets", "pad")


def save_graft(model: nn.Module, directory: str | Path) -> None:
    """Write the memory, and the PEFT adapters if there are any, to `directory`; the base is not written.

    Files of the same names are replaced, each whole: a failure leaves what was there.

    Raises:
        UserError: the model has no memory, its adapters are not PEFT's "default" ones, or the directory cannot be written.
    """
    find_graft(model)
    with all_or_nothing(directory) as scratch:
        peft = _peft_model(model)
        if peft is not None:
            peft.save_pretrained(str(scratch), save_embedding_layers=False)
        if adapter_names(model) and not (scratch / ADAPTER_FILE).exists():
            raise UserError(
                "the model's adapters cannot be saved with the graft: add them with get_peft_model(model, config), whose adapter "
                "name is 'default'"
            )
        tensors = memory_tensors(model)
        save_file(
            {name: tensor.contiguous() for name, tensor in tensors.items()},
            scratch / TENSOR_FILE,
            metadata={"format": "pt"},
        )
        files = [name for name in (TENSOR_FILE, ADAPTER_FILE, ADAPTER_CONFIG) if (scratch / name).exists()]
        described = describe(model, {name: file_hash(scratch / name) for name in files})
        (scratch / CONFIG_FILE).write_text(json.dumps(described, indent=1) + "\n", encoding="utf-8")
        (scratch / "README.md").write_text(model_card(Path(directory), described), encoding="utf-8")


def load_graft(
    directory: str | Path,
    base: str | PreTrainedModel | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    dtype: str | None = None,
    trainable: bool = False,
) -> tuple[nn.Module, PreTrainedTokenizerBase]:
    """Load a graft directory, or a merged one, onto its base. The base is frozen; the memory too unless `trainable`.

    Args:
        directory: what `save_graft` or `export_merged` wrote.
        base: a name for `load_base`, or a loaded model (with its `tokenizer`); by default the base the graft names.
        dtype: of the base when it is loaded here; by default the one it was trained with.
        trainable: whether adapters and memory can go on training.

    Returns:
        The model in eval mode (a PeftModel if there are adapters) and the tokenizer.

    Raises:
        UserError: a file is missing, corrupt or of another shape (the keys are named), or tokenizer or base is the wrong one.
    """
    directory = Path(directory)
    described, config, tensors, plan = read_graft(directory)
    if isinstance(base, PreTrainedModel):
        if tokenizer is None:
            raise UserError("load_graft(base=a loaded model) needs its tokenizer too: pass tokenizer=")
        model: nn.Module = base
    else:
        name = base or (str(directory) if described["merged"] else described["base"]["name"])
        model, loaded_tokenizer = load_base(name, dtype or described["base"]["dtype"])
        tokenizer = tokenizer or loaded_tokenizer
    token_map = compress(tokenizer)
    if token_map.fingerprint != described["tokenizer"]["fingerprint"]:
        raise UserError(
            f"wrong tokenizer: this one has {len(token_map.lookup)} ids ({token_map.size} compressed) and fingerprint "
            f"{token_map.fingerprint[:12]}, the memory was trained with {described['tokenizer']['ids']} "
            f"({described['tokenizer']['compressed']}) and {described['tokenizer']['fingerprint'][:12]}; its rows would be noise"
        )
    check_base(model, described["base"]["fingerprint"])
    embedding_rows = embedding_weight(model).shape[0]
    if not np.array_equal(plan.lookup, extend_lookup(token_map, embedding_rows)):
        raise UserError(f"wrong base: its embedding has {embedding_rows} rows, the memory's map covers {len(plan.lookup)} ids")
    require_bare(model)
    if ADAPTER_FILE in described["files"]:
        model = _with_adapter(model, directory, trainable)
    restore(model, config, plan, token_map, tensors, trainable)
    return model.eval(), tokenizer


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


def _peft_model(model: nn.Module) -> PeftModel | None:
    """The PeftModel under torch.compile or DDP, if any."""
    return next((module for module in model.modules() if isinstance(module, PeftModel)), None)


def _with_adapter(model: nn.Module, directory: Path, trainable: bool) -> PeftModel:
    """The model with the directory's adapter, every tensor of which has to find its place."""
    try:
        loaded = PeftModel.from_pretrained(model, str(directory), is_trainable=trainable)
    except (ValueError, RuntimeError, KeyError, TypeError) as error:
        raise UserError(f"{directory}: its LoRA adapter cannot be loaded ({first_line(error)})") from error
    with safe_open(directory / ADAPTER_FILE, framework="pt") as file:
        stored = set(file.keys())
    own = set(get_peft_model_state_dict(loaded, save_embedding_layers=False))
    if stored != own:
        loaded.unload()
        raise UserError(f"{directory / ADAPTER_FILE}: does not fit {ADAPTER_CONFIG}: {', '.join(sorted(stored ^ own)[:4])}")
    return loaded


def memory_tensors(model: nn.Module) -> dict[str, Tensor]:
    """All tensors of the memory by the names they have on disk: "hash.primes", "layers.2.value_proj.weight"."""
    return {canonical_name(name): tensor for name, tensor in model.state_dict().items() if is_memory(name)}


def canonical_name(name: str) -> str:
    """A tensor's name without the base's path: the same for every architecture and wrapper."""
    _, found, leaf = name.rpartition("engram_hash.")
    if found:
        return f"hash.{leaf}"
    layer = re.search(r"(\d+)\.engram\.(.+)$", name)
    assert layer is not None, name
    return f"layers.{layer[1]}.{layer[2]}"


def describe(model: nn.Module, files: Mapping[str, str], merged: bool = False) -> dict[str, Any]:
    """The contents of `engram_config.json`; `files` maps each safetensors file to its sha256."""
    ngram_hash, base = find_graft(model), unwrap(model)
    dtype = str(memories(model)[0].key_norm.dtype).removeprefix("torch.")  # model.to(dtype) takes the memory along
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
            "fingerprint": fingerprint(model),
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
            raise UserError(f"{path}: format {described['format']!r}, this version reads {FORMAT}; update engram-graft")
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
        names = [f"layers.{layer_id}.table.{leaf}" for leaf in ("weight", "seen")]
        if missing := [name for name in names if name not in tensors]:
            raise UserError(f"{directory}: the graft's tensors do not fit its config: missing {', '.join(missing)}")
        table = tensors[names[0]]
        if table.shape[0] != rows or tensors[names[1]].shape[0] != rows:
            raise UserError(f"{directory}: layers.{layer_id}.table.weight has {table.shape[0]} rows, its primes add up to {rows}")
    return plan


def restore(
    model: nn.Module,
    config: EngramConfig,
    plan: HashPlan,
    token_map: TokenMap,
    tensors: Mapping[str, Tensor],
    trainable: bool,
) -> None:
    """Attach a memory to `model` and give it these tensors. Strict: every tensor is there, none is over, shapes and dtypes are equal."""
    attach(locate(model), config, plan, token_map)
    try:
        fill(model, tensors)
    except UserError:
        ungraft(model)
        raise
    for name, parameter in model.named_parameters():
        if is_memory(name):
            parameter.requires_grad_(trainable)


@torch.no_grad()
def fill(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Give the memory of `model` these tensors (canonical names). Raises `UserError` that names each key that does not fit."""
    own = memory_tensors(model)
    faults = [f"missing {name}" for name in own if name not in tensors] + [
        f"unexpected {name}" for name in tensors if name not in own
    ]
    for name in own.keys() & tensors.keys():
        have, want = tensors[name], own[name]
        if have.shape != want.shape or have.dtype != want.dtype:
            faults.append(f"{name} is {have.dtype} {list(have.shape)}, not {want.dtype} {list(want.shape)}")
    if faults:
        raise UserError(f"the graft's tensors do not fit its config: {'; '.join(sorted(faults))}")
    for name, tensor in own.items():
        tensor.copy_(tensors[name])
