"""A layer's memory as training starts it: with a table that learns."""

import torch

from engram_graft.config import EngramConfig
from engram_graft.initial import row_seed
from engram_graft.layer import Engram
from engram_graft.storage import Resident
from engram_graft.table import EngramTable


def fresh_layer(
    config: EngramConfig, index: int, rows: int, width: int, device: torch.device, storage: Resident | None = None
) -> Engram:
    """A fresh memory of layer `config.layer_ids[index]`, with a table of `rows` rows in `storage` (in memory by default)."""
    layer_id = config.layer_ids[index]
    table = EngramTable(
        rows,
        config.head_dim,
        config.n_head_per_ngram,
        config.seen_filter,
        getattr(torch, config.dtype),
        device,
        row_seed(config, layer_id),
        storage,
        f"layer{layer_id}",
    )
    return Engram(config, index, table, width, device)
