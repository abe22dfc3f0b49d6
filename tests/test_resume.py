"""Resuming: a run that stopped, however it stopped, ends with the bits it would have had; a checkpoint is there whole or not at all."""

import dataclasses
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TINY_ENGRAM, tiny_model
from peft import LoraConfig, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file
from test_cli import refused, run
from test_train import FACTS, recipe
from transformers import EarlyStoppingCallback, TrainerCallback

import engram_graft as eg
from engram_graft.errors import UserError
from engram_graft.grafted import memories
from engram_graft.trainer import EngramTrainer
from engram_graft.training_state import OPTIMIZER_FILE, last_checkpoint, load_optimizer

SMALL = {"engram_vocab_size": [53, 61], "n_embed_per_ngram": 16, "n_head_per_ngram": 2, "layer_ids": [1, 2]}


class Stop(TrainerCallback):
    """Ends the run as a crash would, in the middle of a step."""

    def __init__(self, at: int):
        self.at = at

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.at:
            raise KeyboardInterrupt


def made(tokenizer: Any) -> Any:
    torch.manual_seed(0)
    model: Any = get_peft_model(tiny_model(), LoraConfig(r=2, target_modules=["q_proj"], lora_dropout=0.3))
    return eg.graft(model, tokenizer, eg.EngramConfig(**{**TINY_ENGRAM, "seen_filter": True}))


def results(output: Path) -> dict[str, torch.Tensor]:
    tensors = {**load_file(output / "engram.safetensors")}
    if (output / "adapter_model.safetensors").exists():
        tensors |= load_file(output / "adapter_model.safetensors")
    return tensors


def same(one: Path, two: Path) -> bool:
    a, b = results(one), results(two)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def lines(output: Path) -> list[dict[str, Any]]:
    read = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "seconds"} for line in read]


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_cases_16_and_17_two_steps_and_two_resumed_equal_four_bitwise(schedule: str, tokenizer: Any, tmp_path: Path) -> None:
    options = {"max_steps": 4, "save_steps": 2, "lr_scheduler_type": schedule, "recall_every": 2, "warmup_steps": 1}
    eg.train(made(tokenizer), tokenizer, recipe(tmp_path / "whole", **options), FACTS)
    plan = recipe(tmp_path / "halves", **options)
    with pytest.raises(KeyboardInterrupt):
        eg.train(made(tokenizer), tokenizer, plan, FACTS, callbacks=[Stop(3)])
    assert not (tmp_path / "halves" / "engram.safetensors").exists() and len(lines(tmp_path / "halves")) == 3
    result = eg.train(made(tokenizer), tokenizer, plan, FACTS, resume=True)
    assert result["resumed_from"] == 2 and same(tmp_path / "whole", tmp_path / "halves")
    assert lines(tmp_path / "whole") == lines(tmp_path / "halves")
    for name in (OPTIMIZER_FILE, "scheduler.json", "engram.safetensors", "adapter_model.safetensors"):
        one, two = (tmp_path / run / "checkpoint-4" / name for run in ("whole", "halves"))
        assert one.read_bytes() == two.read_bytes(), name
    eg.train(made(tokenizer), tokenizer, recipe(tmp_path / "other", **{**options, "seed": 1}), FACTS)
    assert not same(tmp_path / "whole", tmp_path / "other"), "control: another order of the data is seen in the bits"


def test_control_a_run_resumed_without_its_moments_ends_elsewhere(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"max_steps": 4, "save_steps": 2}
    eg.train(made(tokenizer), tokenizer, recipe(tmp_path / "whole", **options), FACTS)
    with pytest.raises(KeyboardInterrupt):
        eg.train(made(tokenizer), tokenizer, recipe(tmp_path / "halves", **options), FACTS, callbacks=[Stop(3)])
    monkeypatch.setattr("engram_graft.trainer.load_optimizer", lambda *args: None)
    eg.train(made(tokenizer), tokenizer, recipe(tmp_path / "halves", **options), FACTS, resume=True)
    assert not same(tmp_path / "whole", tmp_path / "halves")


