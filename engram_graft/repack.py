"""A graft directory made from another directory: from a merged one, or with its tables in fewer bits. The base is loaded only where
the directory has no fingerprint of it."""

import shutil
from pathlib import Path
from typing import Any

from engram_graft.bases import fingerprint, load_base
from engram_graft.codes import CODES, decode, encode
from engram_graft.errors import PromiseError, UserError
from engram_graft.files import ADAPTER_CONFIG, ADAPTER_FILE, read_graft, write_graft
from engram_graft.output import new_directory

_KEPT = (ADAPTER_FILE, ADAPTER_CONFIG, "recipe.yaml", "identity.json", "probes.json")


def repack(source: str | Path, output: str | Path, table_dtype: str | None = None) -> dict[str, Any]:
    """Write the memory in `source`, a graft or merged directory, and the LoRA adapter if it is apart, as a graft directory of its own.

    Its base is the one that `source` names, or, where LoRA was merged into that or its weights were cast, `source` itself.

    Args:
        table_dtype: of the tables' values, one of `codes.CODES`; by default as the memory computes, bit for bit.

    Returns:
        {"base": its name, "layers", "rows": in all tables, "bytes": on disk, "table_bytes": of the tables}.

    Raises:
        UserError: `source` is no graft, or damaged, or `output` is not empty.
    """
    source = Path(source)
    if table_dtype is not None and table_dtype not in CODES:
        raise UserError(f"table_dtype={table_dtype!r}: must be one of {', '.join(CODES)}")
    described, config, tensors, plan = read_graft(source)
    code = table_dtype or config.dtype
    written, expected = dict(tensors), dict(tensors)
    for name, tensor in tensors.items():
        if name.endswith(".table.values"):
            coded = encode(written.pop(name), code)
            written |= {name.removesuffix("values") + leaf: part for leaf, part in coded.items()}
            expected[name] = decode(coded["values"], coded.get("scale"), tensor.dtype)
    base = dict(described["base"])
    if base.pop("changed", False):
        base["name"] = str(source.absolute())
    if base["fingerprint"] is None:
        base["fingerprint"] = fingerprint(load_base(str(source.absolute()), base["dtype"])[0])
    described |= {"base": base, "merged": False, "tables": {"layout": "sparse", "code": code}}
    with new_directory(output) as target:
        for name in _KEPT:
            if (source / name).is_file():
                shutil.copyfile(source / name, target / name)
        write_graft(target, written, described, target)
        read = read_graft(target)[2]
        if read.keys() != expected.keys() or not all(read[name].equal(tensor) for name, tensor in expected.items()):
            raise PromiseError(f"{output}: what was read back is not what was written")
        return {
            "base": base["name"],
            "layers": list(config.layer_ids),
            "rows": sum(plan.table_rows),
            "bytes": sum(path.stat().st_size for path in target.iterdir()),
            "table_bytes": sum(tensor.nbytes for name, tensor in written.items() if ".table." in name),
        }
