"""A memory that somebody pretrained into a model of their own, and putting it in front of layers of another: what the layouts share."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from engram_graft.compress import TokenMap, compress, lookup_of
from engram_graft.config import EngramConfig
from engram_graft.errors import UserError, first_line
from engram_graft.grafted import grafts, memories, only_memories, require_bare
from engram_graft.hashing import HashPlan
from engram_graft.hooks import attach, ungraft
from engram_graft.locate import dry_run, embedding_weight, locate
from engram_graft.plan import plan_hashes
from engram_graft.recall import DEFAULT
from engram_graft.storage import Resident

MAX_ORDER = 16  # of n-grams; more than any memory has


@dataclasses.dataclass(frozen=True)
class Pretrained:
    """Args:
    config: what it computes; `layer_ids` are the layers it was trained in front of.
    width: channels of a residual stream.
    ids: of the vocabulary that its addresses hash: token ids, or compressed ones.
    dense: the tensors of its layer `index` by the names of `Engram`'s parameters, without the table.
    rows: pieces `[n, head_dim]` of that layer's table, in order; padding behind its last row is passed over.
    table_rows: how many those are, a layer.
    integers: "multipliers" and "primes" as the checkpoint has them, `[layers, ...]`; what is not there is drawn.
    faults: what is wrong with the checkpoint itself.
    """

    config: EngramConfig
    width: int
    ids: int
    dense: Callable[[int], dict[str, Tensor]]
    rows: Callable[[int], Iterator[Tensor]]
    table_rows: Sequence[int]
    integers: Mapping[str, np.ndarray]
    faults: Sequence[str]


def attach_pretrained(
    memory: Pretrained,
    source: Path,
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    layers: Sequence[int] | None = None,
    storage: Resident | None = None,
) -> None:
    """Attach a pretrained memory to `model`, in place, all its rows as if training had looked them up.

    Args:
        source: the checkpoint's directory.
        layers: of the base, in place of the memory's own; each keeps the addresses it had.

    Raises:
        UserError: it does not fit; every reason is given.
    """
    token_map = compress(tokenizer)
    faults = [*memory.faults, *_vocabulary(memory, source, tokenizer, token_map), *_geometry(memory, model, layers)]
    # of a config that its own tensors contradict no integers are drawn: there could be any number of them
    plan = None if memory.faults else _plan(memory, token_map, embedding_weight(model).shape[0])
    for layer_id, have, need in zip(memory.config.layer_ids, memory.table_rows, plan.table_rows if plan else (), strict=False):
        if have < need:
            faults.append(f"the table of its layer {layer_id} has {have} rows, its primes add up to {need}")
    if faults or plan is None:
        raise UserError(f"{source}: this memory cannot be put on the base: {'; '.join(faults)}")
    config = dataclasses.replace(memory.config, layer_ids=tuple(layers or memory.config.layer_ids))
    attach(locate(model), config, plan, token_map, storage or Resident())
    try:
        _fill(memory, model)
    except BaseException:
        ungraft(model, DEFAULT)
        raise


def _plan(memory: Pretrained, token_map: TokenMap, embedding_rows: int) -> HashPlan:
    """The memory's integers, with the base's look-up: those that the checkpoint has, the others drawn."""
    lookup, _ = lookup_of(memory.config.addresses, token_map, embedding_rows)
    assert memory.config.pad_id is not None
    drawn = plan_hashes(memory.config, lookup, memory.ids, min(memory.config.pad_id, len(lookup) - 1))
    primes = memory.integers.get("primes", drawn.primes)
    multipliers = memory.integers.get("multipliers", drawn.multipliers)
    return dataclasses.replace(drawn, multipliers=multipliers, primes=primes, offsets=primes.cumsum(1) - primes)


def _geometry(memory: Pretrained, model: nn.Module, layers: Sequence[int] | None) -> list[str]:
    located, config = locate(model), memory.config
    require_bare(model)
    with only_memories(grafts(model), []):
        stream = dry_run(located)
    faults = []
    if stream.width != memory.width:
        faults.append(f"its streams have {memory.width} channels, the base's {stream.width}")
    if stream.streams != config.hc_mult:
        faults.append(f"it has {config.hc_mult} residual streams, the base {stream.streams}")
    wanted, count = tuple(layers or config.layer_ids), len(located.layers)
    if len(wanted) != len(config.layer_ids):
        faults.append(f"layers {list(wanted)} are {len(wanted)}, it has {len(config.layer_ids)} ({list(config.layer_ids)})")
    if beyond := [layer for layer in wanted if not 0 <= layer < count]:
        faults.append(
            f"layers {beyond} do not exist, the base has 0 to {count - 1}: choose {len(config.layer_ids)} with --layers"
        )
    return faults


def _vocabulary(memory: Pretrained, source: Path, tokenizer: PreTrainedTokenizerBase, token_map: TokenMap) -> list[str]:
    faults, ids, pad = [], len(token_map.lookup), memory.config.pad_id
    if memory.config.addresses == "qwen4_exp" and ids > memory.ids:
        faults.append(f"the base's tokenizer has {ids} ids, the memory knows {memory.ids}")
    if memory.config.addresses == "engram" and token_map.size != memory.ids:
        faults.append(f"the base's vocabulary is {token_map.size} ids compressed, the memory's {memory.ids}")
    if pad is not None and pad >= ids:
        faults.append(f"its pad is the id {pad}, the base's tokenizer has ids 0 to {ids - 1}")
    if (source / "tokenizer.json").is_file():
        try:  # the file alone: a tokenizer's class could be code
            theirs: Any = PreTrainedTokenizerFast(tokenizer_file=str(source / "tokenizer.json"))
        except Exception as error:  # the Rust library raises nothing narrower
            return [*faults, f"its tokenizer.json cannot be read ({first_line(error)})"]
        names = {i: token for token, i in tokenizer.get_vocab().items()}
        common = [(token, i) for token, i in theirs.get_vocab().items() if i in names]
        if other := sum(names[i] != token for token, i in common):
            faults.append(
                f"of {len(common)} token ids that both have, {other} are other tokens in the base's tokenizer than in its own"
            )
    return faults


@torch.no_grad()
def _fill(memory: Pretrained, model: nn.Module) -> None:
    for index, layer in enumerate(memories(model, DEFAULT)):
        parameters = {name: parameter for name, parameter in layer.named_parameters() if name != "table.weight"}
        tensors = memory.dense(index)
        assert parameters.keys() == tensors.keys(), parameters.keys() ^ tensors.keys()
        for name, parameter in parameters.items():
            if not bool(tensors[name].isfinite().all()):
                raise UserError(f"the checkpoint's memory {index}: {name} is not finite; copy the checkpoint anew")
            parameter.copy_(tensors[name].reshape(parameter.shape))
        layer.table.load_all(_first(len(layer.table.weight), memory.rows(index)))


def _first(count: int, pieces: Iterator[Tensor]) -> Iterator[Tensor]:
    for piece in pieces:
        yield piece[:count]
        count -= len(piece[:count])


def number(text: Mapping[str, Any], *names: str, default: int | None = None, least: int = 0, most: int = 2**40) -> int:
    """A whole number that a checkpoint's config has under one of these names. Raises `UserError` if it has not."""
    value = next((text[name] for name in names if text.get(name) is not None), default)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise UserError(
            f"the checkpoint's config has {names[0]}={value!r}: a whole number from {least} to {most} is needed there"
        )
    return value


def layer_numbers(text: Mapping[str, Any], name: str) -> list[int]:
    """A list of layer numbers in a checkpoint's config."""
    value = text.get(name)
    if not isinstance(value, list) or not value or not all(isinstance(v, int) and not isinstance(v, bool) for v in value):
        raise UserError(f"the checkpoint's config has {name}={value!r}: a list of layer numbers is needed there")
    return value


def epsilon(text: Mapping[str, Any]) -> float:
    """The eps of the norms in a checkpoint's config."""
    value = next((text[name] for name in ("rms_norm_eps", "norm_eps") if text.get(name) is not None), 1e-6)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise UserError(f"the checkpoint's config has rms_norm_eps={value!r}: a number is needed there")
    return float(value)
