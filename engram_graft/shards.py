"""What a directory may name: its own files. Names of shards in an index are checked before anything is opened.

Knows neither torch nor transformers, so that whatever opens such a directory can ask here.
"""

import json
from pathlib import Path

from engram_graft.errors import UserError


def require_inside(directory: Path, name: object, source: str) -> None:
    """Raise `UserError` unless `name`, as `source` has it, is a file name in `directory` that leads nowhere else.

    A link may lead to the blobs of the hub's own cache, where each file of a downloaded repository is one.
    """
    where = f"{directory / source}: file name {name!r}"
    if not isinstance(name, str) or name in ("", ".", "..") or any(sign in name for sign in "/\\\0"):
        raise UserError(f"{where} leaves the directory, or is no name; refused")
    home, target = directory.resolve(), (directory / name).resolve()
    if target.parent == home or (home.parent.name == "snapshots" and target.parent == home.parent.parent / "blobs"):
        return
    raise UserError(f"{where} is a link that leaves the directory; refused, put the file itself there")


def read_index(path: Path) -> dict[str, str]:
    """The file of each tensor, as a safetensors index in `path` has it; whether the files are there is not asked.

    Raises:
        UserError: the index is corrupt, or names what is no safetensors file in its directory.
    """
    require_inside(path.parent, path.name, path.name)
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        files = {str(tensor): name for tensor, name in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{path}: corrupt ({type(error).__name__}: {error}); copy the directory anew") from error
    for tensor, name in files.items():
        require_inside(path.parent, name, path.name)
        if not name.endswith(".safetensors"):
            raise UserError(f"{path}: {tensor} is in {name!r}, which is no safetensors file; refused")
    return files


def check_index(directory: str | Path) -> None:
    """Raise `UserError` unless the safetensors indices of a directory name safetensors files that are in it."""
    home = Path(directory)
    for path in sorted(home.glob("*.index.json")):
        for name in sorted(set(read_index(path).values())):
            if not (home / name).is_file():
                raise UserError(f"{home / name}: missing; {path.name} names it")
