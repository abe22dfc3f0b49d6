"""Export: base with LoRA folded in and the memory beside it, in one Hugging Face directory that opens anywhere; reopened and compared."""

import importlib.util
import json
import math
import re
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from engram_graft.agreement import difference, measure
from engram_graft.bases import fingerprint, load_tokenizer
from engram_graft.bundle import class_name, modelling_code
from engram_graft.card import model_card
from engram_graft.codes import CODES
from engram_graft.compress import TokenMap, compress
from engram_graft.config import DTYPES
from engram_graft.encode import Question
from engram_graft.errors import PromiseError, UserError
from engram_graft.files import describe, memory_parts, read_graft
from engram_graft.grafted import find_graft, memories
from engram_graft.integrity import CODE_FILE, read_description, write_description
from engram_graft.locate import embedding_weight, locate, unwrap
from engram_graft.merge import chosen_adapter, merged_state
from engram_graft.output import new_directory
from engram_graft.params import adapter_names
from engram_graft.remote import describe_files
from engram_graft.rows import TABLES
from engram_graft.sharding import is_sharded
from engram_graft.stored import stored_table

# `transformers serve` looks for a decision model, then a multimodal one, then for the architecture's name among its own: it never asks
# AutoModelForCausalLM, and would serve the base alone
_AUTO_CLASSES = ("AutoModelForCausalLM", "AutoModelForDecision", "AutoModelForMultimodalLM")
_ROUNDING = 1e-3  # of logits in float32, when LoRA is folded in or kept apart


def export_merged(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    directory: str | Path,
    max_shard_size: str = "5GB",
    *,
    dtype: str | None = None,
    tables: str = "sparse",
    table_dtype: str | None = None,
    adapter: str | None = None,
    questions: Sequence[Question] = (),
    results: str | Path | None = None,
) -> dict[str, Any]:
    """Write a grafted model as one directory: `AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True)` opens it with its
    memory, where this toolkit is not installed too; without trust_remote_code it is the base with LoRA merged. LoRA is merged in
    float32 and cast once; no weight of `model` is changed.

    Args:
        max_shard_size: of a safetensors file.
        dtype: of the base's weights; by default what they have.
        tables: "sparse" keeps the rows that were learned, "dense" writes every row.
        table_dtype: of the tables' values, "float32", "bfloat16", "float16" or "float8" (e4m3, a scale for 32 channels); by default what
            they have.
        adapter: the LoRA adapter to merge, where there are several.
        questions: (prompt, answer), asked before and after.
        results: a graft directory whose identity and probe results the model card shows.

    Returns:
        What `agreement.difference` gives for the unmerged and the reopened model, "bytes" on disk and "table_bytes" of them.

    Raises:
        UserError: the directory is not empty, an option is wrong, the base is quantized, sharded or no class of transformers, or
            adapters cannot be folded in.
        PromiseError: what was reopened is not what was written; the directory is removed.
    """
    memory, base = find_graft(model), unwrap(model)
    if not re.fullmatch(r"\d+(\.\d+)? *[KMGT]B", str(max_shard_size), re.IGNORECASE):
        raise UserError(f"max_shard_size={max_shard_size!r}: must look like 500MB or 5GB")
    for name, value, allowed in (("dtype", dtype, DTYPES), ("tables", tables, TABLES), ("table_dtype", table_dtype, CODES)):
        if value not in allowed and (value is not None or name == "tables"):
            raise UserError(f"{name}={value!r}: must be one of {', '.join(allowed)}")
    if is_sharded(model):
        raise UserError("FSDP shards the model: save_graft on every process, then export what load_graft gives in one process")
    rows, ids = embedding_weight(model).shape[0], len(memory.lookup)
    if ids != max(rows, len(memory.token_map.lookup)):
        raise UserError(
            f"the embedding was resized to {rows} rows after the graft, which knows {ids} ids: ungraft, resize, then graft"
        )
    code = modelling_code(type(base))
    described = describe(model, of_base={})
    coding = table_dtype or described["config"]["dtype"]
    own = str(base.dtype).removeprefix("torch.")
    described |= {"merged": True, "tables": {"layout": tables, "code": coding}}
    changed = bool(adapter_names(model)) or dtype not in (None, own)
    described["base"] = {"name": described["base"]["name"], "dtype": dtype or own, "fingerprint": None, "changed": changed}
    with chosen_adapter(model, adapter), new_directory(directory) as target:
        state = merged_state(model, None if dtype is None else getattr(torch, dtype))
        of_memory, of_tables = _memory_state(model, tables, coding)
        _save(base, state | of_memory | of_tables, target, max_shard_size)
        tokenizer.save_pretrained(target)
        _check_tokenizer(compress(load_tokenizer(str(target.absolute()))), described["tokenizer"], tokenizer)
        (target / CODE_FILE).write_text(code, encoding="utf-8")
        _name_class(target, base, dtype or own, _told(model, described))
        describe_files(target, described, class_name(type(base)))
        before = measure(model, tokenizer, questions)
        reopened = reopen(target)
        _check_tensors(state | of_memory | of_tables, reopened)
        report = difference(before, measure(reopened.to(base.device), tokenizer, questions))  # type: ignore[arg-type]
        exact = dtype in (None, own) and coding == described["config"]["dtype"]
        _check_logits(report["max_difference"], exact, bool(adapter_names(model)), own)
        written = read_description(target)
        written["base"]["fingerprint"] = fingerprint(reopened)
        write_description(target, written)
        (target / "README.md").write_text(model_card(Path(results or target), written, report), encoding="utf-8")
        read_graft(target)
        sizes = {"bytes": sum(path.stat().st_size for path in target.iterdir())}
        return {**report, **sizes, "table_bytes": sum(tensor.nbytes for tensor in of_tables.values())}


