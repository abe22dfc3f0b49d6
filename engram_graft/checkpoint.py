"""Saving and loading a graft: one JSON file, one safetensors file, PEFT's adapter beside them. Nothing is ever unpickled.

The files describe themselves: the integers of the addresses are stored and read back, never drawn again, and fingerprints of the
tokenizer and the base refuse the wrong ones.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from peft import PeftModel, get_peft_model_state_dict
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from engram_graft.adapter import read_adapter
from engram_graft.bases import check_base, fingerprint, load_base
from engram_graft.compress import TokenMap, compress, lookup_of
from engram_graft.config import DTYPES, EngramConfig
from engram_graft.errors import UserError, first_line
from engram_graft.files import (
    ADAPTER_CONFIG,
    ADAPTER_FILE,
    describe,
    memory_parts,
    memory_tensors,
    read_graft,
    write_graft,
)
from engram_graft.grafted import find_graft, memories, require_bare
from engram_graft.hashing import HashPlan
from engram_graft.hooks import attach, ungraft
from engram_graft.hub import resolve
from engram_graft.locate import embedding_weight, locate
from engram_graft.mapped import Mapped
from engram_graft.output import all_or_nothing
from engram_graft.params import adapter_names, is_memory
from engram_graft.sharding import is_sharded, reshard, sharded_as, whole
from engram_graft.storage import Resident


def save_graft(model: nn.Module, directory: str | Path) -> None:
    """Write the memory, and the PEFT adapters if there are any, to `directory`; the base is not written.

    Files of the same names are replaced, each whole: a failure leaves what was there. Of a model that FSDP2 shards every process has
    to call this, for adapters are gathered, and the first writes.

    Raises:
        UserError: the model has no memory, its adapters are not PEFT's "default" ones, or the directory cannot be written.
    """
    find_graft(model)
    _require_savable(model)
    # on every process: `state_dict` does it where it is called, and the next forward pass would gather there alone
    reshard(model)
    peft, gathered, of_base = _peft_model(model), None, fingerprint(model)
    if is_sharded(model):
        if peft is not None:
            adapters = adapter_names(peft)
            gathered = {name: whole(tensor.detach()) for name, tensor in peft.named_parameters() if name in adapters}
        if dist.get_rank() > 0:
            return
    with all_or_nothing(directory) as scratch:
        if peft is not None:
            peft.save_pretrained(str(scratch), save_embedding_layers=False, state_dict=gathered)
        write_graft(scratch, memory_tensors(model), describe(model, of_base), Path(directory))
        written = {path.name for path in scratch.iterdir()}
    for name in {ADAPTER_FILE, ADAPTER_CONFIG} - written:  # of an older graft here that had LoRA
        (Path(directory) / name).unlink(missing_ok=True)


def load_graft(
    directory: str | Path,
    base: str | Path | PreTrainedModel | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    dtype: str | None = None,
    trainable: bool = False,
    table_dir: str | Path | None = None,
) -> tuple[nn.Module, PreTrainedTokenizerBase]:
    """Load a graft directory, or a merged one, onto its base. The base is frozen; the memory too unless `trainable`.

    Args:
        directory: what `save_graft` or `export_merged` wrote, or the name it was pushed to the hub under, "user/name".
        base: a name for `load_base`, or a loaded model (with its `tokenizer`); by default the base the graft names.
        dtype: of the base when it is loaded here; by default the one it was trained with.
        trainable: whether adapters and memory can go on training.
        table_dir: keep the tables in files of this directory, for tables larger than memory. Filled at the first load; loads of the
            same graft use them again.

    Returns:
        The model in eval mode (a PeftModel if there are adapters) and the tokenizer.

    Raises:
        UserError: a file is missing, corrupt or of another shape (the keys are named), or tokenizer or base is the wrong one.
    """
    directory = resolve(directory)
    described, config, tensors, plan = read_graft(directory)
    if isinstance(base, nn.Module) and not isinstance(base, PreTrainedModel):
        raise UserError(
            f"base is a {type(base).__name__}: pass the bare model from AutoModelForCausalLM, its adapters come with the graft"
        )
    if isinstance(base, PreTrainedModel):
        if tokenizer is None:
            raise UserError("load_graft(base=a loaded model) needs its tokenizer too: pass tokenizer=")
        model: nn.Module = base
    else:
        name = str(base) if base else (str(directory) if described["merged"] else described["base"]["name"])
        model, loaded_tokenizer = load_base(name, dtype or described["base"]["dtype"], exact=described["merged"] and not base)
        tokenizer = tokenizer or loaded_tokenizer
    token_map = compress(tokenizer)
    if token_map.fingerprint != described["tokenizer"]["fingerprint"]:
        raise UserError(
            f"wrong tokenizer: this one has {len(token_map.lookup)} ids ({token_map.size} compressed) and fingerprint "
            f"{token_map.fingerprint[:12]}, the memory was trained with {described['tokenizer']['ids']} "
            f"({described['tokenizer']['compressed']}) and {described['tokenizer']['fingerprint'][:12]}; its rows would be noise"
        )
    if described["base"]["fingerprint"] is not None:  # what an export's own code saved again has none: its files are its base
        check_base(model, described["base"]["fingerprint"])
    embedding_rows = embedding_weight(model).shape[0]
    own = lookup_of(config.addresses, token_map, embedding_rows)[0]
    if len(plan.lookup) == len(own) and not np.array_equal(plan.lookup, own):
        raise UserError(f"{directory}: hash.lookup is not the map of the tokenizer that it names; copy the graft anew")
    if len(plan.lookup) != len(own):
        raise UserError(f"wrong base: its embedding has {embedding_rows} rows, the memory's map covers {len(plan.lookup)} ids")
    require_bare(model)
    if ADAPTER_FILE in described["files"]:
        model = _with_adapter(model, directory, trainable)
    storage = Resident()
    if table_dir is not None:
        files = [described["files"][name] for name in sorted(described["files"]) if name not in (ADAPTER_FILE, ADAPTER_CONFIG)]
        storage = Mapped(table_dir, None if trainable else " ".join(files))
    restore(model, config, plan, token_map, tensors, trainable, storage)
    if storage.on_disk and not trainable:
        storage.settle()
        for memory in memories(model):
            memory.table.reopen()
    return model.eval(), tokenizer


def _require_savable(model: nn.Module) -> None:
    """Raise `UserError` where the files could not give back the model as it is."""
    peft = _peft_model(model)
    if adapter_names(model) and peft is None:
        raise UserError("the model's adapters cannot be saved with the graft: add them with peft's get_peft_model(model, config)")
    if peft is not None and (set(peft.peft_config) != {"default"} or list(peft.active_adapters) != ["default"]):
        raise UserError(
            f"the model has the adapters {sorted(peft.peft_config)}, active {list(peft.active_adapters)}: a graft is saved with one, "
            "whose adapter name is 'default'; delete_adapter the others"
        )
    if any(isinstance(module, BaseTunerLayer) and module.merged for module in model.modules()):
        raise UserError("the adapter is merged into the base's weights: call model.unmerge_adapter() before saving")
    if (dtype := str(memories(model)[0].key_norm.dtype).removeprefix("torch.")) not in DTYPES:
        raise UserError(f"the memory is in {dtype}: call model.float() before saving; the formats are {', '.join(DTYPES)}")
    rows, ids = embedding_weight(model).shape[0], len(find_graft(model).lookup)
    if ids < rows:
        raise UserError(f"the embedding grew to {rows} rows after the graft, which knows {ids} ids: ungraft, resize, then graft")


def _peft_model(model: nn.Module) -> PeftModel | None:
    """The PeftModel under torch.compile or DDP, if any."""
    return next((module for module in model.modules() if isinstance(module, PeftModel)), None)


def _with_adapter(model: nn.Module, directory: Path, trainable: bool) -> PeftModel:
    """The model with the directory's adapter, every tensor of which has to find its place."""
    options = read_adapter(directory / ADAPTER_CONFIG, directory / ADAPTER_FILE)
    try:
        loaded = PeftModel.from_pretrained(model, str(directory), is_trainable=trainable, config=options)
    except Exception as error:  # of whatever kind PEFT fails with on names, indices or patterns that do not fit
        raise UserError(f"{directory}: its LoRA adapter cannot be loaded ({first_line(error)})") from error
    with safe_open(directory / ADAPTER_FILE, framework="pt") as file:
        stored = set(file.keys())
    own = set(get_peft_model_state_dict(loaded, save_embedding_layers=False))
    if stored != own:
        loaded.unload()
        raise UserError(f"{directory / ADAPTER_FILE}: does not fit {ADAPTER_CONFIG}: {', '.join(sorted(stored ^ own)[:4])}")
    return loaded


