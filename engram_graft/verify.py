"""Checking the promises on the model at hand: a fresh graft changes no bit, a trained one answers the same however it is run."""

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedTokenizerBase

from engram_graft.config import DTYPES
from engram_graft.errors import PromiseError, UserError
from engram_graft.grafted import disable_graft, memories
from engram_graft.layer import Engram
from engram_graft.locate import unwrap
from engram_graft.modes import no_learning
from engram_graft.params import adapter_names, is_memory

TEXTS = (
    "The river rises in the hills and",
    "To make bread, mix flour, water, salt and yeast. Then wait until the dough has doubled.",
    "def area(r):\n    return 3.14159 * r * r\n",
    "1 2 3 4 5 6 7",
)
MAX_COPY_BYTES = 8 * 2**30  # of a base that is copied to be checked in another dtype
DECODED = 4  # tokens at the end of each text that are fed one by one, from the cache


def verify_identity(model: nn.Module, tokenizer: PreTrainedTokenizerBase, dtypes: Sequence[str] | None = None) -> dict[str, Any]:
    """Compare every logit of a freshly grafted model with its base's, bit for bit.

    Each text alone, all in a left-padded batch, and decoded from a cache; in eval and in train mode; with the base in float32 and
    in bfloat16. Adapters are on in the graft and off in the base. Then every grafted layer's zero factor is nudged in turn, which
    must be noticed.

    Args:
        dtypes: of the base; by default its own and the other of float32 and bfloat16, the latter on a copy, which is left out
            (and listed under "skipped") when it would need more than 8 GiB.

    Returns:
        {"bitwise": True, "logits": how many were compared, "checks": [...], "nudges": [...], "skipped": {...}}.

    Raises:
        PromiseError: a logit differs, a grafted layer did not run, or a nudge went unnoticed.
        UserError: the model has no memory.
    """
    if dtypes is not None and (isinstance(dtypes, str) or not set(dtypes) <= set(DTYPES)):
        raise UserError(f"dtypes={dtypes!r}: must be a list of {', '.join(DTYPES)}")
    own = str(unwrap(model).dtype).removeprefix("torch.")
    wanted = list(dtypes) if dtypes is not None else list(dict.fromkeys([own, "float32", "bfloat16"]))
    report: dict[str, Any] = {"bitwise": True, "logits": 0, "checks": [], "nudges": [], "skipped": {}}
    batches = _batches(tokenizer, unwrap(model).device)
    for dtype in wanted:
        subject = model
        if dtype != own:
            need = sum(p.numel() for p in model.parameters()) * getattr(torch, dtype).itemsize
            if dtypes is None and need > MAX_COPY_BYTES:
                report["skipped"][dtype] = (
                    f"a copy needs {need / 2**30:.1f} GiB; pass dtypes=[{dtype!r}] to check it all the same"
                )
                continue
            shared = {id(memory.table): memory.table for memory in memories(model)}  # the copy reads the same rows
            subject = _base_cast(copy.deepcopy(model, shared), getattr(torch, dtype))
        for mode in ("eval", "train"):
            for check, run in (("texts", _texts), ("left-padded batch", _left_padded), ("cached decode", _decoded)):
                learning = mode == "train"  # with gradients too, as training runs it
                with no_learning(subject, learning), torch.set_grad_enabled(learning), unfiltered(subject):
                    difference, count, equal = _compare(subject, lambda run=run, subject=subject: run(subject, batches))  # type: ignore[misc]
                entry = {"dtype": dtype, "mode": mode, "check": check, "logits": count, "max_difference": difference}
                report["checks"].append(entry)
                report["logits"] += count
                if not equal:
                    raise PromiseError(
                        f"identity does not hold: {check}, {mode} mode, base in {dtype}: logits differ by up to {difference:.3g}. "
                        "A trained memory is no identity (ungraft and graft anew); for a fresh one this is a fault, please report it"
                    )
        report["nudges"] += _nudges(subject, batches, dtype)
    return report