def test_resuming_without_a_checkpoint_starts_and_ends_the_same(tokenizer: Any, tmp_path: Path) -> None:
    plan = recipe(tmp_path / "a", max_steps=3)
    assert eg.train(made(tokenizer), tokenizer, plan, FACTS, resume=True)["resumed_from"] is None
    eg.train(made(tokenizer), tokenizer, recipe(tmp_path / "b", max_steps=3), FACTS)
    assert same(tmp_path / "a", tmp_path / "b")


def test_checkpoints_for_resuming_alone_go_when_the_run_is_done_and_the_users_stay(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[str]] = []

    class Look(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append(sorted(path.name for path in Path(args.output_dir).glob("*checkpoint*")))

    monkeypatch.setattr("engram_graft.run.SAVE_STEPS", 2)
    eg.train(made(tokenizer), tokenizer, recipe(tmp_path / "default", max_steps=6), FACTS, callbacks=[Look()])
    assert seen == [[], [], ["checkpoint-2"], ["checkpoint-2"], ["checkpoint-4"], ["checkpoint-4"]], "the newest alone"
    assert not list((tmp_path / "default").glob("checkpoint-*"))
    eg.train(made(tokenizer), tokenizer, recipe(tmp_path / "asked", max_steps=3, save_steps=1), FACTS)
    assert len(list((tmp_path / "asked").glob("checkpoint-*"))) == 3


def test_a_checkpoint_that_cannot_be_written_leaves_the_one_before_whole(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = EngramTrainer._save_rng_state

    def full(self: Any, output_dir: str) -> None:
        if self.state.global_step == 4:
            raise OSError("No space left on device")
        rng(self, output_dir)

    monkeypatch.setattr(EngramTrainer, "_save_rng_state", full)
    with pytest.raises(OSError, match="No space"):
        eg.train(made(tokenizer), tokenizer, recipe(tmp_path, max_steps=6, save_steps=2), FACTS)
    assert [path.name for path in tmp_path.glob("*checkpoint*")] == ["checkpoint-2"]
    monkeypatch.undo()
    assert eg.train(made(tokenizer), tokenizer, recipe(tmp_path, max_steps=6, save_steps=2), FACTS, resume=True)["steps"] == 6


def test_what_a_killed_run_half_wrote_is_no_checkpoint_and_is_removed(tmp_path: Path) -> None:
    for name in ("checkpoint-2", "checkpoint-10", ".writing-checkpoint-12/checkpoint-12", "checkpoint-x"):
        (tmp_path / name).mkdir(parents=True)
    assert last_checkpoint(tmp_path, clean=False) == tmp_path / "checkpoint-10"
    assert (tmp_path / ".writing-checkpoint-12").exists(), "another process may be writing it"
    assert last_checkpoint(tmp_path, clean=True) == tmp_path / "checkpoint-10"
    assert not (tmp_path / ".writing-checkpoint-12").exists()
    assert last_checkpoint(tmp_path / "none", clean=True) is None


def test_the_optimizers_file_follows_the_rows_touched_and_is_safetensors(tokenizer: Any, tmp_path: Path) -> None:
    model = eg.graft(tiny_model(), tokenizer, eg.EngramConfig(**{**TINY_ENGRAM, "engram_vocab_size": (10**6, 10**6)}))
    result = eg.train(model, tokenizer, recipe(tmp_path, max_steps=2, save_steps=2), FACTS)
    path = tmp_path / "checkpoint-2" / OPTIMIZER_FILE
    with safe_open(path, framework="pt") as file:
        names = set(file.keys())
        rows = sum(len(file.get_tensor(name)) for name in names if name.endswith(".rows"))
    assert {name.partition(".")[2] for name in names} == {"step", "rows", "row_step", "exp_avg", "exp_avg_sq"}
    assert rows == result["rows_touched"] < 500 and path.stat().st_size < 200_000
    assert not (tmp_path / "checkpoint-2" / "optimizer.pt").exists()


@pytest.mark.parametrize("broken", [b"", b"junk", None])
def test_a_broken_optimizer_file_is_a_user_error(broken: bytes | None, tokenizer: Any, tmp_path: Path) -> None:
    model = made(tokenizer)
    eg.train(model, tokenizer, recipe(tmp_path, max_steps=2, save_steps=1), FACTS)
    path = tmp_path / "checkpoint-1" / OPTIMIZER_FILE
    path.write_bytes(path.read_bytes()[:-8] if broken is None else broken)
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(UserError, match="remove this checkpoint and resume again"):
        load_optimizer(optimizer, path)


# -- the command


@pytest.fixture
def plan(tokenizer: Any, tmp_path: Path) -> Path:
    """A recipe on disk, with its base and data."""
    tiny_model().save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    with (tmp_path / "facts.jsonl").open("w") as file:
        for fact in FACTS.facts:
            file.write(json.dumps({"prompt": list(fact.prompts), "answer": fact.answer}) + "\n")
    options = {
        "base": str(tmp_path / "base"),
        "data": str(tmp_path / "facts.jsonl"),
        "output": str(tmp_path / "out"),
        "engram": SMALL,
        "lora": {"rank": 2, "dropout": 0.2},
        "train": {"max_steps": 160, "batch_size": 4, "learning_rate": 0.02, "lr_scheduler_type": "cosine", "save_steps": 8},
    }
    (tmp_path / "recipe.yaml").write_text(json.dumps(options))
    return tmp_path / "recipe.yaml"


def test_killed_at_random_moments_a_run_resumes_to_the_same_bits(plan: Path, tmp_path: Path) -> None:
    """`ENGRAM_KILLS=10` kills it ten times."""
    assert run("train", "--recipe", plan, "--output", tmp_path / "whole", "--no-probe").code == 0
    # the system's, for the run above has seeded the other
    seed = int(os.environ.get("ENGRAM_KILLS_SEED", random.SystemRandom().randrange(10**6)))
    moments = random.Random(seed)
    out, kills, resumed = tmp_path / "out", int(os.environ.get("ENGRAM_KILLS", "2")), []
    command = [sys.executable, "-m", "engram_graft.cli", "train", "--recipe", plan, "--output", out, "--no-probe", "--resume"]
    killed = 0
    while killed < kills:
        # threads as in this process: two add up a product in another order than one
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})
        metrics, start = out / "metrics.jsonl", time.time()
        while process.poll() is None and not (metrics.exists() and metrics.stat().st_mtime > start):
            time.sleep(0.01)
        time.sleep(moments.uniform(0, 0.6))
        if process.poll() is not None:
            break
        process.send_signal(signal.SIGKILL)
        process.wait()
        killed += 1
        assert not (out / "engram_config.json").exists() or (out / "engram.safetensors").exists()
        resumed.append(max((int(path.name[11:]) for path in out.glob("checkpoint-*")), default=0))
    assert killed, "control: it was killed before its end"
    print(f"seed {seed}: killed {killed} times, with these checkpoints: {resumed}")
    ended = run("train", "--output", out, "--no-probe", "--resume")
    assert ended.code == 0 or "trained to its end" in ended.err, ended.err
    assert same(tmp_path / "whole", out), (seed, resumed)
    assert lines(tmp_path / "whole") == lines(out), (seed, resumed)


