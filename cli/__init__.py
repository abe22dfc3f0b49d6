"""The command line: one module a command. Only typer is imported before a command runs, so that help is quick."""

import os
import sys
import traceback
from typing import Any

import typer

from engram_graft.cli import bench, export, generate, import_graft, inspect, probe, push, train, verify
from engram_graft.errors import PromiseError, UserError

_UsageError: Any = typer.BadParameter.__bases__[0]  # an unknown option, a missing argument, a value of the wrong type

app = typer.Typer(
    name="engram-graft",
    help="Conditional memory for any pretrained Hugging Face causal language model, without pretraining.",
    epilog=train.HELP_END,
    invoke_without_command=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
for module in (train, verify, probe, export, import_graft, push, generate, inspect, bench):
    app.command(module.__name__.rpartition(".")[2].removesuffix("_graft"), epilog=module.HELP_END)(module.command)


@app.callback()
def options(context: typer.Context, debug: bool = typer.Option(False, "--debug", help="Show the traceback of an error.")) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


def main() -> None:
    """Entry point. Exit code 1 when a promise that was checked does not hold, 2 for a wrong input, each with one line; 3 for a fault."""
    os.environ.setdefault("TQDM_DISABLE", "1")  # read when tqdm is imported: the GGUF loader's bar has no other switch
    for stream in (sys.stdout, sys.stderr):  # an answer may hold what the terminal's encoding has not
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    debug = "--debug" in sys.argv
    if debug:
        sys.argv.remove("--debug")
    try:
        sys.exit(app(standalone_mode=False) or 0)
    except (UserError, PromiseError, _UsageError) as error:
        if debug:
            traceback.print_exc()
        message = error.format_message() if isinstance(error, _UsageError) else str(error)
        print(f"error: {' '.join(message.split())}", file=sys.stderr)
        sys.exit(1 if isinstance(error, PromiseError) else 2)
    except Exception:  # a fault of ours or of a library: neither a broken promise (1) nor a wrong input (2)
        traceback.print_exc()
        print("error: unexpected, see above; please report it", file=sys.stderr)
        sys.exit(3)
    except (KeyboardInterrupt, typer.Abort):
        print("interrupted", file=sys.stderr)
        sys.exit(130)