def verify_decoding(model: nn.Module, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str] = TEXTS) -> dict[str, Any]:
    """Compare the ways of running a grafted model, trained or not, with one full forward of each text.

    Token by token and in chunks of 4 from a cache, in a left-padded batch, packed in one row by their position ids, and after a cache was
    rewound by 4 tokens; with the seen filter off, so that the memory speaks at
    every position of any text. Kernels add up in another order for another shape, so
    the bare base differs a little between these ways too; it is the control.

    Returns:
        {"ok": bool, way: {"max_difference": the graft's, "base": the control's, "ok": bool}, ...}: a way is ok when the graft
        differs by at most 1e-4 or four times the control.
    """
    device = unwrap(model).device
    alone = [tokenizer(text, return_tensors="pt")["input_ids"].to(device) for text in texts]
    batch = _pad_left(tokenizer, alone)

    def one_by_one() -> list[Tensor]:
        return [_in_chunks(model, ids, 1) for ids in alone]

    def chunks() -> list[Tensor]:
        return [_in_chunks(model, ids, 4) for ids in alone]

    def padded() -> list[Tensor]:
        logits = model(**batch).logits
        return [logits[row : row + 1, -ids.shape[1] :] for row, ids in enumerate(alone)]

    def packed() -> list[Tensor]:
        positions = torch.cat([torch.arange(ids.shape[1], device=device) for ids in alone])[None]
        logits = model(input_ids=torch.cat(alone, 1), position_ids=positions, use_cache=False).logits
        return list(logits.split([ids.shape[1] for ids in alone], 1))

    def rewound() -> list[Tensor]:
        return [_rewound(model, ids) for ids in alone]

    ways = {
        "token by token": one_by_one,
        "chunks of 4": chunks,
        "left-padded batch": padded,
        "packed documents": packed,
        "rewound cache": rewound,
    }
    with no_learning(model), unfiltered(model):
        differences = {way: _largest(run(), [model(ids).logits for ids in alone]) for way, run in ways.items()}
        with disable_graft(model, lora=True):
            control = {way: _largest(run(), [model(ids).logits for ids in alone]) for way, run in ways.items()}
    report: dict[str, Any] = {
        way: {"max_difference": d, "base": control[way], "ok": d <= max(1e-4, 4 * control[way])} for way, d in differences.items()
    }
    return {"ok": all(entry["ok"] for entry in report.values()), **report}


def _batches(tokenizer: PreTrainedTokenizerBase, device: torch.device) -> dict[str, Any]:
    alone = [tokenizer(text, return_tensors="pt")["input_ids"].to(device) for text in TEXTS]
    if not all(ids.shape[1] for ids in alone):
        raise UserError("the tokenizer makes no tokens of plain English text: is it the base's own?")
    return {"alone": alone, "padded": _pad_left(tokenizer, alone)}


def _pad_left(tokenizer: PreTrainedTokenizerBase, alone: list[Tensor]) -> dict[str, Tensor]:
    length = max(ids.shape[1] for ids in alone)
    fill = tokenizer.pad_token_id or 0
    pad = [ids.new_full((1, length - ids.shape[1]), fill) for ids in alone]
    ids = torch.cat([torch.cat([p, x], 1) for p, x in zip(pad, alone, strict=True)])
    mask = torch.cat([torch.cat([torch.zeros_like(p), torch.ones_like(x)], 1) for p, x in zip(pad, alone, strict=True)])
    return {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp_min(0)}


def _texts(model: nn.Module, batches: dict[str, Any]) -> list[Tensor]:
    return [model(input_ids=ids).logits for ids in batches["alone"]]


def _left_padded(model: nn.Module, batches: dict[str, Any]) -> list[Tensor]:
    return [model(**batches["padded"]).logits]


def _decoded(model: nn.Module, batches: dict[str, Any]) -> list[Tensor]:
    return [_in_chunks(model, ids, 1, start=max(ids.shape[1] - DECODED, 1)) for ids in batches["alone"]]


def _in_chunks(model: nn.Module, ids: Tensor, size: int, start: int = 0) -> Tensor:
    """Logits of `ids` `[1, T]` fed through one cache: `start` tokens at once, then `size` at a time."""
    cache = DynamicCache(config=unwrap(model).config)
    cuts = ([(0, start)] if start else []) + [(at, at + size) for at in range(start, ids.shape[1], size)]
    return torch.cat([model(input_ids=ids[:, a:b], past_key_values=cache, use_cache=True).logits for a, b in cuts], 1)