def test_resume_keeps_the_options_of_the_run(plan: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    refused(run("train", "--resume"), "give its --output")
    out.mkdir()
    (out / "recipe.yaml").write_text(plan.read_text())
    refused(run("train", "--recipe", plan, "--resume", "--steps", 5), "began with train.max_steps=160, not 5")
    (out / "engram_config.json").write_text("{}")
    refused(run("train", "--output", out, "--resume"), "trained to its end", f"engram-graft probe {out}")


def test_resume_of_a_run_that_has_not_begun_starts_it(plan: Path, tmp_path: Path) -> None:
    ran = run("train", "--recipe", plan, "--resume", "--steps", 2, "--no-probe")
    assert ran.code == 0 and (tmp_path / "out" / "engram.safetensors").is_file() and "resumed" not in ran.err


def test_a_run_that_is_interrupted_says_how_to_go_on_and_does(
    plan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, seen = EngramTrainer.training_step, []

    def interrupted(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        seen.append(self.state.global_step)
        if len(seen) == 12:
            raise KeyboardInterrupt
        return step(self, *args, **kwargs)

    monkeypatch.setattr(EngramTrainer, "training_step", interrupted)
    ran = run("train", "--recipe", plan, "--steps", 16, "--no-probe")
    assert ran.code == 130 and f"engram-graft train --output {tmp_path / 'out'} --resume" in ran.err
    ran = run("train", "--output", tmp_path / "out", "--resume", "--no-probe")
    assert ran.code == 0 and "checkpoint-8" in ran.err and seen[12:] == list(range(8, 16))


def test_tables_in_files_resume_to_the_same_bits_too(tokenizer: Any, tmp_path: Path) -> None:
    def mapped(name: str) -> Any:
        config = eg.EngramConfig(**{**TINY_ENGRAM, "seen_filter": True, "engram_vocab_size": (5003, 5009)})
        return eg.graft(tiny_model(), tokenizer, config, tmp_path / name)

    options = {"max_steps": 6, "save_steps": 2, "batch_size": 1}
    eg.train(mapped("a"), tokenizer, recipe(tmp_path / "whole", **options), FACTS)
    model = mapped("b")
    with pytest.raises(KeyboardInterrupt):
        eg.train(model, tokenizer, recipe(tmp_path / "halves", **options), FACTS, callbacks=[Stop(4)])
    early = load_file(tmp_path / "halves" / "checkpoint-2" / "engram.safetensors")["layers.1.table.rows"]
    shutil.rmtree(tmp_path / "halves" / "checkpoint-4")
    assert len(early) < memories(model)[0].table.count_seen(), (
        "control: the run went on to rows that the checkpoint does not know"
    )
    with torch.no_grad():  # what the files held is of no account: the checkpoint has the rows
        for memory in memories(model):
            memory.table.weight.fill_(float("nan"))
    del model, memory
    eg.train(mapped("b"), tokenizer, recipe(tmp_path / "halves", **options), FACTS, resume=True)
    assert same(tmp_path / "whole", tmp_path / "halves")


def test_a_checkpoint_of_tables_in_memory_resumes_in_files_and_the_other_way_round(tokenizer: Any, tmp_path: Path) -> None:
    options = {"max_steps": 6, "save_steps": 2, "batch_size": 1}
    config = eg.EngramConfig(**{**TINY_ENGRAM, "seen_filter": True})
    eg.train(eg.graft(tiny_model(), tokenizer, config), tokenizer, recipe(tmp_path / "whole", **options), FACTS)
    for first, second in ((None, tmp_path / "t1"), (tmp_path / "t2", None)):
        plan = recipe(tmp_path / f"run{first is None}", **options)
        with pytest.raises(KeyboardInterrupt):
            eg.train(eg.graft(tiny_model(), tokenizer, config, first), tokenizer, plan, FACTS, callbacks=[Stop(3)])
        eg.train(eg.graft(tiny_model(), tokenizer, config, second), tokenizer, plan, FACTS, resume=True)
        assert same(tmp_path / "whole", Path(plan.output))


def stopped(tokenizer: Any, output: Path, **changes: Any) -> dict[str, Any]:
    """A run that stopped in its step 4, after checkpoint-2; returns its options."""
    options = {"max_steps": 6, "save_steps": 2, **changes}
    with pytest.raises(KeyboardInterrupt):
        eg.train(made(tokenizer), tokenizer, recipe(output, **options), FACTS, callbacks=[Stop(3)])
    return options


def test_a_checkpoint_with_any_damaged_or_missing_file_is_refused_by_name(tokenizer: Any, tmp_path: Path) -> None:
    options = stopped(tokenizer, tmp_path)
    checkpoint = tmp_path / "checkpoint-2"
    names = sorted(path.name for path in checkpoint.iterdir())
    assert {
        "random_0.safetensors",
        "scheduler.json",
        "trainer_state.json",
        "engram.safetensors",
        "adapter_model.safetensors",
    } < set(names)
    for name in names:
        whole = (checkpoint / name).read_bytes()
        for broken in (None, b"", whole[:-40] + bytes([whole[-40] ^ 1]) + whole[-39:]):
            (checkpoint / name).unlink()
            if broken is not None:
                (checkpoint / name).write_bytes(broken)
            damaged = ".*" if name == "run.json" else name
            with pytest.raises(UserError, match=rf"{damaged}: missing or corrupt.*remove this checkpoint|run began with"):
                eg.train(made(tokenizer), tokenizer, recipe(tmp_path, **options), FACTS, resume=True)
            (checkpoint / name).write_bytes(whole)
    assert eg.train(made(tokenizer), tokenizer, recipe(tmp_path, **options), FACTS, resume=True)["steps"] == 6


def test_a_run_is_resumed_only_as_it_began(tokenizer: Any, tmp_path: Path) -> None:
    options = stopped(tokenizer, tmp_path)

    def resumed(model: Any, data: Any = FACTS, **changes: Any) -> None:
        eg.train(model, tokenizer, recipe(tmp_path, **{**options, **changes}), data, resume=True)

    for name, value in {"learning_rate": 0.1, "batch_size": 2, "seed": 5, "max_steps": 8}.items():
        with pytest.raises(UserError, match=f"began with train.{name}="):
            resumed(made(tokenizer), **{name: value})
    with pytest.raises(UserError, match="began with data="):
        resumed(made(tokenizer), dataclasses.replace(FACTS, facts=FACTS.facts[::-1]))
    other: Any = get_peft_model(tiny_model(), LoraConfig(r=2, target_modules=["q_proj"], lora_dropout=0.3))
    config = {**TINY_ENGRAM, "seen_filter": True}
    with pytest.raises(UserError, match=r"began with engram.gate='signed_sqrt'"):
        resumed(eg.graft(other, tokenizer, eg.EngramConfig(**config, gate="sigmoid")))
    base: Any = get_peft_model(tiny_model(seed=9), LoraConfig(r=2, target_modules=["q_proj"], lora_dropout=0.3))
    with pytest.raises(UserError, match="wrong base"):
        resumed(eg.graft(base, tokenizer, eg.EngramConfig(**config)))
    with pytest.raises(UserError, match="has checkpoints of another run"):
        eg.train(made(tokenizer), tokenizer, recipe(tmp_path, **options), FACTS)
    resumed(made(tokenizer))


def test_early_stopping_keeps_its_patience_over_a_resume(tokenizer: Any, tmp_path: Path) -> None:
    facts = tuple(dataclasses.replace(fact, split="validation" if fact.id == "3" else "train") for fact in FACTS.facts)
    data = dataclasses.replace(FACTS, facts=facts)
    every = {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True, "metric_for_best_model": "loss"}
    options = {"max_steps": 60, "save_steps": 1, "trainer": every, "learning_rate": 0.05}

    def go(name: str, *callbacks: Any, resume: bool = False) -> int:
        patience = EarlyStoppingCallback(early_stopping_patience=3)
        plan = recipe(tmp_path / name, **options)
        return int(eg.train(made(tokenizer), tokenizer, plan, data, callbacks=[patience, *callbacks], resume=resume)["steps"])

    whole = go("whole")
    assert whole < 60
    with pytest.raises(KeyboardInterrupt):
        go("halves", Stop(whole - 1))
    assert go("halves", resume=True) == whole and same(tmp_path / "whole", tmp_path / "halves")


def test_a_second_run_in_the_directory_of_a_live_one_is_refused(plan: Path, tmp_path: Path) -> None:
    from engram_graft.lock import DirectoryLock

    (tmp_path / "out").mkdir()
    live = DirectoryLock(tmp_path / "out")
    live.take(exclusive=True)
    refused(run("train", "--recipe", plan), "in use by another run")
    del live


def test_a_run_without_a_whole_batch_is_an_error(tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not one step was trained"):
        eg.train(made(tokenizer), tokenizer, recipe(batch_size=64, trainer={"dataloader_drop_last": True}), FACTS)
