"""Saving and loading: everything comes back bit for bit, and whatever does not belong together is refused by name."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import TINY_ENGRAM, keep_seen, randomize, tiny_model
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedTokenizerFast

import engram_graft as eg
from engram_graft.bases import check_base, fingerprint, load_base
from engram_graft.errors import UserError
from engram_graft.files import TENSOR_FILE, memory_tensors
from engram_graft.grafted import find_graft, memories
from engram_graft.integrity import CONFIG_FILE, file_hash, read_description, write_description
from engram_graft.params import is_memory
from engram_graft.restore import fill_adapters


@pytest.fixture
def base_dir(tmp_path: Path, tokenizer: Any) -> Path:
    """A tiny base on disk, with its tokenizer."""
    tiny_model().save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@pytest.fixture
def saved(base_dir: Path, tmp_path: Path, tokenizer: Any) -> Path:
    """A graft directory, with LoRA, on `base_dir`."""
    from engram_graft.bases import load_base

    model: Any = get_peft_model(load_base(str(base_dir))[0], LoraConfig(r=2, target_modules=["q_proj"]))
    eg.graft(model, tokenizer, eg.EngramConfig(**{**TINY_ENGRAM, "seen_filter": True}))
    randomize(model)
    for memory in memories(model):
        keep_seen(memory, torch.arange(0, len(memory.table.weight), 2))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.constant_(parameter, 0.1)
    eg.save_graft(model, tmp_path / "graft")
    return tmp_path / "graft"


def rewrite(directory: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Change the tensor file and make its hash fit again: what a converter with a fault would write."""
    tensors = load_file(directory / TENSOR_FILE)
    change(tensors)
    save_file(tensors, directory / TENSOR_FILE)
    described = read_description(directory)
    described["files"][TENSOR_FILE] = file_hash(directory / TENSOR_FILE)
    write_description(directory, described)


def test_a_graft_comes_back_bit_for_bit(base_dir: Path, tmp_path: Path, tokenizer: Any, grafted: Any, ids: torch.Tensor) -> None:
    model = grafted(seen_filter=True)
    keep_seen(memories(model)[0], torch.arange(5, 40))
    eg.save_graft(model, tmp_path / "graft")
    loaded, _ = eg.load_graft(tmp_path / "graft", base=str(base_dir))
    own, other = memory_tensors(model), memory_tensors(loaded)
    assert own.keys() == other.keys() and all(torch.equal(own[name], other[name]) for name in own)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, loaded(ids).logits)
    assert not loaded.training


def test_a_graft_with_lora_comes_back_by_its_recorded_base(saved: Path, ids: torch.Tensor) -> None:
    one, tokenizer = eg.load_graft(saved)
    two, _ = eg.load_graft(saved)
    assert isinstance(one, PeftModel) and len(tokenizer) == len(find_graft(one).token_map.lookup)
    with torch.no_grad():
        assert torch.equal(one(ids).logits, two(ids).logits)
        with eg.disable_graft(one):
            lora = one(ids).logits
        with eg.disable_graft(one, lora=True):
            bare = one(ids).logits
    assert not torch.equal(one(ids).logits, lora) and not torch.equal(lora, bare)
    assert torch.equal(bare, tiny_model()(ids).logits)


def test_the_graft_directory_holds_exactly_these_files(saved: Path) -> None:
    expected = {CONFIG_FILE, TENSOR_FILE, "README.md", "adapter_config.json", "adapter_model.safetensors"}
    assert {path.name for path in saved.iterdir()} == expected


