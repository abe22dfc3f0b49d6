"""Graft and ungraft: attach a memory to the layers of a frozen Hugging Face model, and take it off.

The memory of layer i is the child `engram` of that layer and the addresses are the child `engram_hash` of the decoder, so moving,
copying and saving the model take them along. Memories with names of their own can be side by side. `recall` runs them.
"""

from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from engram_graft.compress import TokenMap, compress, lookup_of
from engram_graft.config import EngramConfig
from engram_graft.errors import UserError
from engram_graft.fresh import fresh_layer
from engram_graft.grafted import Graft, find_graft, grafts, only_memories, require_bare, require_grafts
from engram_graft.hashing import HashPlan
from engram_graft.locate import Located, dry_run, embedding_weight, end_of_text, locate
from engram_graft.mapped import Mapped
from engram_graft.params import adapter_names, base_name, is_memory
from engram_graft.plan import plan_hashes
from engram_graft.recall import DEFAULT, child, install, put, uninstall
from engram_graft.storage import Resident


def graft(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    config: EngramConfig | None = None,
    table_dir: str | Path | None = None,
) -> nn.Module:
    """Attach a fresh memory to `model`, in place, and freeze the base. Not one bit of any logit changes.

    Any causal language model of transformers will do, bare or with PEFT adapters, which stay trainable.

    Args:
        model: from `AutoModelForCausalLM.from_pretrained` or `get_peft_model`.
        tokenizer: the base's; its vocabulary decides the addresses.
        config: what to attach, `EngramConfig()` by default.
        table_dir: keep the tables, and their optimizer state, in files of this directory, for tables larger than memory; the results
            are the same bit for bit. By default they are in memory.

    Returns:
        The same model.

    Raises:
        UserError: the model is grafted already, has no such layer, or is no causal language model; the tables do not fit.

    Source: arXiv 2601.07372; what differs is the frozen base and the zero initialisation.
    """
    config = EngramConfig() if config is None else config
    if not isinstance(config, EngramConfig):
        raise UserError(f"config is a {type(config).__name__}: pass an EngramConfig, e.g. EngramConfig(layer_ids=[2, 6])")
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise UserError(f"tokenizer is a {type(tokenizer).__name__}: pass the base's, from AutoTokenizer.from_pretrained")
    located = locate(model)
    token_map = compress(tokenizer)
    lookup, ids = lookup_of(config.addresses, token_map, embedding_weight(model).shape[0])
    pads: tuple[int | None, ...] = (config.pad_id, tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    if config.resets:
        pads = (config.pad_id, end_of_text(located), tokenizer.eos_token_id)
    pad_id = next((pad for pad in pads if pad is not None), None)
    if pad_id is None:
        raise UserError(
            f"addresses={config.addresses!r}: neither base nor tokenizer has an end of text (eos); give its id as pad_id"
        )
    if pad_id >= len(lookup):
        raise UserError(f"pad_id={pad_id}: the tokenizer and the model know ids 0 to {len(lookup) - 1}")
    storage = Resident() if table_dir is None else Mapped(table_dir)
    attach(located, config, plan_hashes(config, lookup, ids, pad_id), token_map, storage)
    return model


def attach(
    located: Located, config: EngramConfig, plan: HashPlan, token_map: TokenMap, storage: Resident, name: str = DEFAULT
) -> Graft:
    """Attach a memory whose integers are known, its tables in `storage`: what `graft` and `load_graft` share."""
    require_bare(located.base, name)
    for options in getattr(located.base, "peft_config", {}).values():
        if getattr(options, "bias", "none") != "none":
            raise UserError(f"LoRA with bias={options.bias!r} trains biases of the base, which a graft freezes: use bias='none'")
    count = len(located.layers)
    for layer_id in config.layer_ids:
        if layer_id >= count:
            raise UserError(f"layer {layer_id} does not exist: this model has layers 0 to {count - 1} (counted from 0)")
    others = grafts(located.base)
    with only_memories(others):
        stream = dry_run(located)
    if stream.streams != config.hc_mult:
        raise UserError(f"hc_mult={config.hc_mult}: this model has {stream.streams} residual streams, set hc_mult to that")
    keywords = others[0].keywords if others else stream.keywords
    memory = Graft(config, plan, token_map, keywords, name)
    layers = []
    for index, layer_id in enumerate(config.layer_ids):
        layer = located.layers[layer_id]
        # of a layer that accelerate keeps on disk, only the hook knows where it runs
        device = getattr(getattr(layer, "_hf_hook", None), "execution_device", None) or next(layer.parameters()).device
        made = fresh_layer(config, index, plan.table_rows[index], stream.width, torch.device(device), storage)
        layers.append(made.train(layer.training))
    # all of it is made by now: what follows cannot fail half way
    adapters = adapter_names(located.base)
    for parameter_name, parameter in located.base.named_parameters():
        if parameter.requires_grad and parameter_name not in adapters and not is_memory(parameter_name):
            parameter.requires_grad_(False)
            memory.was_trainable.append(base_name(parameter_name))
    put(located.decoder, located.layers, memory.to(embedding_weight(located.base).device), layers)
    memory.mapped_tables = [layer.table for layer in layers] if storage.on_disk else []
    if not others:
        memory.handles = install(located.base, located.decoder, located.layers, keywords)
    return memory


def ungraft(model: nn.Module, name: str | None = None) -> nn.Module:
    """Take a memory off, in place: the one of this name, by default all. Without any the base is as it was, `requires_grad` included.

    Raises:
        UserError: there is none (of this name).
    """
    located = locate(model)
    for memory in require_grafts(model) if name is None else [find_graft(model, name)]:
        for layer_id in memory.config.layer_ids:
            delattr(located.layers[layer_id], child(memory.name))
        delattr(located.decoder, child(memory.name, "engram_hash"))
        if left := grafts(model):  # they take over what the first one holds for all
            left[0].handles += memory.handles
            left[0].was_trainable += memory.was_trainable
            continue
        uninstall(located.base, memory.handles)
        for parameter_name, parameter in located.base.named_parameters():
            if base_name(parameter_name) in memory.was_trainable:
                parameter.requires_grad_(True)
    return model
