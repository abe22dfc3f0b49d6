"""PEFT's adapters beside memories: several active together, switched for a call, loaded and taken off by name.

PEFT adds up what active LoRA adapters change, in the order they are listed; here they are listed by name, so that the order in which
they were loaded is of no account. Switching never decides what is trained: `requires_grad` stays as it is.
"""

import contextlib
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from peft import PeftConfig, PeftModel, PeftType, get_peft_model_state_dict
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from peft.utils import CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME
from peft.utils.other import AuxiliaryTrainingWrapper
from safetensors import safe_open
from torch import nn

from engram_graft.adapter_config import STARTS, read_adapter
from engram_graft.errors import UserError, first_line
from engram_graft.locate import unwrap

_OF_PEFT = ("lora_", "base_layer", "base_model", "original_module", "modules_to_save", "training")  # parts of its names
_OWN_WAYS = {  # settings of a LoRA that make it something other than an addend to the base's weights
    "use_dora": "is a DoRA, which scales the sum of all",
    "bias": "trains biases of the base",
    "trainable_token_indices": "replaces embeddings",
    "alora_invocation_tokens": "is on for some tokens only",
    "target_parameters": "is on parameters, where PEFT takes one adapter",
    "layer_replication": "changes the base's layers",
}


def find_peft(model: nn.Module) -> PeftModel | None:
    """The PeftModel under torch.compile or DDP, if any."""
    return next((module for module in model.modules() if isinstance(module, PeftModel)), None)


def adapter_configs(model: nn.Module) -> Mapping[str, PeftConfig]:
    """The adapters there are, by name."""
    found: Mapping[str, PeftConfig] = getattr(unwrap(model), "peft_config", {})
    return found


def active_adapters(model: nn.Module) -> list[str]:
    """Names of the active adapters, sorted."""
    return sorted({name for _, layer in _layers(model) for name in layer.active_adapters})


def is_merged(model: nn.Module) -> bool:
    """Whether an adapter is merged into the base's weights, so that it cannot be switched without rounding."""
    return any(isinstance(module, BaseTunerLayer) and module.merged for module in model.modules())


def require_switchable(model: nn.Module) -> None:
    """Raise `UserError` if the weights under the adapters are not the base's, so that without them it is not the base."""
    if is_merged(model):
        raise UserError("an adapter is merged into the base's weights: call model.unmerge_adapter() first")
    for name, config in adapter_configs(model).items():
        if fault := _changes_base(config):
            raise UserError(f"the adapter {name!r} {fault}: to be without it, load the base anew")


@contextlib.contextmanager
def only_adapters(model: nn.Module, names: Sequence[str]) -> Iterator[None]:
    """Run calls inside the `with` with these adapters alone, on even where they were disabled; afterwards all is as it was."""
    peft = find_peft(model)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_same_trainable(model))
        for _, layer in _layers(model):
            stack.callback(_switch, layer, layer.active_adapters, layer.disable_adapters)
        if peft is not None:
            stack.callback(_name_active, peft, active_adapters(model))
        with _same_trainable(model):
            if peft is not None and not names:  # prompt learning too
                stack.enter_context(peft.disable_adapter())
            for _, layer in _layers(model):
                _switch(layer, names or layer.active_adapters, not names)
            if peft is not None and names:
                _name_active(peft, names)
        yield


def activate(model: nn.Module, names: Collection[str]) -> None:
    """Make these adapters, and no others, the active ones."""
    with _same_trainable(model):
        for _, layer in _layers(model):
            _switch(layer, sorted(names), layer.disable_adapters)
        if (peft := find_peft(model)) is not None:
            _name_active(peft, sorted(names))


def load_adapter(model: nn.Module, directory: Path, name: str, trainable: bool) -> PeftModel:
    """`model` with the adapter in `directory` under `name`, active beside those that are.

    Raises:
        UserError: a tensor does not find its place, or the adapter cannot be added to the others; the model is as it was.
    """
    before, others, peft = active_adapters(model), adapter_configs(model), find_peft(model)
    options = read_adapter(directory / CONFIG_NAME, directory / SAFETENSORS_WEIGHTS_NAME)
    if name in others:
        raise UserError(f"the model has an adapter {name!r} already: load this graft under another name")
    own = {part for path, _ in [*model.named_modules(), *model.named_parameters()] for part in path.split(".")}
    if name in own or name.startswith(_OF_PEFT) or hasattr(nn.ModuleDict, name):
        raise UserError(
            f"{directory}: {name!r} is also the name of a part of the model, and PEFT would mix them up: give another name"
        )
    with _same_trainable(model), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Adapter name")  # one that is a part of "lora_": the keys are compared below
        try:
            require_addable({**others, name: options})
            if peft is None:
                peft = PeftModel.from_pretrained(model, str(directory), name, is_trainable=trainable, config=options)  # type: ignore[arg-type]
            else:
                peft.load_adapter(str(directory), name, is_trainable=trainable)
            with safe_open(directory / SAFETENSORS_WEIGHTS_NAME, framework="pt") as file:
                stored = set(file.keys())
            placed = set(get_peft_model_state_dict(peft, adapter_name=name, save_embedding_layers=False))
            if stored != placed:
                odd = ", ".join(sorted(stored ^ placed)[:4])
                raise UserError(f"{directory / SAFETENSORS_WEIGHTS_NAME}: does not fit its adapter_config.json: {odd}")
            activate(peft, {*before, name})
        except BaseException as error:
            remove_adapter(model, name)
            activate(model, before)
            if isinstance(error, UserError) or not isinstance(error, Exception):
                raise  # PEFT fails with exceptions of any kind on names, indices or patterns that do not fit
            raise UserError(f"{directory}: its LoRA adapter cannot be loaded ({first_line(error)})") from error
    return peft