def test_case_23_the_constants_of_the_addresses_are_in_the_file_and_used(
    saved: Path, ids: torch.Tensor, monkeypatch: Any
) -> None:
    names = set(load_file(saved / TENSOR_FILE))
    assert {"hash.lookup", "hash.multipliers", "hash.primes", "hash.offsets", "hash.pad"} <= names
    expected, _ = eg.load_graft(saved)

    def never(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("drawn again")

    monkeypatch.setattr(np.random, "default_rng", never)
    loaded, _ = eg.load_graft(saved)
    assert torch.equal(loaded(ids).logits, expected(ids).logits)


def test_case_19_loading_leaves_base_and_memory_frozen_unless_asked(saved: Path) -> None:
    frozen, _ = eg.load_graft(saved)
    assert not any(p.requires_grad for p in frozen.parameters())
    thawed, _ = eg.load_graft(saved, trainable=True)
    trainable = {n for n, p in thawed.named_parameters() if p.requires_grad}
    assert trainable == {n for n, _ in thawed.named_parameters() if is_memory(n) or "lora_" in n}
    assert trainable == set(eg.trainable_parameters(thawed))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.pop("layers.2.value_proj.weight"), "missing layers.2.value_proj.weight"),
        (lambda t: t.update(stray=torch.zeros(1)), "unexpected stray"),
        (lambda t: t.update({"layers.1.key_norm": torch.ones(1, 31)}), r"layers.1.key_norm is torch.float32 \[1, 31\]"),
        (
            lambda t: t.update({"layers.1.key_norm": t["layers.1.key_norm"].half()}),
            "layers.1.key_norm is torch.float16",
        ),
        (lambda t: t.pop("layers.1.table.rows"), "missing layers.1.table.rows"),
        (lambda t: t.pop("layers.2.table.values"), "missing layers.2.table.values"),
        (lambda t: t["layers.1.table.rows"][-1:].add_(1000), "layers.1.table.rows goes up to .* its primes add up to"),
        (lambda t: t["layers.2.table.rows"][-1:].fill_(-1), "layers.2.table.rows goes up to -1, its primes add up to"),
        (lambda t: t["layers.1.table.rows"][:2].copy_(torch.tensor([2, 0])), "layers.1.table: row ids must increase"),
        (lambda t: t["layers.1.table.rows"][:1].fill_(-1), "layers.1.table: row ids must increase from 0"),
        (
            lambda t: t.update({"layers.1.table.values": t["layers.1.table.values"][1:].clone()}),
            r"1.table.values is .* \[119, 8\], not",
        ),
        (
            lambda t: t.update({"layers.1.table.values": t["layers.1.table.values"][:, 1:].clone()}),
            r"1.table.values is .* \[120, 7\]",
        ),
        (
            lambda t: t.update({"layers.2.table.values": t["layers.2.table.values"].half()}),
            "layers.2.table.values is torch.float16",
        ),
        (lambda t: t.update({"layers.2.table.rows": t["layers.2.table.rows"].int()}), "layers.2.table.rows is torch.int32"),
        (lambda t: t.update({"layers.1.table.weight": torch.zeros(240, 8)}), "unexpected layers.1.table.weight"),
        (lambda t: t.pop("hash.primes"), "lacks hash.primes"),
        (lambda t: t.update({"hash.multipliers": t["hash.multipliers"][:, :1].clone()}), "hash.multipliers has shape"),
    ],
)
def test_case_20_loading_is_strict_and_names_the_key(change: Any, says: str, saved: Path) -> None:
    rewrite(saved, change)
    with pytest.raises(UserError, match=says):
        eg.load_graft(saved)


