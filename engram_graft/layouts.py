"""The memories of the field: putting one that a checkpoint carries on a base, and writing a graft as such a checkpoint has it.

Known are transformers' `qwen4_exp` and DeepSeek-V4.1; a module each says what is where.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedTokenizerBase

from engram_graft import deepseek, qwen4_exp
from engram_graft.config import EngramConfig
from engram_graft.errors import UserError
from engram_graft.files import ADAPTER_FILE, read_graft
from engram_graft.hashing import HashPlan
from engram_graft.initial import row_seed
from engram_graft.integrity import CONFIG_FILE
from engram_graft.mapped import Mapped
from engram_graft.output import new_directory
from engram_graft.plan import plan_hashes
from engram_graft.pretrained import attach_pretrained
from engram_graft.storage import Resident
from engram_graft.stored import every_row
from engram_graft.weights import INDEX, Weights, read_json

LAYOUTS: dict[str, Any] = {"qwen4_exp": qwen4_exp, "deepseek_v41": deepseek}


def recognise(source: Path) -> tuple[str, dict[str, Any]]:
    """Which layout a checkpoint's memory has, by its config.json, and its text config. Raises `UserError` if it has none."""
    if (source / CONFIG_FILE).is_file():
        raise UserError(f"{source} is a graft directory already: use it as it is")
    config = read_json(source / "config.json")
    nested = config.get("text_config")
    text = nested if isinstance(nested, dict) else config
    for name, layout in LAYOUTS.items():
        if text.get(layout.LAYERS):
            return name, text
    known = ", ".join(f"{name} ({layout.LAYERS} in its config)" for name, layout in LAYOUTS.items())
    raise UserError(
        f"{source}: model_type {config.get('model_type')!r} with no memory in its config; known are {known} and merged directories "
        f"({CONFIG_FILE})"
    )


def import_memory(
    source: str | Path,
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    layers: Sequence[int] | None = None,
    table_dir: str | Path | None = None,
) -> str:
    """Graft the memory of a checkpoint onto `model`, in place; `save_graft` then writes it. Of the checkpoint only that is read.

    Args:
        source: a directory with config.json and safetensors.
        layers: of the base to put it in front of, in place of its own; each keeps the addresses it had.
        table_dir: keep the tables in files of this directory, for tables larger than memory.

    Returns:
        The name of its layout.

    Raises:
        UserError: there is no memory in it, or it does not fit; every reason is given.
    """
    name, text = recognise(Path(source))
    memory = LAYOUTS[name].read(text, Weights(Path(source)))
    storage = Resident() if table_dir is None else Mapped(table_dir)
    attach_pretrained(memory, Path(source), model, tokenizer, layers, storage)
    return name


def write_layout(directory: str | Path, layout: str, output: str | Path) -> dict[str, Any]:
    """Write the memory of a graft directory as a checkpoint of `layout` has it: its part of config.json, and safetensors, one file a
    layer. Rows that training never looked up are written with their initial values; LoRA is not written.

    Returns:
        {"layout", "layers", "rows": in all tables, "bytes": on disk, "rounding": the largest error of a number written, "adapter":
        whether LoRA was left out}.

    Raises:
        UserError: the layout cannot say what the memory does; every reason is given. The output exists.
    """
    if layout not in LAYOUTS:
        raise UserError(f"layout {layout!r}: must be one of {', '.join(LAYOUTS)}")
    described, config, tensors, plan = read_graft(Path(directory))
    kind = LAYOUTS[layout]
    ids = len(plan.lookup) if kind.NEEDS["addresses"] == "qwen4_exp" else described["tokenizer"]["compressed"]
    reasons = _reasons(kind, config, plan, ids)
    if reasons:
        raise UserError(f"{directory}: {layout} cannot say what this memory does: {'; '.join(reasons)}")
    largest = 0.0
    files: dict[str, str] = {}  # of each tensor
    with new_directory(output) as target:
        for index, layer_id in enumerate(config.layer_ids):
            prefix = f"layers.{layer_id}."
            parameters = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
            stored = parameters["table.rows"], parameters["table.values"]
            table = every_row(*stored, plan.table_rows[index], row_seed(config, layer_id))
            made, error = kind.tensors(parameters, table, plan, index)
            file = f"model-{index + 1:05}-of-{len(config.layer_ids):05}.safetensors"
            named = {f"{kind.PREFIX.format(layer_id)}{leaf}": tensor.contiguous() for leaf, tensor in made.items()}
            save_file(named, target / file, metadata={"format": "pt"})
            files |= dict.fromkeys(named, file)
            largest = max(largest, error)
        width = tensors[f"layers.{config.layer_ids[0]}.key_norm"].shape[1]
        size = sum(path.stat().st_size for path in target.iterdir())
        _write(target / INDEX, {"metadata": {"total_size": size}, "weight_map": files})
        _write(target / "config.json", kind.fragment(config, plan, width, ids))
        return {
            "layout": layout,
            "layers": list(config.layer_ids),
            "rows": sum(plan.table_rows),
            "bytes": sum(path.stat().st_size for path in target.iterdir()),
            "rounding": largest,
            "adapter": ADAPTER_FILE in described["files"],
        }


def _reasons(kind: Any, config: EngramConfig, plan: HashPlan, ids: int) -> list[str]:
    have = config.to_dict()
    reasons = [f"{name}={have[name]!r}, the layout has {want!r}" for name, want in kind.NEEDS.items() if have[name] != want]
    reasons += kind.reasons(config)
    drawn = plan_hashes(config, plan.lookup, ids, 0)
    for name in ("multipliers", "primes"):
        if not np.array_equal(getattr(plan, name), getattr(drawn, name)):
            reasons.append(
                f"its {name} are not those drawn for layers {list(config.layer_ids)}, seed {config.seed} and {ids} ids"
            )
    return reasons


def _write(path: Path, contents: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(contents, indent=1) + "\n", encoding="utf-8")
