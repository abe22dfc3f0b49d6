"""FSDP2: the base is sharded, the memory stays whole on each process, and two processes end where one with the same global batch ends.

Run by torch.distributed.run, this file is what the processes do: `test_fsdp.py WORK DIRECTORY`. accelerate shards on accelerators alone;
`as_accelerators` has it take two CPU processes for two of them, and all that follows is its own.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate.state import DistributedType, PartialState
from conftest import TINY_ENGRAM, VOCABULARY, randomize, tiny_model
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from test_cli import refused, run
from test_resume import Stop, lines, plan, results  # noqa: F401 (plan is a fixture)
from test_train import FACTS
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from transformers import PreTrainedTokenizerFast, TrainingArguments

import engram_graft as eg
from engram_graft.bases import fingerprint
from engram_graft.errors import UserError
from engram_graft.exchange import exchange_gradients, memory_parameters
from engram_graft.grafted import memories, trainable_parameters
from engram_graft.locate import locate
from engram_graft.optim import EngramAdamW, clip_grad_norm
from engram_graft.params import adapter_names
from engram_graft.recipe import load_recipe
from engram_graft.sharding import is_sharded, sharded, whole
from engram_graft.trainer import EngramTrainer, _keep_memory_whole

RATE = 2e-3


def made(tokenizer: Any, lora: bool = True, table_dir: Path | None = None) -> Any:
    """A fresh graft whose adapters, like its memory, are equal on every process."""
    model: Any = tiny_model()
    if lora:
        torch.manual_seed(0)
        model = get_peft_model(
            model, LoraConfig(r=3, target_modules=["q_proj", "o_proj"])
        )  # 3 rows on 2 processes: uneven shards
    eg.graft(model, tokenizer, eg.EngramConfig(**{**TINY_ENGRAM, "seen_filter": True}), table_dir)
    trainable_parameters(model)
    return model


def shard(model: Any, **options: Any) -> None:
    ignored = set(memory_parameters(model))
    for layer in locate(model).layers:
        fully_shard(layer, ignored_params=ignored, **options)
    fully_shard(model, ignored_params=ignored, **options)
    register_fsdp_forward_method(model, "generate")


def loop(model: Any, steps: int = 5) -> list[float]:
    """A training loop as one writes it oneself; returns the loss over all processes, and the norm, of each step."""
    processes, rank = (dist.get_world_size(), dist.get_rank()) if is_sharded(model) else (1, 0)
    tables = [memory.table.weight for memory in memories(model)]
    dense = [p for p in model.parameters() if p.requires_grad and all(p is not table for table in tables)]
    groups = [{"params": [p for p in dense if sharded(p) == part]} for part in (False, True)]
    groups = [{**group, "weight_decay": 0.01} for group in groups if group["params"]]
    optimizer = EngramAdamW([*groups, {"params": tables, "lr": 5 * RATE, "table": True}], lr=RATE, weight_decay=0.0)
    ids = torch.randint(2, VOCABULARY, (steps, 4, 12), generator=torch.Generator().manual_seed(5))
    model.train()
    logged = []
    for batch in ids:
        mine = batch.chunk(processes)[rank]
        loss = model(input_ids=mine, labels=mine).loss
        loss.backward()
        loss = loss.detach()
        if processes > 1:
            exchange_gradients(model)
            dist.all_reduce(loss)
        norm = clip_grad_norm(model.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
        logged += [float(loss) / processes, float(norm)]
    return logged


def settings(output: Path, processes: int = 1, **options: Any) -> Any:
    """A recipe for `eg.train`; of two processes each takes half the batch."""
    chosen = {"max_steps": 6, "save_steps": 3, "recall_every": 3, "learning_rate": RATE, "batch_size": 4, **options}
    chosen["batch_size"] //= processes
    overrides = {"output": str(output), "lora.learning_rate": RATE}
    return load_recipe(None, {**overrides, **{f"train.{name}": value for name, value in chosen.items()}})


OPTIONS: dict[str, dict[str, Any]] = {
    "clipped": {"max_grad_norm": 0.05},
    "accumulated, in files, checkpointed": {"gradient_accumulation_steps": 2, "batch_size": 2, "max_grad_norm": 0.0},
}


def as_accelerators() -> None:
    begin = PartialState.__init__

    def patched(self: Any, cpu: bool = False, **kwargs: Any) -> None:
        begin(self, cpu=True, **kwargs)
        self.distributed_type = DistributedType.MULTI_GPU

    PartialState.__init__ = patched


def work(what: str, directory: Path) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(directory / "tokenizer")
    if what == "loop":
        dist.init_process_group("gloo")
        model = made(tokenizer)
        before = fingerprint(model)
        shard(model)
        assert sum(sharded(p) for p in model.parameters()) > 30 and fingerprint(model) == before
        logged = loop(model)
        eg.save_graft(model, directory / "two")
        for memory in memories(model):  # equal on both processes, bit for bit
            for tensor in (*memory.parameters(), memory.table.seen):
                other = [torch.empty_like(tensor) for _ in range(2)]
                dist.all_gather(other, tensor.detach())
                rows = memory.table.seen_rows() if tensor is memory.table.weight else slice(None)
                assert torch.equal(other[0][rows], other[1][rows])
        with pytest.raises(UserError, match="FSDP shards the model"):
            eg.export_merged(model, tokenizer, directory / "merged")
        if dist.get_rank() == 0:
            (directory / "logged.json").write_text(json.dumps(logged))
        ids = torch.randint(2, VOCABULARY, (2, 6), generator=torch.Generator().manual_seed(7))
        for dtype in (None, torch.bfloat16):
            answering = made(tokenizer)
            randomize(answering)
            shard(answering, mp_policy=MixedPrecisionPolicy(param_dtype=dtype))
            answers = [
                answering.generate(input_ids=ids, max_new_tokens=4, do_sample=False, use_cache=cache) for cache in (True, False)
            ]
            assert torch.equal(*answers), "every process decodes, with the memory's part of the cache"
        late: Any = tiny_model()
        fully_shard(late)
        with pytest.raises(UserError, match="graft it first"):
            eg.graft(late, tokenizer)
        bad = made(tokenizer)
        fully_shard(bad)
        with pytest.raises(UserError, match="ignored_params"):
            exchange_gradients(bad)
        alone = made(tokenizer, lora=False)  # nothing that is sharded is trained
        shard(alone)
        loop(alone, 2)
        eg.save_graft(alone, directory / "alone")
        with pytest.raises(UserError, match="leave fsdp out"):  # accelerate would have trained with DDP, saying nothing
            trainer(made(tokenizer), directory, use_cpu=True)
        return
    as_accelerators()
    clipped = what == "clipped"
    given = {"trainer": {"fsdp": True, "gradient_checkpointing": not clipped}, **OPTIONS[what]}
    model = made(tokenizer, table_dir=None if clipped else directory / f"tables{os.environ['RANK']}")
    base = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
    eg.train(model, tokenizer, settings(directory / "two", 2, **given), FACTS)
    locations = {name: sharded(p) for name, p in model.named_parameters()}
    assert not any(locations[name] for name in locations if ".engram." in name)
    assert all(locations[name] for name in adapter_names(model)) and is_sharded(model)
    model.reshard()
    for name, p in model.named_parameters():
        if name in base:
            assert torch.equal(whole(p.detach()), base[name]), f"{name}: the base is as it was"
    if clipped:
        model = made(tokenizer)
        with pytest.raises(KeyboardInterrupt):
            eg.train(model, tokenizer, settings(directory / "halves", 2, **given), FACTS, callbacks=[Stop(4)])
        model = made(tokenizer)
        result = eg.train(model, tokenizer, settings(directory / "halves", 2, **given), FACTS, resume=True)
        assert result["resumed_from"] == 3
        for option, message in {
            "cpu_ram_efficient_loading": "load the base on",
            "activation_checkpointing": "gradient_check",
        }.items():
            with pytest.raises(UserError, match=message):
                trainer(made(tokenizer), directory, fsdp_config={option: True})


def trainer(model: Any, directory: Path, **options: Any) -> EngramTrainer:
    return EngramTrainer(model=model, args=TrainingArguments(output_dir=str(directory), fsdp=True, report_to="none", **options))


def launch(what: str, directory: Path, tokenizer: Any) -> None:
    tokenizer.save_pretrained(directory / "tokenizer")
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc_per_node",
        "2",
        "--standalone",
        __file__,
        what,
        str(directory),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr


def assert_close(one: Path, two: Path) -> None:
    a, b = results(one), results(two)
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        if tensor.is_floating_point():
            assert torch.allclose(tensor, b[name], rtol=0, atol=1e-5), name
        else:
            assert torch.equal(tensor, b[name]), f"{name}: the same rows were touched"


def test_a_loop_of_ones_own_on_a_sharded_base_equals_one_process(tokenizer: Any, tmp_path: Path) -> None:
    launch("loop", tmp_path, tokenizer)
    model = made(tokenizer)
    logged = loop(model)
    eg.save_graft(model, tmp_path / "one")
    two = json.loads((tmp_path / "logged.json").read_text())
    assert all(abs(a - b) < 1e-5 for a, b in zip(logged, two, strict=True)), "losses, and norms before clipping"
    assert_close(tmp_path / "one", tmp_path / "two")
    alone = made(tokenizer, lora=False)
    loop(alone, 2)
    eg.save_graft(alone, tmp_path / "alone, one")
    assert_close(tmp_path / "alone, one", tmp_path / "alone")
    moved = load_file(tmp_path / "one" / "engram.safetensors")["layers.1.value_proj.weight"]  # began at zero
    assert moved.abs().max() > 1e-3, "control: training moved more than the two differ by"
    loaded, _ = eg.load_graft(tmp_path / "two", base=tiny_model(), tokenizer=tokenizer)
    ids = torch.randint(2, VOCABULARY, (1, 12), generator=torch.Generator().manual_seed(5))
    model.eval()
    assert torch.allclose(loaded(input_ids=ids).logits, model(input_ids=ids).logits, atol=1e-5)


@pytest.mark.parametrize("what", OPTIONS)
def test_two_processes_of_the_trainer_on_a_sharded_base_equal_one(what: str, tokenizer: Any, tmp_path: Path) -> None:
    launch(what, tmp_path, tokenizer)
    eg.train(made(tokenizer), tokenizer, settings(tmp_path / "one", **OPTIONS[what]), FACTS)
    assert_close(tmp_path / "one", tmp_path / "two")
    a, b = lines(tmp_path / "one"), lines(tmp_path / "two")
    assert [line["step"] for line in a] == [line["step"] for line in b] == list(range(1, 7))
    for one, two in zip(a, b, strict=True):
        assert abs(one["loss"] - two["loss"]) < 1e-5 and one["rows_touched"] == two["rows_touched"]
        assert abs(one["grad_norm"] / two["grad_norm"] - 1) < 1e-4 and one.get("recall") == two.get("recall")
    assert_close(tmp_path / "one" / "checkpoint-3", tmp_path / "two" / "checkpoint-3")
    state, other = (load_file(tmp_path / run / "checkpoint-6" / "optimizer.safetensors") for run in ("one", "two"))
    assert {name: t.shape for name, t in state.items()} == {name: t.shape for name, t in other.items()}, "gathered, not a shard"
    if what == "clipped":
        whole_run, halves = results(tmp_path / "two"), results(tmp_path / "halves")
        assert all(torch.equal(whole_run[name], halves[name]) for name in whole_run), "resumed bit for bit"


def test_what_cannot_be_sharded_is_refused(plan: Path) -> None:  # noqa: F811
    with pytest.raises(UserError, match="use version 2"):
        _keep_memory_whole(SimpleNamespace(fsdp_version=1))
    refused(run("train", "--recipe", plan, "--set", "train.trainer={fsdp: true}"), "call engram_graft.train on every process")


if __name__ == "__main__":
    work(sys.argv[1], Path(sys.argv[2]))
    dist.barrier()
    os._exit(0)  # gloo's threads now and then abort an interpreter that ends
