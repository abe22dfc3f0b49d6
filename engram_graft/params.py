"""Whose parameter is it: the memory's, an adapter's, or the base's. Freezing, saving, counting and fingerprints all ask here."""

import re

from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn


def is_memory(name: str) -> bool:
    """Whether a parameter or buffer of this name belongs to the memory."""
    return re.search(r"(^|\.)engram(_hash)?(_pack_[^.]+)?\.", name) is not None


def adapter_names(model: nn.Module, active: bool = False) -> set[str]:
    """Names, as `model.named_parameters()` gives them, of the parameters that PEFT added; only active adapters' if so asked."""
    prefixes = []
    for name, module in model.named_modules():
        if isinstance(module, BaseTunerLayer):
            parts = module.active_adapters if active else [""]
            prefixes += [f"{name}.{layer}.{part}".rstrip(".") + "." for layer in module.adapter_layer_names for part in parts]
    saved = {n for n, p in model.named_parameters() if ".modules_to_save." in n and (p.requires_grad or not active)}
    return {n for n, _ in model.named_parameters() if n.startswith(tuple(prefixes))} | saved


def base_name(name: str) -> str:
    """The name that a parameter of the base has without PEFT's wrappers around its module."""
    return name.removeprefix("base_model.model.").replace(".base_layer.", ".").replace(".original_module.", ".")
