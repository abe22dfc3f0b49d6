"""Fresh PEFT LoRA adapters on a base, as a recipe's lora section describes them."""

import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from engram_graft.errors import UserError, first_line
from engram_graft.recipe import LoraOptions


def with_lora(model: nn.Module, options: LoraOptions, seed: int) -> nn.Module:
    """`model` with fresh adapters, whose initial values are a function of `seed`; with rank 0 `model` as it is.

    Raises:
        UserError: the base has no linear layers of these names.
    """
    if not options.rank:
        return model
    torch.manual_seed(seed)
    config = LoraConfig(
        r=options.rank,
        lora_alpha=options.alpha,
        lora_dropout=options.dropout,
        target_modules=list(options.target_modules),
        task_type="CAUSAL_LM",
    )
    try:
        return get_peft_model(model, config)  # type: ignore[arg-type]
    except ValueError as error:
        raise UserError(
            f"lora.target_modules={list(options.target_modules)}: {first_line(error)} Name this base's linear layers with "
            "--set lora.target_modules=[...], or pass --lora-rank 0"
        ) from error