def _rewound(model: nn.Module, ids: Tensor) -> Tensor:
    """Logits of `ids` `[1, T]` when its last 4 tokens are fed, taken back (others in their place) and fed again."""
    cache = DynamicCache(config=unwrap(model).config)
    keep = max(ids.shape[1] - DECODED, 1)
    head = model(input_ids=ids[:, :keep], past_key_values=cache, use_cache=True).logits
    if ids.shape[1] > keep:
        cache.activate_past_recording()
        model(input_ids=ids[:, :1].expand(-1, DECODED), past_key_values=cache, use_cache=True)
        cache.crop(-DECODED)
        head = torch.cat([head, model(input_ids=ids[:, keep:], past_key_values=cache, use_cache=True).logits], 1)
    return head


def _compare(model: nn.Module, run: Callable[[], list[Tensor]]) -> tuple[float, int, bool]:
    """Base against graft under one random state: largest difference, logits compared, bitwise equality. Every memory must run."""
    ran = dict.fromkeys((memory.layer_id for memory in memories(model)), 0)

    def count(memory: Any, args: Any, output: Any) -> None:
        ran[memory.layer_id] += 1

    with torch.random.fork_rng(devices=[p.device for p in model.parameters() if p.device.type == "cuda"][:1]):
        torch.manual_seed(0)
        with disable_graft(model, lora=True):
            expected = run()
        torch.manual_seed(0)
        with contextlib.ExitStack() as stack:
            for memory in memories(model):
                stack.enter_context(memory.register_forward_hook(count))
            found = run()
    idle = [layer for layer, calls in ran.items() if not calls]
    if idle:
        raise PromiseError(f"the memory of layers {idle} did not run: its hooks are not reached on this model")
    equal = all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    return _largest(expected, found), sum(logits.numel() for logits in expected), equal


def _nudges(model: nn.Module, batches: dict[str, Any], dtype: str) -> list[dict[str, Any]]:
    """Move each memory's zero factor a little: the comparison must notice, or it could not fail."""
    nudges = []
    for memory in memories(model):
        with _nudged(memory), no_learning(model), unfiltered(model):
            difference, _, equal = _compare(model, lambda: _texts(model, batches))
        nudges.append({"dtype": dtype, "layer": memory.layer_id, "max_difference": difference})
        if equal:
            raise PromiseError(
                f"the identity check cannot fail: a nudge of layer {memory.layer_id}'s zero factor changed no logit"
            )
    return nudges


@contextlib.contextmanager
def _nudged(memory: Engram) -> Iterator[None]:
    """With the factor that starts at zero moved a little: the value projection, or what is read from the table."""
    if memory.config.zero_init == "table":
        handle = memory.table.register_forward_hook(lambda table, args, output: (output[0] + 0.02, output[1]))
        try:
            yield
        finally:
            handle.remove()
        return
    before = memory.value_proj.weight.detach().clone()
    with torch.no_grad():
        memory.value_proj.weight.add_(0.02)
    try:
        yield
    finally:
        with torch.no_grad():
            memory.value_proj.weight.copy_(before)


def _largest(expected: Sequence[Tensor], found: Sequence[Tensor]) -> float:
    return max(float((a.detach().float() - b.detach().float()).abs().max()) for a, b in zip(expected, found, strict=True))


def _base_cast(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """`model` with its base in `dtype`; memory and adapters keep theirs."""
    adapters, saved = adapter_names(model), model.state_dict()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        # what is not saved (rotary frequencies) is float32 in every model that transformers loads
        if tensor.is_floating_point() and name in saved and name not in adapters and not is_memory(name):
            tensor.data = tensor.data.to(dtype)
    unwrap(model).config.dtype = dtype
    return model


@contextlib.contextmanager
def unfiltered(model: nn.Module) -> Iterator[None]:
    """With the seen filter off, so that every position reads the memory, and no look-up counted as training's."""
    tables: list[Any] = [module for module in model.modules() if hasattr(module, "seen_filter")]  # an export's too
    before = [(table.seen_filter, getattr(table, "recording", False)) for table in tables]
    for table in tables:
        table.seen_filter = table.recording = False
    try:
        yield
    finally:
        for table, state in zip(tables, before, strict=True):
            table.seen_filter, table.recording = state
