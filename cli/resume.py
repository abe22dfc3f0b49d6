"""`train --resume`: which recipe a stopped run goes on with, and its directory."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engram_graft.cli.common import RANK, say
from engram_graft.errors import UserError

if TYPE_CHECKING:
    from engram_graft.recipe import Recipe


def resumed_recipe(recipe: str | None, overrides: dict[str, Any]) -> "Recipe":
    """The recipe that the run in the output directory began with; what is given beside it has to agree."""
    from engram_graft.integrity import CONFIG_FILE
    from engram_graft.recipe import load_recipe

    asked = load_recipe(recipe, overrides)
    if asked.output is None:
        raise UserError("--resume: which run? give its --output")
    began = Path(asked.output) / "recipe.yaml"
    if (Path(asked.output) / CONFIG_FILE).is_file():
        raise UserError(
            f"--resume: {asked.output} is trained to its end; next: engram-graft probe {asked.output}, or train into another directory"
        )
    if not began.is_file():
        return asked  # it was stopped before it began
    if recipe is None and overrides.keys() <= {"output"}:
        return load_recipe(began, {"output": asked.output})
    stored, given = load_recipe(began).to_dict(), asked.to_dict()
    for section in ("engram", "lora", "train", "teach", "probe"):
        for options in (stored, given):
            options |= {f"{section}.{name}": value for name, value in options.pop(section).items()}
    if other := [name for name in stored if stored[name] != given[name]]:
        raise UserError(
            f"--resume: {asked.output} began with {other[0]}={stored[other[0]]!r}, not {given[other[0]]!r}; a resumed run keeps its "
            "options: give --output alone"
        )
    return asked


@contextlib.contextmanager
def run_directory(output: str, resume: bool, probe: bool) -> Iterator[Path]:
    """The run's directory: made, or as an earlier process left it. A run that stops with a checkpoint is told how to go on."""
    from engram_graft.integrity import CONFIG_FILE
    from engram_graft.lock import DirectoryLock
    from engram_graft.output import new_directory

    if not resume and not RANK and (Path(output) / "recipe.yaml").is_file() and not (Path(output) / CONFIG_FILE).exists():
        raise UserError(f"output {output}: holds a run that has not ended; go on with it (--resume), or choose another directory")
    exists = RANK > 0 or (resume and _begun(Path(output)))
    with contextlib.nullcontext(Path(output)) if exists else new_directory(output) as directory:
        lock = None if RANK else DirectoryLock(directory)  # the first process makes the directory
        if lock is not None:
            lock.take(exclusive=True)
        try:
            yield directory
        except BaseException:
            if any(directory.glob("checkpoint-*")):
                again = f"engram-graft train --output {output} --resume{'' if probe else ' --no-probe'}"
                say(f"stopped   its last checkpoint is whole; go on with: {again}")
            raise


def _begun(output: Path) -> bool:
    """Whether a run was stopped here, be it before it had written its recipe."""
    if not output.is_dir() or (output / "recipe.yaml").is_file():
        return output.is_dir()
    return all(path.name.startswith(".writing-") or path.name == "identity.json" for path in output.iterdir())
