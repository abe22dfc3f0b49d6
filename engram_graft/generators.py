"""Where a process's random number generators are, written and set again, so that a resumed run draws what it would have drawn."""

import json
import random
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from engram_graft.errors import UserError, first_line


def save_random(path: Path) -> None:
    """Write where this process's random number generators are: Python's, NumPy's, torch's on the CPU and on its accelerator."""
    version, words, python_gauss = random.getstate()
    kind, keys, position, has_gauss, numpy_gauss = np.random.get_state()
    tensors = {
        "python": torch.tensor(words),
        "numpy": torch.tensor(np.asarray(keys, dtype=np.int64)),
        "cpu": torch.random.get_rng_state(),
    }
    if torch.accelerator.is_available():
        tensors["accelerator"] = torch.get_device_module().get_rng_state()
    plain = {"python": [version, python_gauss], "numpy": [kind, position, has_gauss, numpy_gauss]}
    try:
        save_file(tensors, path, metadata={"random": json.dumps(plain)})
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: cannot be written ({first_line(error)})") from error


def load_random(path: Path) -> None:
    """Set the generators to where `save_random` found them. Raises `UserError` if the file is missing or not of its making."""
    try:
        with safe_open(path, framework="pt") as file:
            plain = json.loads(file.metadata()["random"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (a safetensors file is no dict)
        (version, python_gauss), (kind, position, has_gauss, numpy_gauss) = plain["python"], plain["numpy"]
        random.setstate((version, tuple(tensors["python"].tolist()), python_gauss))
        np.random.set_state((kind, tensors["numpy"].numpy().astype(np.uint32), position, has_gauss, numpy_gauss))
        torch.random.set_rng_state(tensors["cpu"])
        if torch.accelerator.is_available() and "accelerator" in tensors:
            torch.get_device_module().set_rng_state(tensors["accelerator"])
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise UserError(
            f"{path}: cannot be resumed from ({first_line(error)}); remove this checkpoint and resume again"
        ) from error
