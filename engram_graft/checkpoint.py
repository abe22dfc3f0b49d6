"""Saving and loading a graft: one JSON file, one safetensors file, PEFT's adapter beside them. Nothing is ever unpickled.

The files describe themselves: the integers of the addresses are stored and read back, never drawn again, and fingerprints of the
tokenizer and the base refuse the wrong ones.
"""

from pathlib import Path

import numpy as np
import torch.distributed as dist
from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from engram_graft.adapter_config import read_adapter
from engram_graft.adapters import active_adapters, adapter_configs, find_peft, is_merged, load_adapter, remove_adapter
from engram_graft.bases import check_base, fingerprint, load_base
from engram_graft.compress import TokenMap, compress, lookup_of
from engram_graft.config import DTYPES
from engram_graft.errors import UserError
from engram_graft.files import (
    ADAPTER_CONFIG,
    ADAPTER_FILE,
    describe,
    memory_tensors,
    read_config,
    read_graft,
    write_graft,
)
from engram_graft.grafted import find_graft, grafts, memories, require_bare
from engram_graft.hooks import ungraft
from engram_graft.hub import resolve
from engram_graft.locate import embedding_weight, unwrap
from engram_graft.mapped import Mapped
from engram_graft.output import all_or_nothing
from engram_graft.packs import Directories, name_packs, remove_pack
from engram_graft.params import adapter_names
from engram_graft.recall import DEFAULT
from engram_graft.restore import restore
from engram_graft.sharding import is_sharded, reshard, whole
from engram_graft.storage import Resident


def save_graft(model: nn.Module, directory: str | Path, name: str | None = None) -> None:
    """Write the memory, and its PEFT adapter if there is one, to `directory`; the base is not written.

    Files of the same names are replaced, each whole: a failure leaves what was there. Of a model that FSDP2 shards every process has
    to call this, for adapters are gathered, and the first writes.

    Args:
        name: of the pack to write, where the model carries several; its adapter is the one of this name.

    Raises:
        UserError: the model has no memory, or several and no `name` is given; an adapter belongs to none; the directory cannot be
            written.
    """
    name = find_graft(model, name).name
    adapter = _require_savable(model, name)
    # on every process: `state_dict` does it where it is called, and the next forward pass would gather there alone
    reshard(model)
    peft, gathered, of_base = find_peft(model), None, fingerprint(model)
    if is_sharded(model):
        if peft is not None:
            adapters = adapter_names(peft)
            gathered = {name: whole(tensor.detach()) for name, tensor in peft.named_parameters() if name in adapters}
        if dist.get_rank() > 0:
            return
    with all_or_nothing(directory) as scratch:
        if peft is not None and adapter is not None:
            peft.save_pretrained(str(scratch), selected_adapters=[adapter], save_embedding_layers=False, state_dict=gathered)
            if adapter != DEFAULT:  # PEFT gives those a directory of their own
                for path in (scratch / adapter).iterdir():
                    path.rename(scratch / path.name)
                (scratch / adapter).rmdir()
            read_adapter(scratch / ADAPTER_CONFIG, scratch / ADAPTER_FILE)  # what could not be loaded again is not saved
        write_graft(scratch, memory_tensors(model, name), describe(model, of_base, name), Path(directory))
        written = {path.name for path in scratch.iterdir()}
    for file in {ADAPTER_FILE, ADAPTER_CONFIG} - written:  # of an older graft here that had LoRA
        (Path(directory) / file).unlink(missing_ok=True)


def load_graft(
    directory: Directories,
    base: str | Path | nn.Module | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    dtype: str | None = None,
    trainable: bool = False,
    table_dir: str | Path | None = None,
    name: str = DEFAULT,
) -> tuple[nn.Module, PreTrainedTokenizerBase]:
    """Load a graft directory, or a merged one, onto its base. The base is frozen; the memory too unless `trainable`.

    Several are loaded side by side as packs, which answer together: see `use_packs` and `remove_pack`. Their LoRA adapters get the
    packs' names and are active together.

    Args:
        directory: what `save_graft` or `export_merged` wrote, or the name it was pushed to the hub under, "user/name"; a list of them,
            which get their directories' names; or a dict by name.
        base: a name for `load_base`, or a loaded model (with its `tokenizer`), bare or one that `load_graft` returned; by default the
            base that the (first) graft names.
        dtype: of the base when it is loaded here; by default the one it was trained with.
        trainable: whether adapters and memory can go on training.
        table_dir: keep the tables in files of this directory (of several packs, in one named after each), for tables larger than
            memory. Filled at the first load; loads of the same graft use them again.
        name: of the memory, to load one beside others: letters, digits, "_" and "-".

    Returns:
        The model in eval mode (a PeftModel if there are adapters) and the tokenizer.

    Raises:
        UserError: a file is missing, corrupt or of another shape (the keys are named), tokenizer or base is the wrong one, a name is
            taken, or adapters cannot be added. A model that was given is then as it was.
    """
    packs = {given: resolve(path) for given, path in name_packs(directory, name).items()}
    described = [read_config(path) for path in packs.values()]
    if isinstance(base, nn.Module):
        if not isinstance(base, PreTrainedModel) and not (isinstance(base, PeftModel) and grafts(base)):
            raise UserError(
                f"base is a {type(base).__name__}: pass the bare model from AutoModelForCausalLM, its adapters come with the graft, or "
                "what load_graft returned"
            )
        if tokenizer is None:
            raise UserError("load_graft(base=a loaded model) needs its tokenizer too: pass tokenizer=")
        model: nn.Module = base
    else:
        first = next(iter(packs.values()))
        # absolute: a directory may be named as an alias is, and what is saved from it is opened from elsewhere
        source = str(base) if base else (str(first.absolute()) if described[0]["merged"] else described[0]["base"]["name"])
        exact = described[0]["merged"] and not base
        model, loaded_tokenizer = load_base(source, dtype or described[0]["base"]["dtype"], exact)
        tokenizer = tokenizer or loaded_tokenizer
    token_map, loaded = compress(tokenizer), []
    try:
        for pack, path in packs.items():
            within = table_dir if table_dir is None or len(packs) == 1 else Path(table_dir) / pack
            model = _load(model, path, pack, token_map, trainable, within)
            loaded.append(pack)
    except BaseException:
        for pack in loaded:
            model = remove_pack(model, pack)
        raise
    return model.eval(), tokenizer


