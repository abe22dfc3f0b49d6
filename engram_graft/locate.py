"""Finding the decoder and its layers in any Hugging Face causal language model, by structure rather than by name."""

import dataclasses
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from engram_graft.errors import UserError


@dataclasses.dataclass(frozen=True)
class Located:
    """Args:
    base: the Hugging Face model under every wrapper.
    decoder: the module whose forward takes `input_ids` and runs the layers.
    layers: its decoder layers, in order.
    """

    base: PreTrainedModel
    decoder: nn.Module
    layers: nn.ModuleList


def unwrap(model: nn.Module) -> PreTrainedModel:
    """The Hugging Face model inside torch.compile, DDP / FSDP and PEFT wrappers. Raises `UserError` when there is none."""
    module: Any = model
    while not isinstance(module, PreTrainedModel):
        if isinstance(module, PeftModel):
            module = module.get_base_model()
            continue
        for inner in ("_orig_mod", "module", "model"):  # torch.compile, DDP and FSDP, a bare tuner
            if isinstance(getattr(module, inner, None), nn.Module):
                module = getattr(module, inner)
                break
        else:
            raise UserError(
                f"{type(model).__name__}: no Hugging Face model inside; pass what AutoModelForCausalLM.from_pretrained returns, "
                "bare or in PEFT's wrapper"
            )
    return module


def locate(model: nn.Module) -> Located:
    """Find the decoder layers. Raises `UserError` when no list of layers, or more than one, fits."""
    base = unwrap(model)
    if base.config.is_encoder_decoder or not base.can_generate() or base.get_output_embeddings() is None:
        raise UserError(f"{type(base).__name__} is no causal language model: load one with AutoModelForCausalLM")
    decoder = base.get_decoder()
    config = getattr(decoder, "config", base.config).get_text_config(decoder=True)
    unsplittable = set(base._no_split_modules or [])
    candidates = []
    for name, module in decoder.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) >= config.num_hidden_layers:
            # FSDP2 puts a class of its own over a layer's
            named = any(kind.__name__ in unsplittable for kind in type(module[0]).__mro__)
            if named or isinstance(module[0], GradientCheckpointingLayer):
                candidates.append(((named, "." not in name, len(module) == config.num_hidden_layers), name, module))
    candidates.sort(key=lambda candidate: candidate[0], reverse=True)
    if not candidates:
        raise UserError(f"{type(base).__name__}: no list of {config.num_hidden_layers} decoder layers found in its decoder")
    if len(candidates) > 1 and candidates[0][0] == candidates[1][0]:
        raise UserError(f"{type(base).__name__}: several lists look like decoder layers: {[c[1] for c in candidates]}")
    return Located(base, decoder, candidates[0][2])


def embedding_weight(model: nn.Module) -> Tensor:
    """The input embedding `[rows, D]`: its rows are the ids the model can be fed."""
    weight = unwrap(model).get_input_embeddings().weight
    assert isinstance(weight, Tensor)
    return weight


def end_of_text(located: Located) -> int | None:
    """The token id that ends a text, as the base's config has it; the first of several."""
    eos = getattr(located.decoder, "config", located.base.config).get_text_config(decoder=True).eos_token_id
    return next(iter(eos), None) if isinstance(eos, list) else eos


@dataclasses.dataclass(frozen=True)
class Stream:
    """What a two-token dry run saw. Args: width: channels of a residual stream; streams: hc_mult, side by side or in a dimension of
    their own; keywords: whether the decoder hands unknown keywords on to its layers."""

    width: int
    streams: int
    keywords: bool


def dry_run(located: Located) -> Stream:
    """Run two tokens through the decoder to see its layers at work. Raises `UserError` when they do not run one by one in order."""
    token = object()
    seen: list[tuple[int, torch.Size, bool]] = []

    def at_decoder(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        return args, {**kwargs, "engram_dry_run": token}

    def at_layer(index: int) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
            passed = kwargs.pop("engram_dry_run", None) is token
            hidden = args[0] if args else kwargs["hidden_states"]
            seen.append((index, hidden.shape, passed))
            return args, kwargs

        return hook

    ids = torch.zeros(1, 2, dtype=torch.long, device=embedding_weight(located.base).device)

    def run(keyword: bool) -> None:
        handles = [located.decoder.register_forward_pre_hook(at_decoder, with_kwargs=True)] if keyword else []
        handles += [m.register_forward_pre_hook(at_layer(i), with_kwargs=True) for i, m in enumerate(located.layers)]
        seen.clear()
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=_accelerators(located.base)):
                located.decoder(input_ids=ids, use_cache=False)
        finally:
            for handle in handles:
                handle.remove()

    try:
        run(keyword=True)
    except TypeError:  # a decoder without **kwargs refuses the unknown keyword
        run(keyword=False)
    if [index for index, _, _ in seen] != list(range(len(seen))) or not seen:
        raise UserError(f"{type(located.base).__name__}: its layers ran in the order {[s[0] for s in seen]}, not one by one")
    shape, keywords = seen[0][1], all(passed for _, _, passed in seen)
    if len(shape) > 3:
        return Stream(shape[-1], shape[2], keywords)
    hidden = getattr(getattr(located.decoder, "config", located.base.config).get_text_config(decoder=True), "hidden_size", 0)
    streams = shape[-1] // hidden if hidden and shape[-1] % hidden == 0 else 1  # qwen4_exp has its streams side by side
    return Stream(shape[-1] // streams, streams, keywords)


def _accelerators(model: nn.Module) -> list[torch.device]:
    return sorted({p.device for p in model.parameters() if p.device.type == "cuda"}, key=str)