def restore(
    model: nn.Module,
    config: EngramConfig,
    plan: HashPlan,
    token_map: TokenMap,
    tensors: Mapping[str, Tensor],
    trainable: bool,
    storage: Resident | None = None,
) -> None:
    """Attach a memory to `model` and give it these tensors. Strict: every tensor is there, none is over, shapes and dtypes are equal."""
    attach(locate(model), config, plan, token_map, storage or Resident())
    try:
        fill(model, tensors, stored=storage is not None and storage.filled)
    except UserError:
        ungraft(model)
        raise
    for name, parameter in model.named_parameters():
        if is_memory(name):
            parameter.requires_grad_(trainable)


@torch.no_grad()
def fill(model: nn.Module, tensors: Mapping[str, Tensor], stored: bool = False) -> None:
    """Give the memory of `model` these tensors (canonical names), its rows unless they are `stored` in its files already.

    Raises:
        UserError: a key is missing, over, or does not fit; each is named.
    """
    tables = {f"layers.{memory.layer_id}.table": memory.table for memory in memories(model)}
    dense = {
        f"{part}.{name}": tensor
        for part, module in memory_parts(model).items()
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]
        if not name.startswith("table.")
    }
    own = dense.keys() | {f"{name}.{leaf}" for name in tables for leaf in ("rows", "values")}
    faults = [f"missing {name}" for name in own - tensors.keys()] + [f"unexpected {name}" for name in tensors.keys() - own]
    for name in dense.keys() & tensors.keys():
        have, want = tensors[name], dense[name]
        if have.shape != want.shape or have.dtype != want.dtype:
            faults.append(f"{name} is {have.dtype} {list(have.shape)}, not {want.dtype} {list(want.shape)}")
    if faults:
        raise UserError(f"the graft's tensors do not fit its config: {'; '.join(sorted(faults))}")
    for name, table in tables.items():
        try:
            table.load_rows(tensors[f"{name}.rows"], tensors[f"{name}.values"], stored)
        except UserError as error:
            raise UserError(f"the graft's tensors do not fit its config: {name}: {error}") from error
    for name, tensor in dense.items():
        tensor.copy_(tensors[name])


@torch.no_grad()
def fill_adapters(model: nn.Module, directory: Path) -> None:
    """Give the adapters of a sharded model the tensors in `directory`, each process its part, where PEFT would load them whole."""
    reshard(model)
    own = get_peft_model_state_dict(_peft_model(model), save_embedding_layers=False)
    stored = load_file(directory / ADAPTER_FILE)
    if own.keys() != stored.keys():
        odd = ", ".join(sorted(stored.keys() ^ own.keys())[:4])
        raise UserError(f"{directory / ADAPTER_FILE}: does not fit the model's adapters: {odd}")
    for name, tensor in own.items():
        tensor.copy_(sharded_as(tensor, stored[name]))
