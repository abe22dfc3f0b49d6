"""Export: base with LoRA folded in, memory beside it, in one Hugging Face directory; then reload it and compare."""

import contextlib
import copy
import json
import re
from pathlib import Path
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import ModulesToSaveWrapper
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from engram_graft.bases import fingerprint
from engram_graft.card import model_card
from engram_graft.checkpoint import load_graft
from engram_graft.errors import PromiseError, UserError
from engram_graft.files import CONFIG_FILE, describe, file_hash
from engram_graft.grafted import find_graft
from engram_graft.locate import unwrap
from engram_graft.modes import no_learning
from engram_graft.output import new_directory
from engram_graft.params import adapter_names, base_name
from engram_graft.sharding import is_sharded
from engram_graft.verify import TEXTS, unfiltered


def export_merged(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, directory: str | Path, max_shard_size: str = "5GB"
) -> dict[str, Any]:
    """Write a grafted model as one directory that opens anywhere: `load_graft` gives it back whole, `AutoModelForCausalLM` gives
    the base with LoRA merged. LoRA is merged in float32 and cast once; no weight of `model` is changed.

    Returns:
        {"max_difference": largest logit difference between the reloaded and the unmerged model, "flips": positions where the most
        likely token differs, "positions": positions compared, "bytes": size on disk}.

    Raises:
        UserError: the directory is not empty, the base is quantized or sharded, or LoRA changes tied embeddings.
        PromiseError: what was reloaded is not what was written; the directory is removed.
    """
    find_graft(model)
    if not re.fullmatch(r"\d+(\.\d+)? *[KMGT]i?B", max_shard_size, re.IGNORECASE):
        raise UserError(f"max_shard_size={max_shard_size!r}: must look like 500MB or 5GB")
    if is_sharded(model):
        raise UserError("FSDP shards the model: save_graft on every process, then export what load_graft gives in one process")
    base = unwrap(model)
    _plain_weights(base)
    with new_directory(directory) as target:
        merged = merged_state(model)
        with _saveable(base):
            base.save_pretrained(target, state_dict=dict(merged), max_shard_size=max_shard_size)
        tokenizer.save_pretrained(target)
        described = describe(model, {path.name: file_hash(path) for path in sorted(target.glob("*.safetensors"))}, merged=True)
        bare: Any = AutoModelForCausalLM.from_pretrained(target, dtype=base.dtype)
        bare.to(base.device)
        described["base"]["fingerprint"] = fingerprint(bare)
        (target / CONFIG_FILE).write_text(json.dumps(described, indent=1) + "\n", encoding="utf-8")
        (target / "README.md").write_text(model_card(target, described), encoding="utf-8")
        reloaded, _ = load_graft(target, base=bare, tokenizer=tokenizer)
        _check_tensors(merged, reloaded)
        return {**_compare(model, reloaded, tokenizer), "bytes": sum(path.stat().st_size for path in target.iterdir())}


def merged_state(model: nn.Module) -> dict[str, Tensor]:
    """Every tensor of the merged model by its plain name, adapters folded into the weights; tied tensors stay one tensor."""
    base = unwrap(model)
    adapters = adapter_names(base)
    if any(".token_adapter." in name for name in base.state_dict()):
        raise UserError("PEFT's trainable_token_indices cannot be exported merged yet: train without it")
    state = {
        base_name(name): tensor
        for name, tensor in base.state_dict().items()
        if name not in adapters and ".modules_to_save." not in name
    }
    tied = base.get_output_embeddings() is not None and _tied(base)
    for name, module in base.named_modules():
        if isinstance(module, BaseTunerLayer):
            if tied and module in (base.get_input_embeddings(), base.get_output_embeddings()):
                raise UserError(
                    f"LoRA on {name} changes an embedding that input and output share; train without it, or untie the base"
                )
            wide: Any = copy.deepcopy(module)
            wide.float()
            wide.merge()
            for leaf, value in wide.get_base_layer().state_dict().items():
                state[f"{name}.{leaf}"] = value.to(state[f"{name}.{leaf}"].dtype)
        elif isinstance(module, ModulesToSaveWrapper):
            trained = module.modules_to_save[module.active_adapters[0]]
            state.update({f"{name}.{leaf}": value for leaf, value in trained.state_dict().items()})
    return {name: tensor.detach() for name, tensor in state.items()}


def _tied(base: PreTrainedModel) -> bool:
    weights = [getattr(embedding, "weight", None) for embedding in (base.get_input_embeddings(), base.get_output_embeddings())]
    return weights[0] is not None and weights[0] is weights[1]


def _plain_weights(base: PreTrainedModel) -> None:
    """Refuse a base whose weights are codes; drop the GGUF mark from one whose weights were dequantized on loading."""
    quantizer = getattr(base, "hf_quantizer", None)
    if quantizer is None:
        return
    method = getattr(quantizer.quantization_config, "quant_method", "unknown")
    if str(getattr(method, "value", method)) == "gguf" and all(p.is_floating_point() for p in base.parameters()):
        quantizer.remove_quantization_config(base)
        return
    raise UserError(
        f"the base is quantized ({method}): LoRA cannot be merged into codes. Load the base in bfloat16 and export again"
    )


@contextlib.contextmanager
def _saveable(base: PreTrainedModel) -> Any:
    """transformers' save_pretrained looks at the module tree for adapters of its own kind only; nothing else is in its way."""
    mark = getattr(base, "_hf_peft_config_loaded", False)
    base._hf_peft_config_loaded = False
    try:
        yield
    finally:
        base._hf_peft_config_loaded = mark


def _check_tensors(merged: dict[str, Tensor], reloaded: nn.Module) -> None:
    """Raise unless each tensor came back bit for bit."""
    found = unwrap(reloaded).state_dict()
    lost = [name for name in merged if name not in found]
    changed = [name for name in merged if name in found and not torch.equal(merged[name].cpu(), found[name].cpu())]
    if lost or changed:
        raise PromiseError(f"export: reloading lost {lost[:3]} ({len(lost)}) and changed {changed[:3]} ({len(changed)}) tensors")


def _compare(model: nn.Module, reloaded: nn.Module, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """How far the merged model is from the unmerged one, which adds LoRA in another order."""
    largest, flips, positions = 0.0, 0, 0
    for text in TEXTS:
        ids = tokenizer(text, return_tensors="pt")["input_ids"].to(unwrap(model).device)
        with no_learning(model), no_learning(reloaded), unfiltered(model), unfiltered(reloaded):
            before, after = model(input_ids=ids).logits, reloaded(input_ids=ids).logits
        largest = max(largest, float((before.float() - after.float()).abs().max()))
        flips += int((before.argmax(-1) != after.argmax(-1)).sum())
        positions += ids.numel()
    if not adapter_names(model) and largest > 0:
        raise PromiseError(
            f"export: without LoRA to merge, logits must come back bit for bit; they differ by up to {largest:.3g}"
        )
    return {"max_difference": largest, "flips": flips, "positions": positions}
