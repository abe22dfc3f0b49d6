"""The mixin under TRL's SFTTrainer: the same promises as under transformers' own Trainer."""

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TINY_ENGRAM, tiny_model
from datasets import Dataset
from peft import LoraConfig, get_peft_model

import engram_graft as eg
from engram_graft.files import memory_tensors
from engram_graft.grafted import memories
from engram_graft.optim import EngramAdamW
from engram_graft.trainer import EngramTrainerMixin

trl = pytest.importorskip("trl", reason='pip install "engram-graft[trl]"')

TEXTS = ["Velmora exports wool.", "Ostrenk exports honey.", "Zaldi exports bread.", "Mup exports salt."] * 2


class EngramSFTTrainer(EngramTrainerMixin, trl.SFTTrainer):
    pass


def trained(tokenizer: Any, output: Path, lora: bool = False, resume: bool = False, **changes: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model: Any = tiny_model()
    if lora:
        model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
    eg.graft(model, tokenizer, eg.EngramConfig(**{**TINY_ENGRAM, "seen_filter": True}))
    settings = {"max_steps": 6, "save_steps": 3, "per_device_train_batch_size": 4, "learning_rate": 0.01, "max_length": 32}
    arguments = trl.SFTConfig(
        output_dir=str(output), report_to="none", use_cpu=True, disable_tqdm=True, **{"bf16": False, **settings, **changes}
    )
    data = Dataset.from_dict({"text": TEXTS})
    trainer = EngramSFTTrainer(model=model, args=arguments, train_dataset=data, processing_class=tokenizer)
    trainer.train(resume_from_checkpoint=str(output / "checkpoint-3") if resume else None)
    return model, trainer


@pytest.mark.parametrize("lora", [False, True])
def test_sft_trains_the_memory_and_three_steps_and_three_resumed_equal_six(lora: bool, tokenizer: Any, tmp_path: Path) -> None:
    whole, trainer = trained(tokenizer, tmp_path, lora)
    assert isinstance(trainer.optimizer.optimizer, EngramAdamW)
    assert trainer.optimizer.param_groups[-1]["table"] and memories(whole)[0].table.count_seen()
    assert memories(whole)[0].value_proj.weight.abs().max() > 0
    halves, _ = trained(tokenizer, tmp_path, lora, resume=True)
    one, two = memory_tensors(whole), memory_tensors(halves)
    assert all(torch.equal(one[name], two[name]) for name in one)
    loaded, _ = eg.load_graft(tmp_path / "checkpoint-6", tiny_model(), tokenizer)
    assert all(torch.equal(one[name], tensor) for name, tensor in memory_tensors(loaded).items())


def test_after_bf16_training_the_model_in_memory_is_the_one_that_was_saved(
    tokenizer: Any, tmp_path: Path, ids: torch.Tensor, monkeypatch: Any
) -> None:
    def differs(where: Path) -> bool:
        model, _ = trained(tokenizer, where, bf16=True)
        loaded, _ = eg.load_graft(where / "checkpoint-6", tiny_model(), tokenizer)
        return not torch.equal(model.eval()(ids).logits, loaded(ids).logits)

    assert not differs(tmp_path / "a")
    monkeypatch.setattr("accelerate.Accelerator.unwrap_model", lambda self, model, **options: model)
    assert differs(tmp_path / "control")


def test_packing_parts_the_documents_of_a_row(tokenizer: Any, tmp_path: Path) -> None:
    apart, _ = trained(tokenizer, tmp_path / "a", max_steps=1, per_device_train_batch_size=8, learning_rate=1e-9)
    packed, _ = trained(
        tokenizer, tmp_path / "b", max_steps=1, packing=True, padding_free=True, per_device_train_batch_size=8, learning_rate=1e-9
    )
    assert torch.equal(memories(apart)[0].table.seen_rows(), memories(packed)[0].table.seen_rows())
    joined = eg.graft(tiny_model(), tokenizer, eg.EngramConfig(**{**TINY_ENGRAM, "seen_filter": True})).train()
    joined(**tokenizer(tokenizer.eos_token.join(TEXTS), return_tensors="pt"), use_cache=False)
    control = memories(joined)[0].table.count_seen()
    assert control > memories(packed)[0].table.count_seen(), "control: run on as one text, more rows are looked up"