def _load(
    model: nn.Module, directory: Path, name: str, token_map: TokenMap, trainable: bool, table_dir: str | Path | None
) -> nn.Module:
    """`model` with the graft in `directory` under this name; left as it was where it does not fit."""
    described, config, tensors, plan = read_graft(directory)
    if token_map.fingerprint != described["tokenizer"]["fingerprint"]:
        raise UserError(
            f"wrong tokenizer: this one has {len(token_map.lookup)} ids ({token_map.size} compressed) and fingerprint "
            f"{token_map.fingerprint[:12]}, the memory was trained with {described['tokenizer']['ids']} "
            f"({described['tokenizer']['compressed']}) and {described['tokenizer']['fingerprint'][:12]}; its rows would be noise"
        )
    if described["base"]["fingerprint"] is not None:
        try:
            check_base(model, described["base"]["fingerprint"])
        except UserError as error:
            raise UserError(f"{directory}: {error}") from error
    elif Path(str(unwrap(model).name_or_path)).absolute() != directory.absolute():
        # an export saved again by its own code: its files are its base
        raise UserError(
            f"{directory}: says of no other base that it fits; load it without base=, alone or as the first of several"
        )
    embedding_rows = embedding_weight(model).shape[0]
    own = lookup_of(config.addresses, token_map, embedding_rows)[0]
    if len(plan.lookup) == len(own) and not np.array_equal(plan.lookup, own):
        raise UserError(f"{directory}: hash.lookup is not the map of the tokenizer that it names; copy the graft anew")
    if len(plan.lookup) != len(own):
        raise UserError(f"wrong base: its embedding has {embedding_rows} rows, the memory's map covers {len(plan.lookup)} ids")
    require_bare(model, name)
    storage = Resident()
    if table_dir is not None:
        files = [described["files"][file] for file in sorted(described["files"]) if file not in (ADAPTER_FILE, ADAPTER_CONFIG)]
        storage = Mapped(table_dir, None if trainable else " ".join(files))
    whole_model = load_adapter(model, directory, name, trainable) if ADAPTER_FILE in described["files"] else model
    try:
        restore(whole_model, config, plan, token_map, tensors, trainable, storage, name)
        if storage.on_disk and not trainable:
            storage.settle()
            for memory in memories(whole_model, name):
                memory.table.reopen()
    except BaseException:
        if any(memory.name == name for memory in grafts(model)):
            ungraft(model, name)
        if ADAPTER_FILE in described["files"]:
            remove_adapter(model, name)
        raise
    return whole_model


def _require_savable(model: nn.Module, name: str) -> str | None:
    """The adapter that belongs to this memory, if any. Raises `UserError` where the files could not give back the model as it is."""
    packs, adapters, active = {memory.name for memory in grafts(model)}, set(adapter_configs(model)), active_adapters(model)
    if adapter_names(model) and find_peft(model) is None:
        raise UserError("the model's adapters cannot be saved with the graft: add them with peft's get_peft_model(model, config)")
    own = DEFAULT if len(packs) == 1 and adapters == {DEFAULT} else name
    if adapters and (set(active) != adapters or adapters - packs - {own}):
        raise UserError(
            f"the model has the adapters {sorted(adapters)}, active {active}: a graft is saved with one, whose adapter name is {own!r}; "
            "delete_adapter the others"
        )
    if is_merged(model):
        raise UserError("the adapter is merged into the base's weights: call model.unmerge_adapter() before saving")
    if (dtype := str(memories(model, name)[0].key_norm.dtype).removeprefix("torch.")) not in DTYPES:
        raise UserError(f"the memory is in {dtype}: call model.float() before saving; the formats are {', '.join(DTYPES)}")
    rows, ids = embedding_weight(model).shape[0], len(find_graft(model, name).lookup)
    if ids < rows:
        raise UserError(f"the embedding grew to {rows} rows after the graft, which knows {ids} ids: ungraft, resize, then graft")
    return own if own in adapters else None
