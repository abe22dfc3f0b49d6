"""engram-graft: conditional memory (Engram, arXiv 2601.07372) for any pretrained Hugging Face causal language model.

The thirteen names below are the public API; they load on first use, so that `import engram_graft` and `--help` are quick.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engram_graft.checkpoint import load_graft, save_graft
    from engram_graft.config import EngramConfig
    from engram_graft.export import export_merged
    from engram_graft.grafted import disable_graft, trainable_parameters
    from engram_graft.hooks import graft, ungraft
    from engram_graft.hub import push_to_hub
    from engram_graft.packs import remove_pack, use_packs
    from engram_graft.run import train
    from engram_graft.verify import verify_identity

__version__ = "0.1.0"

__all__ = [
    "EngramConfig",
    "disable_graft",
    "export_merged",
    "graft",
    "load_graft",
    "push_to_hub",
    "remove_pack",
    "save_graft",
    "train",
    "trainable_parameters",
    "ungraft",
    "use_packs",
    "verify_identity",
]

_HOME = {
    "EngramConfig": "config",
    "disable_graft": "grafted",
    "export_merged": "export",
    "graft": "hooks",
    "load_graft": "checkpoint",
    "push_to_hub": "hub",
    "remove_pack": "packs",
    "save_graft": "checkpoint",
    "train": "run",
    "trainable_parameters": "grafted",
    "ungraft": "hooks",
    "use_packs": "packs",
    "verify_identity": "verify",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it offers {', '.join(__all__)}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