def remove_adapter(model: nn.Module, name: str) -> nn.Module:
    """`model` without this adapter, also one that was put in only in part; without any adapter left, the bare base."""
    base, peft = unwrap(model), find_peft(model)
    left = [other for other in active_adapters(model) if other != name]
    with _same_trainable(model):
        for path, layer in _layers(base):
            layer.set_adapter([other for other in left if other in layer._get_available_adapters()])
            if isinstance(layer, BaseTunerLayer):
                layer.delete_adapter(name)
            elif name in layer._get_available_adapters():
                layer.delete_adapter(name, new_active_adapters=None)
            if not layer._get_available_adapters():
                parent, _, leaf = path.rpartition(".")
                setattr(base.get_submodule(parent), leaf, _inner(layer))
    configs: Any = adapter_configs(base)
    if name in configs:
        del configs[name]
    if not configs:
        vars(base).pop("peft_config", None)
        return base
    if peft is not None:
        _name_active(peft, left)
    return model


def require_addable(configs: Mapping[str, PeftConfig]) -> None:
    """Raise `UserError` unless what these adapters change adds up, whichever of them are active."""
    if len(configs) < 2:
        return
    faults = {name: fault for name, config in configs.items() if (fault := _not_addable(config))}
    replacing = sorted(name for name, config in configs.items() if getattr(config, "modules_to_save", None))
    if len(replacing) > 1:
        faults[replacing[-1]] = f"replaces whole modules (modules_to_save), as {replacing[0]!r} does"
    for name, fault in faults.items():
        raise UserError(
            f"the adapters {', '.join(sorted(configs))} cannot be added: {name!r} {fault}; load it alone, or train its pack with plain LoRA"
        )


def _not_addable(config: Any) -> str | None:
    """Why an adapter is no addend to the base's weights; None if it is one."""
    if config.peft_type != PeftType.LORA:
        return f"is a {config.peft_type.value}"
    if fault := _changes_base(config):
        return fault
    return next((why for name, why in _OWN_WAYS.items() if getattr(config, name, None) not in (None, False, "none", [])), None)


def _changes_base(config: Any) -> str | None:
    start = getattr(config, "init_lora_weights", True)
    return None if start in STARTS else f"changes the base's weights (init_lora_weights={start!r})"


def _layers(model: nn.Module) -> list[tuple[str, Any]]:
    """The modules that PEFT put in place of the base's, by path; not those inside of others."""
    found: dict[str, Any] = {}
    for path, module in model.named_modules():
        if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper) and not path.startswith(tuple(f"{p}." for p in found)):
            found[path] = module
    return list(found.items())


def _switch(layer: Any, names: Sequence[str], disabled: bool) -> None:
    """Only those of the names that a layer has: a wrapped module knows no others."""
    layer.enable_adapters(not disabled)
    layer.set_adapter([name for name in names if name in layer._get_available_adapters()])


def _name_active(peft: PeftModel, names: Sequence[str]) -> None:
    """Tell the PeftModel which adapters its layers have active. It looks up the config of one, which has to be there."""
    names = [name for name in names if name in peft.peft_config]
    if isinstance(peft.base_model, BaseTuner):
        peft.base_model.active_adapter = names[0] if len(names) == 1 else names
    if peft.peft_config:
        peft.active_adapter = names[0] if names else next(iter(peft.peft_config))


def _inner(layer: Any) -> nn.Module:
    """What a layer of PEFT's stands in front of."""
    if hasattr(layer, "unload_and_optionally_merge_module"):
        found: nn.Module = layer.unload_and_optionally_merge_module(merge=False, safe_merge=False, adapter_names=None)
        return found
    return layer.get_base_layer()


@contextlib.contextmanager
def _same_trainable(model: nn.Module) -> Iterator[None]:
    """PEFT thaws what it switches on: put back what was trainable and what was not."""
    before = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        yield
    finally:
        for parameter, trainable in before:
            parameter.requires_grad_(trainable)