def reopen(directory: Path) -> PreTrainedModel:
    """The model of an exported directory, in eval mode, by the code the directory ships."""
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    name = f"engram_export_{uuid.uuid4().hex}"
    spec = importlib.util.spec_from_file_location(name, directory / CODE_FILE)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        cls: Any = getattr(module, config["auto_map"]["AutoModelForCausalLM"].partition(".")[2])
        return cls.from_pretrained(directory).eval()
    finally:
        del sys.modules[name]


def _memory_state(model: nn.Module, layout: str, code: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The memory's tensors by the names they have in the base: all but the tables', and the tables'."""
    rest: dict[str, Tensor] = {}
    tables: dict[str, Tensor] = {}
    for part, module in memory_parts(model).items():
        prefix = _path(model, part)
        rest |= {f"{prefix}.{name}": t for name, t in module.state_dict().items() if not name.startswith("table.")}
        if hasattr(module, "table"):
            tables |= {f"{prefix}.table.{leaf}": t for leaf, t in stored_table(module.table, layout, code).items()}  # type: ignore[arg-type]
    return rest, tables


def _path(model: nn.Module, part: str) -> str:
    """The name that a part of the memory ("hash", "layers.2") has in the base."""
    decoder, layers = _places(model)
    below = "engram_hash" if part == "hash" else f"{layers}.{part.removeprefix('layers.')}.engram"
    return f"{decoder}.{below}".lstrip(".")


def _places(model: nn.Module) -> tuple[str, str]:
    """The decoder's name in the base, and the layers' in the decoder."""
    located = locate(model)
    decoder = next(name for name, module in located.base.named_modules() if module is located.decoder)
    return decoder, next(name for name, module in located.decoder.named_modules() if module is located.layers)


def _told(model: nn.Module, described: dict[str, Any]) -> dict[str, Any]:
    """What the shipped code needs to rebuild the memory: `remote.EngramModel` lists the keys."""
    decoder, layers = _places(model)
    memory, parts = find_graft(model), memories(model)
    return {
        "decoder": decoder,
        "layers": layers,
        "width": parts[0].key_norm.shape[1],
        "keywords": memory.keywords,
        "ids": len(memory.lookup),
        "rows": {str(part.layer_id): [len(part.table.weight), part.table.count_seen()] for part in parts},
        "described": described,
    }


def _save(base: PreTrainedModel, state: dict[str, Tensor], target: Path, max_shard_size: str) -> None:
    """The weights, config and generation config, by transformers' own writer."""
    mark = getattr(base, "_hf_peft_config_loaded", False)  # adapters of transformers' own kind: theirs alone would be written
    base._hf_peft_config_loaded = False
    try:
        base.save_pretrained(target, state_dict=dict(state), max_shard_size=max_shard_size)
    except ValueError as error:
        raise UserError(f"transformers refuses to save this base: {' '.join(str(error).split())}") from error
    finally:
        base._hf_peft_config_loaded = mark


def _name_class(target: Path, base: PreTrainedModel, dtype: str, told: dict[str, Any]) -> None:
    """Have the written config name the code, the memory and the dtype of the weights."""
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    for section in (config, config.get("text_config", {})):
        if "dtype" in section:
            section["dtype"] = dtype
    cls = f"{CODE_FILE.removesuffix('.py')}.{class_name(type(base))}"
    config |= {"auto_map": dict.fromkeys(_AUTO_CLASSES, cls), "engram_graft": told}
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _check_tokenizer(reopened: TokenMap, wanted: dict[str, Any], given: PreTrainedTokenizerBase) -> None:
    """Raise unless the written tokenizer opens as the one that the memory was trained with."""
    if reopened.fingerprint != wanted["fingerprint"]:
        raise UserError(
            f"the tokenizer reopens with {len(reopened.lookup)} ids, it was given with {len(given)} and the memory was trained with "
            f"{wanted['ids']}: its rows would be noise. Pass the one it was trained with, as AutoTokenizer opens it"
        )


def _check_tensors(written: dict[str, Tensor], reopened: nn.Module) -> None:
    """Raise unless each tensor came back bit for bit."""
    found = reopened.state_dict()
    lost = [name for name in written if name not in found]
    changed = [name for name in written if name in found and not _equal(written[name].cpu(), found[name].cpu())]
    if lost or changed:
        raise PromiseError(f"export: reloading lost {lost[:3]} ({len(lost)}) and changed {changed[:3]} ({len(changed)}) tensors")


def _equal(one: Tensor, other: Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    if one.dtype.itemsize == 1:  # float8 has no comparison of its own
        one, other = one.view(torch.uint8), other.view(torch.uint8)
    return torch.equal(one, other)


def _check_logits(largest: float, exact: bool, lora: bool, dtype: str) -> None:
    """Raise where the logits had to come back and did not: as numbers; bit for bit without LoRA, up to rounding in float32 with it."""
    if not math.isfinite(largest):
        raise PromiseError(
            f"export: the logits are not all numbers (they differ by {largest}): keep the dtypes, or choose bfloat16"
        )
    allowed = 0.0 if not lora else _ROUNDING if dtype == "float32" else float("inf")
    if exact and largest > allowed:
        how = f"within {allowed:g}" if lora else "bit for bit"
        raise PromiseError(f"export: logits must come back {how}; they differ by up to {largest:.3g}")
