"""Folding LoRA into a base's weights."""

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import ModulesToSaveWrapper
from torch import Tensor, nn
from transformers import PreTrainedModel

from engram_graft.adapters import adapter_configs, only_adapters
from engram_graft.errors import UserError
from engram_graft.locate import unwrap
from engram_graft.params import adapter_names, base_name, is_memory


def merged_state(model: nn.Module, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Every tensor of the base by its plain name, active adapters folded into the weights in float32 and cast once, to `dtype` or
    what the weight has; tied tensors stay one tensor.

    Raises:
        UserError: adapters change what cannot be folded, the base's weights are codes, or beyond `dtype`.
    """
    base = unwrap(model)
    _plain_weights(base)
    adapters = adapter_names(base)
    if any(".token_adapter." in name for name in base.state_dict()):
        raise UserError("PEFT's trainable_token_indices cannot be exported merged yet: train without it")
    state = {
        base_name(name): tensor
        for name, tensor in base.state_dict().items()
        if name not in adapters and ".modules_to_save." not in name and not is_memory(name)
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
                state[f"{name}.{leaf}"] = value if dtype is not None else value.to(state[f"{name}.{leaf}"].dtype)
        elif isinstance(module, ModulesToSaveWrapper):
            trained = module.modules_to_save[module.active_adapters[0]]
            state.update({f"{name}.{leaf}": value for leaf, value in trained.state_dict().items()})
    if dtype is not None:
        cast: dict[tuple[int, torch.Size], Tensor] = {}  # by where a tensor lies: what is tied is cast once and stays one
        for name, tensor in state.items():
            if tensor.is_floating_point():
                place = tensor.data_ptr(), tensor.shape
                if place not in cast:
                    cast[place] = tensor.to(dtype)
                state[name] = cast[place]
                if tensor.isfinite().all() and not state[name].isfinite().all():
                    raise UserError(f"{name} reaches {float(tensor.abs().max()):.3g}, more than {dtype} can say: choose bfloat16")
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
def chosen_adapter(model: nn.Module, adapter: str | None) -> Iterator[None]:
    """With the LoRA adapter of this name active, alone; None is the one that there is.

    Raises:
        UserError: there is none of this name, or several and none was chosen.
    """
    names = sorted(adapter_configs(model))
    if adapter is None and len(names) > 1:
        raise UserError(f"the model has the LoRA adapters {', '.join(names)}: say which to merge, adapter={names[0]!r}")
    if adapter is not None and adapter not in names:
        raise UserError(f"no LoRA adapter {adapter!r}; the model has {', '.join(names) or 'none'}")
    with contextlib.nullcontext() if adapter is None else only_adapters(model, [adapter]):
        yield
