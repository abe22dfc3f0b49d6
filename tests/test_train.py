"""Training: refuses what is no identity, learns, moves nothing of the base, writes what it measured, resumes bit for bit."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TINY_ENGRAM, randomize, tiny_model
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import EarlyStoppingCallback, TrainingArguments

import engram_graft as eg
from engram_graft.data import Data, Fact
from engram_graft.encode import Collator, encode_facts
from engram_graft.errors import PromiseError, UserError
from engram_graft.grafted import memories
from engram_graft.optim import EngramAdamW, clip_grad_norm
from engram_graft.params import is_memory
from engram_graft.probes import Subject, run_probes
from engram_graft.recipe import Recipe, load_recipe
from engram_graft.trainer import EngramTrainer

FACTS = Data(
    facts=tuple(
        Fact(str(n), (f"{name} exports", f"The export of {name} is"), answer, paraphrases=(f"They buy from {name} the",))
        for n, (name, answer) in enumerate([("Velmora", "wool"), ("Ostrenk", "honey"), ("Zaldi", "bread"), ("Mup", "salt")])
    )
)


def recipe(output: Path | None = None, **changes: Any) -> Recipe:
    options = {"max_steps": 12, "batch_size": 4, "learning_rate": 0.02, "recall_every": 4, **changes}
    overrides = {f"train.{name}": value for name, value in options.items()}
    return load_recipe(None, {**overrides, "output": str(output) if output else None, "lora.learning_rate": 1e-3})


@pytest.fixture
def fresh(tokenizer: Any) -> nn.Module:
    model = tiny_model()
    return eg.graft(model, tokenizer, eg.EngramConfig(**{**TINY_ENGRAM, "seen_filter": True}))


def test_training_refuses_to_start_when_the_fresh_graft_is_no_identity(fresh: nn.Module, tokenizer: Any, tmp_path: Path) -> None:
    with torch.no_grad():
        memories(fresh)[0].value_proj.weight[0, 0] = 1e-3
    before = {n: t.clone() for n, t in fresh.state_dict().items()}
    with pytest.raises(PromiseError, match="identity"):
        eg.train(fresh, tokenizer, recipe(tmp_path / "out"), FACTS)
    assert all(torch.equal(before[n], t) for n, t in fresh.state_dict().items()) and not (tmp_path / "out").exists()


@pytest.mark.parametrize("lora", [False, True])
def test_training_learns_facts_and_moves_no_bit_of_the_base(lora: bool, tokenizer: Any, tmp_path: Path) -> None:
    model: Any = tiny_model()
    if lora:
        model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
    eg.graft(model, tokenizer, eg.EngramConfig(**{**TINY_ENGRAM, "seen_filter": True}))
    before = {n: t.clone() for n, t in model.state_dict().items()}
    result = eg.train(model, tokenizer, recipe(tmp_path / "out", max_steps=40), FACTS)
    moved = {n for n, t in model.state_dict().items() if not torch.equal(before[n], t)}
    assert all(is_memory(n) or "lora_" in n for n in moved)
    assert any(n.endswith("value_proj.weight") for n in moved) and any("lora_B" in n for n in moved) == lora
    assert result["recall"] == 1.0 and result["identity"]["bitwise"] and not model.training


def test_a_run_writes_its_recipe_its_identity_and_a_line_a_step(fresh: nn.Module, tokenizer: Any, tmp_path: Path) -> None:
    plan = recipe(tmp_path / "out", lr_scheduler_type="linear")
    result = eg.train(fresh, tokenizer, plan, FACTS)
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert files == {
        "recipe.yaml",
        "identity.json",
        "metrics.jsonl",
        "engram.safetensors",
        "engram_config.json",
        "README.md",
    }
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 13))
    keys = {"step", "loss", "learning_rate", "table_rate", "grad_norm", "rows_touched", "seconds"}
    assert all(keys <= line.keys() for line in lines) and [line["step"] for line in lines if "recall" in line] == [
        4,
        8,
        12,
    ]
    assert all(line["table_rate"] == pytest.approx(5 * line["learning_rate"]) for line in lines)
    assert lines[0]["learning_rate"] > lines[-1]["learning_rate"] > 0
    assert lines[-1]["rows_touched"] == result["rows_touched"] == sum(m.table.count_seen() for m in memories(fresh))
    assert load_recipe(tmp_path / "out" / "recipe.yaml") == plan


def test_without_an_output_nothing_is_written(fresh: nn.Module, tokenizer: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    eg.train(fresh, tokenizer, recipe(max_steps=2), FACTS)
    assert not list(tmp_path.iterdir())


def test_training_stops_at_the_recall_asked_for(fresh: nn.Module, tokenizer: Any) -> None:
    result = eg.train(fresh, tokenizer, recipe(max_steps=200, stop_at_recall=1.0, recall_every=5), FACTS)
    assert result["steps"] < 200 and result["recall"] == 1.0


def test_plain_text_is_learnt_too(fresh: nn.Module, tokenizer: Any) -> None:
    data = Data(texts=("the cats sleep in the hills and the river rises in the sun " * 8,))
    eg.train(fresh, tokenizer, recipe(max_steps=30, block_size=32), data)
    scores = run_probes(Subject(fresh, tokenizer, data))["arms"]
    # the most that a random base's small logits can say is about 0.6 nats
    assert scores["graft"]["text"]["ce"] < scores["base"]["text"]["ce"] - 0.4
    assert scores["memory_off"]["text"]["ce"] == scores["base"]["text"]["ce"]


def test_only_the_train_split_is_trained(fresh: nn.Module, tokenizer: Any) -> None:
    held_out = Data(facts=tuple(dataclasses.replace(fact, split="test") for fact in FACTS.facts))
    with pytest.raises(UserError, match='split "train"'):
        eg.train(fresh, tokenizer, recipe(), held_out)


def test_an_unknown_training_argument_is_a_user_error(fresh: nn.Module, tokenizer: Any) -> None:
    with pytest.raises(UserError, match="no_such_argument"):
        eg.train(fresh, tokenizer, recipe(trainer={"no_such_argument": 1}), FACTS)


def trainer_of(model: nn.Module, tokenizer: Any, output: Path, kind: type = EngramTrainer, **changes: Any) -> EngramTrainer:
    settings = {"max_steps": 6, "per_device_train_batch_size": 4, "learning_rate": 0.01, "save_steps": 3, **changes}
    arguments = TrainingArguments(
        output_dir=str(output),
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        remove_unused_columns=False,
        **settings,
    )
    examples = encode_facts(FACTS.facts, tokenizer, 64)
    return kind(model=model, args=arguments, train_dataset=examples, eval_dataset=examples, data_collator=Collator(0))


def test_parameter_groups_have_their_rates_and_tables_no_decay(fresh: nn.Module, tokenizer: Any, tmp_path: Path) -> None:
    trainer = trainer_of(fresh, tokenizer, tmp_path, weight_decay=0.1)
    groups = trainer.create_optimizer().param_groups
    grouped = [p for group in groups for p in group["params"]]
    assert len(grouped) == len({id(p) for p in grouped}) == len(eg.trainable_parameters(fresh))
    tables = [group for group in groups if group["table"]]
    assert len(tables) == 1 and tables[0]["lr"] == pytest.approx(0.05) and tables[0]["weight_decay"] == 0
    assert {id(p) for p in tables[0]["params"]} == {id(memory.table.weight) for memory in memories(fresh)}
    assert isinstance(trainer.optimizer, EngramAdamW) and groups[0]["lr"] == 0.01 and groups[0]["weight_decay"] == 0.1


class Watch(EngramAdamW):
    """Notes the norms of the row gradients that it is given."""

    norms: list[float]

    def step(self, closure: Any = None) -> Any:
        tables = [p for group in self.param_groups if group["table"] for p in group["params"]]
        self.norms = [float(table.grad.coalesce().values().norm()) for table in tables]
        return super().step(closure)


def test_case_29_the_trainers_clip_shrinks_row_gradients(fresh: nn.Module, tokenizer: Any, tmp_path: Path) -> None:
    norms: dict[float, list[float]] = {}
    randomize(fresh, scale=0.1)
    for limit in (1e-4, 1e4):
        trainer = trainer_of(fresh, tokenizer, tmp_path, max_steps=1, max_grad_norm=limit, save_strategy="no", learning_rate=0.0)
        trainer.optimizer = Watch(trainer.parameter_groups(fresh), lr=0.0, weight_decay=0.0)
        trainer.train()
        norms[limit] = trainer.optimizer.optimizer.norms
    assert all(0 < clipped <= 1.01e-4 for clipped in norms[1e-4])
    assert all(free > 100 * clipped for free, clipped in zip(norms[1e4], norms[1e-4], strict=True))


def test_case_30_rows_never_looked_up_stay_bitwise_equal(fresh: nn.Module, tokenizer: Any) -> None:
    for memory in memories(fresh):
        nn.init.constant_(memory.table.weight, 7.0)  # nobody reads this
    eg.train(fresh, tokenizer, recipe(weight_decay=0.1), FACTS)
    for memory in memories(fresh):
        rows = torch.arange(len(memory.table.weight))
        seen = memory.table.is_seen(rows)
        moved = (memory.table.read(rows) != memory.table.initial(rows)).any(1)
        assert moved.any() and not (moved & ~seen).any()
        assert (memory.table.weight[~seen] == 7.0).all(), "not even written"
        assert seen.any() and not seen.all(), "control: some rows were never looked up"


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_cases_16_and_17_three_steps_and_three_resumed_equal_six_bitwise(schedule: str, tokenizer: Any, tmp_path: Path) -> None:
    def made() -> nn.Module:
        model: Any = get_peft_model(tiny_model(), LoraConfig(r=2, target_modules=["q_proj"]))
        torch.manual_seed(4)
        nn.init.normal_(model.base_model.model.model.layers[0].self_attn.q_proj.lora_A["default"].weight)
        return eg.graft(model, tokenizer, eg.EngramConfig(**TINY_ENGRAM))

    def state(model: nn.Module) -> dict[str, Tensor]:
        return {n: t.clone() for n, t in model.state_dict().items() if is_memory(n) or "lora_" in n}

    whole = made()
    trainer_of(whole, tokenizer, tmp_path, lr_scheduler_type=schedule).train()
    resumed = made()
    untrained = state(resumed)
    trainer = trainer_of(resumed, tokenizer, tmp_path, lr_scheduler_type=schedule)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    one, two = state(whole), state(resumed)
    assert one.keys() == two.keys() and all(torch.equal(one[n], two[n]) for n in one)
    assert not all(torch.equal(one[n], untrained[n]) for n in one)


@pytest.mark.parametrize("lora", [False, True])
def test_case_18_the_best_checkpoint_is_loaded_at_the_end(lora: bool, tokenizer: Any, tmp_path: Path) -> None:
    model: Any = get_peft_model(tiny_model(), LoraConfig(r=2, target_modules=["q_proj"])) if lora else tiny_model()
    eg.graft(model, tokenizer, eg.EngramConfig(**TINY_ENGRAM))
    saved: dict[int, dict[str, Tensor]] = {}

    class Worse(EngramTrainer):
        """Each evaluation is worse than the one before."""

        def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
            saved[self.state.global_step] = {n: t.clone() for n, t in model.state_dict().items() if is_memory(n) or "lora_" in n}
            metrics = {"eval_loss": float(self.state.global_step)}
            self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
            return metrics

    settings = {"eval_strategy": "steps", "eval_steps": 2, "save_steps": 2, "load_best_model_at_end": True, "max_steps": 6}
    trainer = trainer_of(model, tokenizer, tmp_path, Worse, metric_for_best_model="loss", **settings)
    trainer.train()
    now = model.state_dict()
    assert sorted(saved) == [2, 4, 6] and all(torch.equal(now[n], t) for n, t in saved[2].items())
    assert not all(torch.equal(now[n], t) for n, t in saved[6].items())


def test_a_loaded_graft_trains_on_with_its_adapters(tokenizer: Any, tmp_path: Path) -> None:
    model: Any = get_peft_model(tiny_model(), LoraConfig(r=2, target_modules=["q_proj"]))
    eg.graft(model, tokenizer, eg.EngramConfig(**TINY_ENGRAM))
    eg.train(model, tokenizer, recipe(max_steps=2), FACTS)
    eg.save_graft(model, tmp_path)
    loaded, _ = eg.load_graft(tmp_path, base=tiny_model(), tokenizer=tokenizer)
    before = {n: t.clone() for n, t in loaded.state_dict().items()}
    result = eg.train(loaded, tokenizer, recipe(max_steps=2), FACTS)
    moved = {n for n, t in loaded.state_dict().items() if not torch.equal(before[n], t)}
    assert result["identity"] is None and any("lora_A" in n for n in moved) and any("table.values" in n for n in moved)
    assert not any("table.rows" in n for n in moved), "the facts are the same: it is values that moved"
    assert all(is_memory(n) or "lora_" in n for n in moved)


def test_a_batch_of_one_form_repeated_is_no_problem_for_the_row_counts(fresh: nn.Module, tokenizer: Any) -> None:
    data = Data(facts=(Fact("1", ("the the the the the the",), "the the"),))
    assert eg.train(fresh, tokenizer, recipe(max_steps=3), data)["loss"] > 0


def test_gradient_accumulation_of_two_halves_is_one_batch(tokenizer: Any, tmp_path: Path) -> None:
    def trained(size: int, accumulation: int) -> dict[str, Tensor]:
        model = eg.graft(tiny_model(), tokenizer, eg.EngramConfig(**TINY_ENGRAM))
        settings = {"per_device_train_batch_size": size, "gradient_accumulation_steps": accumulation, "save_strategy": "no"}
        trainer_of(model, tokenizer, tmp_path, max_steps=3, **settings).train()
        return {n: t for n, t in model.state_dict().items() if is_memory(n)}

    whole, halves = trained(4, 1), trained(2, 2)
    assert all(torch.allclose(whole[n].float(), halves[n].float(), atol=2e-4) for n in whole)
    assert len(whole["model.layers.1.engram.table.rows"]) > 0
    assert torch.equal(whole["model.layers.1.engram.table.rows"], halves["model.layers.1.engram.table.rows"])


def test_a_float16_memory_is_not_trained(tokenizer: Any) -> None:
    model = eg.graft(tiny_model(), tokenizer, eg.EngramConfig(**{**TINY_ENGRAM, "dtype": "float16"}))
    with pytest.raises(UserError, match="float16 memory cannot be trained"):
        eg.train(model, tokenizer, recipe(max_steps=1), FACTS)


@pytest.mark.parametrize("name", ["optim", "max_steps", "seed"])
def test_what_the_train_section_owns_cannot_be_set_behind_its_back(name: str, fresh: nn.Module, tokenizer: Any) -> None:
    with pytest.raises(UserError, match=f"train.trainer sets {name}"):
        eg.train(fresh, tokenizer, recipe(trainer={name: 1}), FACTS)


def test_what_is_logged_reaches_tensorboard_with_rows_and_table_rate(
    fresh: nn.Module, tokenizer: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "logs"))
    eg.train(fresh, tokenizer, recipe(tmp_path / "out", max_steps=3, trainer={"report_to": ["tensorboard"]}), FACTS)
    (directory,) = {path.parent for path in tmp_path.rglob("events.out.tfevents*")}
    events = EventAccumulator(str(directory)).Reload()
    assert {"train/loss", "train/rows_touched", "train/table_rate"} <= set(events.Tags()["scalars"])
    assert [event.step for event in events.Scalars("train/rows_touched")] == [1, 2, 3]


def test_held_out_facts_are_evaluated_and_the_best_checkpoint_wins_by_early_stopping(
    fresh: nn.Module, tokenizer: Any, tmp_path: Path
) -> None:
    facts = tuple(dataclasses.replace(fact, split="validation" if fact.id == "3" else "train") for fact in FACTS.facts)
    every = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True, "metric_for_best_model": "loss"}
    plan = recipe(tmp_path / "out", max_steps=60, save_steps=2, trainer=every, learning_rate=0.05)
    result = eg.train(fresh, tokenizer, plan, Data(facts=facts), callbacks=[EarlyStoppingCallback(early_stopping_patience=2)])
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    losses = {line["step"]: line["eval_loss"] for line in lines if "eval_loss" in line}
    best = min(losses, key=lambda step: losses[step])
    assert result["steps"] == max(losses) == best + 4 < 60, "two evaluations without a better one end it"
    kept, end = (load_file(tmp_path / "out" / where / "engram.safetensors") for where in (f"checkpoint-{best}", "."))
    assert all(torch.equal(kept[name], end[name]) for name in kept)


def test_a_share_of_the_text_is_held_out(fresh: nn.Module, tokenizer: Any, tmp_path: Path) -> None:
    data = Data(texts=("the cats sleep in the hills and the river rises in the sun " * 8,))
    every = {"eval_strategy": "steps", "eval_steps": 2}
    eg.train(fresh, tokenizer, recipe(tmp_path, max_steps=4, block_size=16, validation=0.25, trainer=every), data)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "eval_loss" in line] == [2, 4]
    with pytest.raises(UserError, match=r"train.validation=0.01: of \d+ blocks"):
        eg.train(fresh, tokenizer, recipe(block_size=16, validation=0.01), data)


def test_a_gradient_scaler_unscales_rows_and_skips_a_step_that_overflows() -> None:
    for scale in (1.0, 1024.0):
        parameter = nn.Parameter(torch.zeros(8, 3))
        optimizer = EngramAdamW([{"params": [parameter], "table": True, "lr": 0.1, "weight_decay": 0.0}])
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        loss = nn.functional.embedding(torch.tensor([1, 5, 5]), parameter, sparse=True).sum()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = clip_grad_norm([parameter], 1e-4)
        scaler.step(optimizer)
        scaler.update()
        assert norm == pytest.approx((3 * 1 + 3 * 4) ** 0.5) and parameter[[1, 5]].abs().min() > 0.09, scale
        assert parameter.grad is not None and float(parameter.grad.coalesce().values().norm()) == pytest.approx(1e-4, rel=1e-3)
        before = parameter.detach().clone()
        optimizer.zero_grad()
        scaler.scale(nn.functional.embedding(torch.tensor([2]), parameter, sparse=True).sum() * float("inf")).backward()
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(parameter, before) and scaler.get_scale() < scale, "an overflow moves nothing"


def test_after_mixed_precision_training_the_model_computes_as_its_reloaded_copy(
    tokenizer: Any, tmp_path: Path, ids: Tensor, monkeypatch: Any
) -> None:
    def differs(name: str) -> bool:
        model = eg.graft(tiny_model(), tokenizer, eg.EngramConfig(**{**TINY_ENGRAM, "seen_filter": True}))
        result = eg.train(model, tokenizer, recipe(tmp_path / name, max_steps=30, trainer={"bf16": True}), FACTS)
        assert result["recall"] > 0.5
        loaded, _ = eg.load_graft(tmp_path / name, base=tiny_model(), tokenizer=tokenizer)
        return not torch.equal(model(ids).logits, loaded(ids).logits)

    assert not differs("out")
    monkeypatch.setattr("accelerate.Accelerator.unwrap_model", lambda self, model, **options: model)
    assert differs("control")
