"""The command line: one module a command. Only typer is imported before a command runs, so that help is quick."""

import os
import sys

import typer
from engram_graft.cli import export, generate, inspect, probe, train, verify

from engram_graft.errors import PromiseError, UserError

app = typer.Typer(
    name="engram-graft",
    help="Conditional memory for any pretrained Hugging Face causal language model, without pretraining.",
    epilog=train.HELP_END,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
for module in (train, verify, probe, export, generate, inspect):
    app.command(module.__name__.rpartition(".")[2], epilog=module.HELP_END)(module.command)


@app.callback()
def options(debug: bool = typer.Option(False, "--debug", help="Show the traceback of an error.")) -> None:
    pass


def main() -> None:
    """Entry point. Exit code 1 when a promise that was checked does not hold, 2 for a wrong input, each with one line."""
    os.environ.setdefault("TQDM_DISABLE", "1")  # read when tqdm is imported: the GGUF loader's bar has no other switch
    debug = "--debug" in sys.argv
    if debug:
        sys.argv.remove("--debug")
    try:
        app()
    except (UserError, PromiseError) as error:
        if debug:
            raise
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2 if isinstance(error, UserError) else 1)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
