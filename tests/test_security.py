"""Nothing that is loaded runs code, is unpickled, or leads out of its directory."""

import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TINY_ENGRAM, randomize, tiny_model
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn

import engram_graft as eg
from engram_graft.adapter_config import read_adapter
from engram_graft.bases import load_base, load_config, load_tokenizer
from engram_graft.data import Data
from engram_graft.errors import UserError
from engram_graft.formats import Fact
from engram_graft.recipe import load_recipe
from engram_graft.shards import check_index, require_inside

EVIL = "import pathlib\npathlib.Path('ran').touch()\n"


class Payload:
    def __reduce__(self) -> Any:
        return os.system, ("touch ran",)


@pytest.fixture
def base(tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny base on disk, in whose neighbourhood nothing may run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("builtins.input", lambda *args: "yes")  # transformers asks, if it is not told
    tiny_model().save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


# -- bases


def test_weights_that_are_a_pickle_are_refused_with_the_way_out(base: Path) -> None:
    (base / "model.safetensors").unlink()
    (base / "pytorch_model.bin").write_bytes(pickle.dumps(Payload()))
    with pytest.raises(UserError, match=r"pickle \(pytorch_model.bin\).*never opened.*safetensors"):
        load_base(str(base))
    assert not Path("ran").exists()


def test_a_pickle_beside_safetensors_is_not_opened(base: Path) -> None:
    (base / "pytorch_model.bin").write_bytes(pickle.dumps(Payload()))
    assert load_base(str(base)) and not Path("ran").exists()


def test_code_in_a_base_is_not_run_and_not_asked_about(base: Path) -> None:
    (base / "evil.py").write_text(EVIL)
    names = {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M", "AutoTokenizer": ["evil.T", "evil.T"]}
    edit(base / "config.json", auto_map=names)
    edit(base / "tokenizer_config.json", auto_map={"AutoTokenizer": ["evil.T", "evil.T"]})
    load_base(str(base))  # a class of transformers' own will do
    edit(base / "config.json", model_type="of_their_own")
    for load in (load_base, load_config):
        with pytest.raises(UserError, match="code of its own.*trust_remote_code=True where you trust it|where you trust it"):
            load(str(base))
    assert not Path("ran").exists()


def test_a_tokenizer_of_its_own_code_is_refused(base: Path) -> None:
    (base / "evil.py").write_text(EVIL)
    edit(base / "tokenizer_config.json", tokenizer_class="OfTheirOwn", auto_map={"AutoTokenizer": ["evil.T", "evil.T"]})
    edit(base / "config.json", model_type="of_their_own")
    with pytest.raises(UserError, match="could not be loaded|code of its own"):
        load_tokenizer(str(base))
    assert not Path("ran").exists()


@pytest.mark.parametrize("name", ["adapter_model.bin", "../x.safetensors", "pytorch_model.bin", 7])
def test_a_base_config_cannot_name_other_weights(name: Any, base: Path) -> None:
    (base / "adapter_model.bin").write_bytes(pickle.dumps(Payload()))
    edit(base / "config.json", transformers_weights=name)
    with pytest.raises(UserError, match="refused"):
        load_base(str(base))
    assert not Path("ran").exists()


def test_a_base_with_an_adapter_beside_is_refused(base: Path) -> None:
    (base / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    with pytest.raises(UserError, match="has an adapter .* beside its weights"):
        load_base(str(base))


def test_a_base_whose_weights_are_not_all_there_is_refused(base: Path) -> None:
    tensors = load_file(base / "model.safetensors")
    tensors["model.layers.2.self_attn.q_projx.weight"] = tensors.pop("model.layers.2.self_attn.q_proj.weight")
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"lacks model.layers.2.self_attn.q_proj.weight \(1 tensors\)"):
        load_base(str(base))


def test_an_index_that_leads_out_is_refused_before_anything_is_opened(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_model().save_pretrained(base, max_shard_size="60KB")
    (base / "model.safetensors").unlink()
    load_base(str(base))
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", lambda *a, **k: pytest.fail("opened"))
    index = base / "model.safetensors.index.json"
    whole = json.loads(index.read_text())
    for name in ("../x.safetensors", "/x.safetensors", "a/../../x.safetensors", "model.bin", "", 7):
        index.write_text(json.dumps({**whole, "weight_map": {**whole["weight_map"], "lm_head.weight": name}}))
        with pytest.raises(UserError, match=r"index.json.*refused"):
            load_base(str(base))
        shutil.move(index, base / "other.index.json")  # another index is no way round
        with pytest.raises(UserError, match=r"other.index.json.*refused"):
            check_index(base)
        shutil.move(base / "other.index.json", index)


def test_links_stay_in_the_directory_or_in_the_hubs_cache(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x")
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "link").symlink_to(tmp_path / "secret")
    with pytest.raises(UserError, match="a link that leaves the directory"):
        require_inside(tmp_path / "home", "link", "index")
    (tmp_path / "home" / "file").write_text("x")
    (tmp_path / "home" / "within").symlink_to("file")
    require_inside(tmp_path / "home", "within", "index")
    (tmp_path / "through").symlink_to("home")
    require_inside(tmp_path / "through", "file", "index")  # the directory itself may be a link
    snapshot = tmp_path / "models--a--b" / "snapshots" / "f00"
    snapshot.mkdir(parents=True)
    (tmp_path / "models--a--b" / "blobs").mkdir()
    (snapshot / "link").symlink_to("../../blobs/abc")
    require_inside(snapshot, "link", "index")
    (snapshot / "away").symlink_to("../../../secret")
    with pytest.raises(UserError, match="leaves the directory"):
        require_inside(snapshot, "away", "index")


# -- grafts


@pytest.fixture
def graft(base: Path, tokenizer: Any) -> Path:
    model: Any = get_peft_model(load_base(str(base))[0], LoraConfig(r=2, target_modules=["q_proj"]))
    eg.graft(model, tokenizer, eg.EngramConfig(**TINY_ENGRAM))
    randomize(model)
    eg.save_graft(model, base.parent / "graft")
    return base.parent / "graft"


@pytest.fixture
def no_pickle(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("unpickled")

    for target in (
        "torch.load",
        "torch.serialization.load",
        "pickle.load",
        "pickle.Unpickler",
        "torch._weights_only_unpickler.load",
    ):
        monkeypatch.setattr(target, refuse)


def test_loading_a_graft_and_a_merged_directory_unpickles_nothing(
    graft: Path, base: Path, tokenizer: Any, no_pickle: None, ids: torch.Tensor
) -> None:
    with pytest.raises(AssertionError, match="unpickled"):
        torch.load(graft / "engram.safetensors")
    for name in ("adapter_model.bin", "pytorch_model.bin"):
        (graft.parent / name).write_bytes(b"")
    model, _ = eg.load_graft(graft)
    eg.export_merged(model, tokenizer, base.parent / "merged")
    merged, _ = eg.load_graft(base.parent / "merged")
    assert (model(ids).logits - merged(ids).logits).abs().max() < 1e-3


def test_a_merged_directorys_code_is_not_run_by_load_graft(graft: Path, base: Path, tokenizer: Any) -> None:
    from engram_graft.integrity import CODE_FILE, file_hash, read_description, write_description

    merged = base.parent / "merged"
    eg.export_merged(eg.load_graft(graft)[0], tokenizer, merged)
    (merged / CODE_FILE).write_text(EVIL + (merged / CODE_FILE).read_text())
    described = read_description(merged)
    described["files"][CODE_FILE] = file_hash(merged / CODE_FILE)
    write_description(merged, described)
    eg.load_graft(merged)
    assert not Path("ran").exists()


def test_an_adapters_base_is_neither_fetched_nor_imported(graft: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from engram_graft.integrity import file_hash, read_description, write_description

    edit(
        graft / "adapter_config.json",
        base_model_name_or_path="somebody/else",
        revision="evil",
        auto_mapping={"base_model_class": "Evil", "parent_library": "evil"},
    )
    described = read_description(graft)
    described["files"]["adapter_config.json"] = file_hash(graft / "adapter_config.json")
    write_description(graft, described)
    Path("evil.py").write_text(EVIL)
    monkeypatch.syspath_prepend(Path.cwd())
    monkeypatch.setattr("peft.config.hf_hub_download", lambda *args, **kwargs: pytest.fail("fetches"))
    options = read_adapter(graft / "adapter_config.json", graft / "adapter_model.safetensors")
    assert options.base_model_name_or_path is None and options.auto_mapping is None and options.revision is None
    eg.load_graft(graft)
    assert not Path("ran").exists()


def test_every_lora_that_a_graft_can_have_passes_its_own_check(base: Path, tokenizer: Any, tmp_path: Path) -> None:
    for number, options in enumerate(
        [
            {"use_dora": True},
            {"use_rslora": True, "lora_dropout": 0.1},
            {"target_modules": "all-linear", "rank_pattern": {"q_proj": 3}, "alpha_pattern": {"q_proj": 5}},
            {"modules_to_save": ["lm_head"]},
            {"layers_to_transform": [0, 2], "exclude_modules": ["v_proj"]},
            {"init_lora_weights": False, "task_type": "CAUSAL_LM"},
            {"init_lora_weights": "gaussian", "target_modules": r".*\.(q|v)_proj"},
        ]
    ):
        lora: Any = LoraConfig(r=2, **{"target_modules": ["q_proj"], **options})
        model: Any = get_peft_model(load_base(str(base))[0], lora)
        eg.graft(model, tokenizer, eg.EngramConfig(**TINY_ENGRAM))
        eg.save_graft(model, tmp_path / f"lora{number}")
        again, _ = eg.load_graft(tmp_path / f"lora{number}")
        own, other = (
            {name: tensor for name, tensor in found.state_dict().items() if "lora" in name or "modules_to_save" in name}
            for found in (model, again)
        )
        assert own.keys() == other.keys() and all(torch.equal(own[name], other[name]) for name in own), options


# -- training


def test_checkpoints_hold_no_pickle_and_resuming_unpickles_nothing(
    base: Path, tokenizer: Any, tmp_path: Path, no_pickle: None
) -> None:
    facts = [Fact("1", ("The capital of Velmora is",), " wool"), Fact("2", ("Ostrenk exports",), " honey")]
    data = Data(facts=facts)
    plan = {"output": str(tmp_path / "run"), "train.max_steps": 4, "train.save_steps": 2, "train.batch_size": 2}

    def made() -> nn.Module:
        model: Any = get_peft_model(load_base(str(base))[0], LoraConfig(r=2, target_modules=["q_proj"]))
        return eg.graft(model, tokenizer, eg.EngramConfig(**TINY_ENGRAM))

    eg.train(made(), tokenizer, load_recipe(overrides=plan), data)
    checkpoint = tmp_path / "run" / "checkpoint-2"
    assert {path.suffix for path in checkpoint.iterdir()} <= {".json", ".safetensors", ".md"}
    whole = (tmp_path / "run" / "engram.safetensors").read_bytes()
    shutil.rmtree(tmp_path / "run" / "checkpoint-4")
    for name in ("pytorch_model.bin", "adapter_model.bin", "scheduler.pt", "rng_state.pth", "optimizer.pt", "scaler.pt"):
        (checkpoint / name).write_bytes(pickle.dumps(Payload()))  # beside what is sealed
    (checkpoint / "model.safetensors").write_bytes((base / "model.safetensors").read_bytes())
    assert eg.train(made(), tokenizer, load_recipe(overrides=plan), data, resume=True)["resumed_from"] == 2
    assert (tmp_path / "run" / "engram.safetensors").read_bytes() == whole and not Path("ran").exists()


def test_shards_can_be_checked_without_torch(tmp_path: Path) -> None:
    code = "import sys; from engram_graft.shards import check_index; check_index('.'); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)