@pytest.mark.parametrize("name", [TENSOR_FILE, "adapter_model.safetensors"])
def test_case_20_a_flipped_byte_or_a_truncated_file_is_refused(name: str, saved: Path) -> None:
    path = saved / name
    whole = path.read_bytes()
    for broken in (whole[:-1], whole[: len(whole) // 2], whole[:-5] + bytes([whole[-5] ^ 1]) + whole[-4:], b""):
        path.write_bytes(broken)
        with pytest.raises(UserError, match="corrupt"):
            eg.load_graft(saved)
    path.unlink()
    with pytest.raises(UserError, match="missing"):
        eg.load_graft(saved)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"format": 1}', '{"format": 2}', '{"format": 99}', "null"])
def test_case_20_a_broken_config_is_refused(text: str, saved: Path) -> None:
    (saved / CONFIG_FILE).write_text(text)
    with pytest.raises(UserError, match=CONFIG_FILE):
        eg.load_graft(saved)


def test_a_graft_of_an_older_format_is_refused_by_its_number(saved: Path) -> None:
    described = read_description(saved)
    assert described["format"] == 3
    write_description(saved, {**described, "format": 1})
    with pytest.raises(UserError, match="format 1, this version reads 3; use the version of engram-graft that wrote it"):
        eg.load_graft(saved)


def test_no_path_in_the_config_leaves_the_directory(saved: Path) -> None:
    described = read_description(saved)
    described["files"]["../outside.safetensors"] = "0" * 64
    write_description(saved, described)
    with pytest.raises(UserError, match="leaves the directory"):
        eg.load_graft(saved)


def test_an_adapter_of_another_rank_is_not_spread_over_the_models(saved: Path, base_dir: Path) -> None:
    fill_adapters(eg.load_graft(saved)[0], saved)
    other = get_peft_model(load_base(str(base_dir))[0], LoraConfig(r=1, target_modules=["q_proj"]))
    other.save_pretrained(saved)
    with pytest.raises(UserError, match="does not fit the model's adapters: .*lora_A"):
        fill_adapters(get_peft_model(load_base(str(base_dir))[0], LoraConfig(r=2, target_modules=["q_proj"])), saved)


def test_a_directory_without_a_graft_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no graft here"):
        eg.load_graft(tmp_path)


def test_case_21_another_tokenizer_is_refused_though_its_size_is_the_same(saved: Path, tokenizer: Any) -> None:
    vocabulary = json.loads(tokenizer.backend_tokenizer.to_str())
    words = vocabulary["model"]["vocab"]
    one, other = (next(w for w in words if w.isalpha() and w.startswith(letter) and len(w) > 1) for letter in "st")
    words[one], words[other] = words[other], words[one]
    from tokenizers import Tokenizer

    swapped = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(vocabulary)), pad_token="<pad>", eos_token="<eos>"
    )
    assert len(swapped) == len(tokenizer)
    with pytest.raises(UserError, match="wrong tokenizer"):
        eg.load_graft(saved, tokenizer=swapped)


def test_case_21_a_tokenizer_with_one_more_added_token_is_refused(saved: Path, base_dir: Path) -> None:
    from engram_graft.bases import load_tokenizer

    more = load_tokenizer(str(base_dir))
    more.add_tokens(["<|more|>"])
    with pytest.raises(UserError, match="wrong tokenizer"):
        eg.load_graft(saved, tokenizer=more)


def test_case_21_another_base_is_refused_whether_shape_or_weights_differ(saved: Path, tokenizer: Any) -> None:
    with pytest.raises(UserError, match="wrong base: .* differs"):
        eg.load_graft(saved, base=tiny_model(seed=1), tokenizer=tokenizer)
    with pytest.raises(UserError, match="num_hidden_layers is 5"):
        eg.load_graft(saved, base=tiny_model(num_hidden_layers=5), tokenizer=tokenizer)
    with pytest.raises(UserError, match="model_type is 'qwen3'"):
        eg.load_graft(saved, base=tiny_model("qwen3"), tokenizer=tokenizer)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_case_21_the_same_base_in_another_dtype_is_the_same_base(dtype: torch.dtype) -> None:
    expected = fingerprint(tiny_model())
    check_base(tiny_model().to(dtype), expected)
    nudged = tiny_model()
    with torch.no_grad():
        for parameter in nudged.parameters():
            parameter.mul_(1.02)
    with pytest.raises(UserError, match="differs"):
        check_base(nudged, expected)


def test_the_fingerprint_leaves_lora_and_memory_out(saved: Path) -> None:
    loaded, _ = eg.load_graft(saved)
    assert fingerprint(loaded) == fingerprint(tiny_model())


def test_a_failed_save_leaves_the_old_graft_whole(saved: Path, grafted: Any, monkeypatch: Any) -> None:
    before = {path.name: path.read_bytes() for path in saved.iterdir()}

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr("engram_graft.files.save_file", full)
    with pytest.raises(UserError, match="cannot be written .*No space"):
        eg.save_graft(grafted(), saved)
    assert {path.name: path.read_bytes() for path in saved.iterdir()} == before


def test_a_moved_graft_still_loads(saved: Path, tmp_path: Path, ids: torch.Tensor) -> None:
    shutil.move(saved, tmp_path / "elsewhere")
    assert eg.load_graft(tmp_path / "elsewhere")[0](ids).logits.isfinite().all()


