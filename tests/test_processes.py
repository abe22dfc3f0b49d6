"""Several processes: rows are exchanged as rows, and two processes end where one with the same global batch ends."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_resume import lines, plan  # noqa: F401 (a fixture)


def launch(processes: int, recipe: Path, output: Path, **options: Any) -> None:
    """Train in `processes` processes on the CPU (gloo)."""
    settings = {
        "train.max_steps": 6,
        "train.save_steps": 3,
        "lora.dropout": 0.0,
        "train.recall_every": 3,
        "train.learning_rate": 2e-3,
        **options,
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(processes), "--standalone"]
    command += ["-m", "engram_graft.cli", "train", "--recipe", str(recipe), "--output", str(output), "--no-probe"]
    for name, value in settings.items():
        command += ["--set", f"{name}={json.dumps(value)}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "options",
    [
        {"train.max_grad_norm": 0.05},
        {"train.gradient_accumulation_steps": 2, "train.batch_size": 2, "table_tier": "mmap", "train.max_grad_norm": 0.0},
    ],
    ids=["clipped", "accumulated, mapped, free"],
)
def test_case_31_two_processes_equal_one_with_the_same_global_batch(options: dict[str, Any], plan: Path, tmp_path: Path) -> None:  # noqa: F811
    batch = options.get("train.batch_size", 4)
    for processes in (1, 2):
        given = {**options, "train.batch_size": batch // processes}
        if "table_tier" in options:
            given["table_dir"] = str(tmp_path / f"tables{processes}")
        launch(processes, plan, tmp_path / f"run{processes}", **given)
    one, two = (load_file(tmp_path / run / "engram.safetensors") for run in ("run1", "run2"))
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        if name.endswith((".rows",)):
            assert torch.equal(tensor, two[name]), "the same rows were touched"
        elif tensor.is_floating_point():
            assert torch.allclose(tensor, two[name], rtol=0, atol=1e-5), name
    logged = [lines(tmp_path / run) for run in ("run1", "run2")]
    assert [line["step"] for line in logged[0]] == [line["step"] for line in logged[1]] == list(range(1, 7))
    for a, b in zip(*logged, strict=True):
        assert abs(a["loss"] - b["loss"]) < 1e-5 and a["rows_touched"] == b["rows_touched"]
    half = load_file(tmp_path / "run1" / "checkpoint-3" / "engram.safetensors")
    moved = (half["layers.1.value_proj.weight"] - one["layers.1.value_proj.weight"]).abs().max()
    assert moved > 1e-4, "control: three steps more are further away than two processes are"
    if "table_tier" in options:
        assert {path.name for path in (tmp_path / "tables2").iterdir()} == {"rank0", "rank1"}
