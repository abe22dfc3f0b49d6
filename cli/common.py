"""What the commands share: how options are spelled, how a model is brought up, how results are printed."""

import json
import os
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from engram_graft.errors import UserError, first_line

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedTokenizerBase

    from engram_graft.recipe import Recipe

Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON and nothing else.")]
Device = Annotated[
    str | None, typer.Option(help="Where to run, e.g. cpu or cuda:0.", show_default="cuda if there is one, else cpu")
]
_DTYPE = "The base's dtype: float32, bfloat16 or float16."
Dtype = Annotated[str | None, typer.Option(help=_DTYPE, show_default="float32")]
RecordedDtype = Annotated[str | None, typer.Option("--dtype", help=_DTYPE, show_default="the one it was trained with")]

TableTier = Annotated[
    str | None,
    typer.Option(help="resident: tables in memory; mmap: in files, for tables larger than memory.", show_default="resident"),
]
TableDir = Annotated[
    str | None, typer.Option(help="Directory of those files, which can be deleted when nothing runs; implies --table-tier mmap.")
]
RANK = int(os.environ.get("RANK", "0"))  # under `accelerate launch`; the first process speaks and writes
PROCESSES = int(os.environ.get("WORLD_SIZE", "1"))


def parse_layers(text: str) -> list[int]:
    """ "2,6" as [2, 6]."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"--layers {text!r}: give layer numbers counted from 0 with commas between, e.g. 2,6") from None


def examples(*commands: str) -> str:
    """The end of a command's help."""
    return "Examples:\n\n" + "\n\n".join(command.replace("[", "\\\\[") for command in commands)


def quiet() -> None:
    """Silence the progress bars and warnings of the libraries underneath: what matters is said by us."""
    import logging
    import warnings

    import datasets
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    for name in ("torchao", "huggingface_hub"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=UserWarning, module="peft|torch|matplotlib")


def pick_device(device: str | None) -> str:
    """The device asked for, checked; by default a GPU where there is one."""
    import torch

    if device is None:
        return f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"--device {device!r}: not available here ({first_line(error)})") from error
    return device


def base_with_lora(recipe: "Recipe", device: str | None) -> "tuple[nn.Module, PreTrainedTokenizerBase]":
    """The recipe's base, with fresh LoRA adapters if it asks for them; not yet grafted."""
    from engram_graft.bases import load_base
    from engram_graft.lora import with_lora

    assert recipe.base is not None
    model, tokenizer = load_base(recipe.base, recipe.dtype)
    model.to(pick_device(device))  # type: ignore[arg-type]
    return with_lora(model, recipe.lora, recipe.train.seed), tokenizer


def open_graft(
    directory: "str | dict[str, str]",
    device: str | None,
    dtype: str | None = None,
    table_tier: str | None = None,
    table_dir: str | None = None,
) -> "tuple[nn.Module, PreTrainedTokenizerBase]":
    """A graft or merged directory, loaded; or several on one base, by name."""
    from engram_graft.checkpoint import load_graft
    from engram_graft.recipe import require_tier

    require_tier(table_tier, table_dir)
    place = pick_device(device)
    model, tokenizer = load_graft(directory, dtype=dtype, table_dir=table_dir)
    return model.to(place), tokenizer


def local(directory: str) -> str:
    """A graft or merged directory as it is, one on the hub ("user/name") downloaded."""
    from engram_graft.hub import resolve

    return str(resolve(directory))


def say(text: str = "") -> None:
    """A line for the reader; on standard error, so that standard output is the result alone."""
    if RANK:
        return
    sys.stdout.flush()  # so that the two streams keep their order where they are one
    print(text, file=sys.stderr, flush=True)


def emit(result: dict[str, Any]) -> None:
    """The result as JSON on standard output."""
    if not RANK:
        print(json.dumps(result, indent=1))