def test_case_20_a_failed_load_leaves_the_callers_model_as_it_was(saved: Path, tokenizer: Any) -> None:
    rewrite(saved, lambda tensors: tensors.pop("layers.2.value_proj.weight"))
    mine = tiny_model()
    before = list(mine.state_dict())
    with pytest.raises(UserError, match=r"value_proj"):
        eg.load_graft(saved, base=mine, tokenizer=tokenizer)
    assert "engram" not in str(list(mine.state_dict())) and len(before) <= len(mine.state_dict())


def test_case_20_an_adapter_with_a_key_too_few_is_refused(saved: Path) -> None:
    path = saved / "adapter_model.safetensors"
    tensors = load_file(path)
    tensors.pop(next(iter(tensors)))
    save_file(tensors, path)
    described = read_description(saved)
    described["files"][path.name] = file_hash(path)
    write_description(saved, described)
    with pytest.raises(UserError, match=r"adapter_model.safetensors: does not fit .*lora_A"):
        eg.load_graft(saved)


def test_an_edited_adapter_config_is_refused(saved: Path) -> None:
    path = saved / "adapter_config.json"
    path.write_text(path.read_text().replace('"lora_alpha": 8', '"lora_alpha": 16'))
    with pytest.raises(UserError, match=r"adapter_config.json: corrupt"):
        eg.load_graft(saved)


def test_case_12_adapters_that_cannot_be_saved_are_refused_not_lost(tokenizer: Any, tmp_path: Path) -> None:
    model: Any = get_peft_model(tiny_model(), LoraConfig(r=2, target_modules=["q_proj"]), adapter_name="mine")
    eg.graft(model, tokenizer, eg.EngramConfig(**TINY_ENGRAM))
    with pytest.raises(UserError, match="adapter name is 'default'"):
        eg.save_graft(model, tmp_path / "graft")
    assert not (tmp_path / "graft").exists()


def test_case_12_a_graft_under_later_lora_saves_and_loads_both(
    base_dir: Path, tokenizer: Any, tmp_path: Path, ids: torch.Tensor
) -> None:
    from engram_graft.bases import load_base

    model: Any = load_base(str(base_dir))[0]
    eg.graft(model, tokenizer, eg.EngramConfig(**TINY_ENGRAM))
    randomize(model)
    model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"])).eval()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.constant_(parameter, 0.1)
    eg.save_graft(model, tmp_path / "graft")
    assert torch.equal(eg.load_graft(tmp_path / "graft")[0](ids).logits, model(ids).logits)


def test_a_model_cast_after_the_graft_saves_the_dtype_it_has(base_dir: Path, tmp_path: Path, grafted: Any) -> None:
    model = grafted().to(torch.bfloat16)
    eg.save_graft(model, tmp_path / "graft")
    loaded, _ = eg.load_graft(tmp_path / "graft", base=str(base_dir))
    assert memories(loaded)[0].key_norm.dtype == torch.bfloat16


def test_case_13_frozen_adapters_stay_frozen_through_disable_graft_even_after_an_error(saved: Path) -> None:
    model, _ = eg.load_graft(saved)
    with pytest.raises(KeyError), eg.disable_graft(model, lora=True):
        raise KeyError
    assert not any(p.requires_grad for p in model.parameters())


def test_a_model_the_files_could_not_give_back_is_refused(saved: Path, tmp_path: Path, grafted: Any, tokenizer: Any) -> None:
    merged, _ = eg.load_graft(saved)
    merged.merge_adapter()
    with pytest.raises(UserError, match="unmerge_adapter"):
        eg.save_graft(merged, tmp_path / "a")
    merged.unmerge_adapter()
    merged.add_adapter("b", LoraConfig(r=2, target_modules=["q_proj"]))
    with pytest.raises(UserError, match="delete_adapter"):
        eg.save_graft(merged, tmp_path / "a")
    with pytest.raises(UserError, match="float64"):
        eg.save_graft(grafted().double(), tmp_path / "a")
    grown = grafted()
    grown.resize_token_embeddings(340, mean_resizing=False)
    with pytest.raises(UserError, match="340 rows"):
        eg.save_graft(grown, tmp_path / "a")
    assert not (tmp_path / "a").exists()
    biased = get_peft_model(tiny_model("qwen2"), LoraConfig(r=2, target_modules=["q_proj"], bias="all"))
    with pytest.raises(UserError, match="bias='none'"):
        eg.graft(biased, tokenizer, eg.EngramConfig(**TINY_ENGRAM))
