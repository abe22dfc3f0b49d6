"""The hub: exactly what a reader needs is pushed, nothing damaged, what comes back is bit-equal, and no code is fetched. The hub is a
small one on loopback, asked by the real huggingface_hub."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TINY_ENGRAM, randomize, tiny_model
from fake_hub import Hub, running
from huggingface_hub import constants
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM

import engram_graft as eg
from engram_graft.bases import hub_options, load_base
from engram_graft.errors import UserError
from engram_graft.files import memory_tensors
from engram_graft.hub import find, on_hub, resolve
from engram_graft.integrity import CONFIG_FILE


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub that huggingface_hub takes for the only one, with a token for it and an empty cache."""
    with running() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}")
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr("huggingface_hub.hf_api.api.endpoint", hub.url)
        monkeypatch.setenv("HF_TOKEN", "hf_made_up")
        hub_options.cache_clear()
        yield hub
    hub_options.cache_clear()


@pytest.fixture
def made(tmp_path: Path, tokenizer: Any) -> tuple[Path, Any]:
    """A graft directory with LoRA, with what else lies in a run's directory, and its model."""
    tiny_model().save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    model: Any = get_peft_model(load_base(str(tmp_path / "base"))[0], LoraConfig(r=2, target_modules=["q_proj"]))
    eg.graft(model, tokenizer, eg.EngramConfig(**TINY_ENGRAM))
    randomize(model)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.constant_(parameter, 0.1)
    run = tmp_path / "run"
    eg.save_graft(model, run)
    for name in ("recipe.yaml", "report.html", "metrics.jsonl", "optimizer.pt", "table.bin", "notes.py", ".lock"):
        (run / name).write_text("x")
    for name in ("checkpoint-5", "merged"):
        (run / name).mkdir()
        (run / name / "model.safetensors").write_text("x")
    return run, model.eval()


GRAFT = {CONFIG_FILE, "engram.safetensors", "adapter_config.json", "adapter_model.safetensors", "README.md"}


def test_what_a_reader_needs_is_pushed_and_nothing_else(hub: Hub, made: Any) -> None:
    run, _ = made
    report = eg.push_to_hub(run, "me/facts")
    assert set(hub.files("me/facts")) == GRAFT | {"recipe.yaml", "report.html"} == set(report["files"])
    assert all(data == (run / name).read_bytes() for name, data in hub.files("me/facts").items())
    assert hub.repos["me/facts"]["private"] and report["private"] and report["removed"] == []
    assert report["url"].startswith(f"{hub.url}/me/facts/commit/")


def test_a_graft_from_the_hub_loads_bit_equal_by_its_name(hub: Hub, made: Any, ids: torch.Tensor) -> None:
    run, model = made
    eg.push_to_hub(run, "me/facts")
    loaded, _ = eg.load_graft("me/facts")
    own, other = memory_tensors(model), memory_tensors(loaded)
    assert own.keys() == other.keys() and all(torch.equal(own[name], other[name]) for name in own)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, loaded(ids).logits)
        with eg.disable_graft(loaded):
            assert not torch.equal(model(ids).logits, loaded(ids).logits), "control: the memory matters"


def test_a_merged_directory_goes_there_and_back_and_no_code_is_asked_for(hub: Hub, made: Any, tokenizer: Any, ids: Any) -> None:
    _, model = made
    merged = made[0].parent / "out"
    eg.export_merged(model, tokenizer, merged, max_shard_size="50KB")
    (merged / "evil.py").write_text("raise SystemExit('ran')")
    eg.push_to_hub(merged, "me/merged", private=False)
    pushed = set(hub.files("me/merged"))
    assert "modeling_engram.py" in pushed and "evil.py" not in pushed and "model.safetensors.index.json" in pushed
    assert {path.name for path in merged.glob("*.safetensors")} <= pushed and not hub.repos["me/merged"]["private"]
    hub.files("me/merged")["custom_generate/generate.py"] = b"raise SystemExit('ran')"
    loaded, _ = eg.load_graft("me/merged")
    here, _ = eg.load_graft(merged)
    with torch.no_grad():
        assert torch.equal(here(ids).logits, loaded(ids).logits)
    assert hub.asked and not any(name.endswith(".py") for name in hub.asked)
    AutoModelForCausalLM.from_pretrained("me/merged", trust_remote_code=False)  # what a stranger does


def test_weights_of_an_older_push_do_not_stay(hub: Hub, made: Any, tokenizer: Any, ids: Any) -> None:
    run, _ = made
    eg.push_to_hub(run, "me/facts")
    hub.files("me/facts")["model.safetensors"] = b"old"
    hub.files("me/facts")["notes.md"] = hub.files("me/facts")["other/model.safetensors"] = b"mine"
    bare = eg.graft(load_base(str(run.parent / "base"))[0], tokenizer, eg.EngramConfig(**TINY_ENGRAM))
    eg.save_graft(bare, run.parent / "bare")
    report = eg.push_to_hub(run.parent / "bare", "me/facts")
    assert report["removed"] == ["adapter_config.json", "adapter_model.safetensors", "model.safetensors"]
    assert {"notes.md", "other/model.safetensors"} <= set(hub.files("me/facts"))
    assert torch.equal(eg.load_graft("me/facts")[0](ids).logits, bare(ids).logits)


def test_a_branch_is_made_and_read_by_its_name(hub: Hub, made: Any) -> None:
    eg.push_to_hub(made[0], "me/facts", revision="try")
    assert set(hub.files("me/facts", "try")) > GRAFT and not hub.files("me/facts")
    assert (resolve("me/facts", "try") / CONFIG_FILE).is_file()
    with pytest.raises(UserError, match="me/facts: no graft on the hub .*engram_config.json is missing"):
        resolve("me/facts")
    with pytest.raises(UserError, match="give a branch, tag or commit that is there"):
        resolve("me/facts", "none")


def test_a_damaged_directory_is_never_pushed(hub: Hub, made: Any) -> None:
    run, _ = made
    whole = (run / "engram.safetensors").read_bytes()
    (run / "engram.safetensors").write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(UserError, match="corrupt"):
        eg.push_to_hub(run, "me/facts")
    with pytest.raises(UserError, match="no graft here"):
        eg.push_to_hub(run.parent / "base", "me/facts")
    assert not hub.repos


def test_what_is_damaged_on_the_hub_is_refused(hub: Hub, made: Any) -> None:
    eg.push_to_hub(made[0], "me/facts")
    hub.files("me/facts")["adapter_config.json"] = b"{}"
    with pytest.raises(UserError, match=r"adapter_config.json: corrupt"):
        eg.load_graft("me/facts")


def test_a_public_repository_is_not_pushed_to_as_if_it_were_private(hub: Hub, made: Any) -> None:
    hub.repos["me/open"] = {"private": False, "branches": {"main": {}}}
    with pytest.raises(UserError, match="me/open is a public repository.*--public"):
        eg.push_to_hub(made[0], "me/open")
    assert not hub.files("me/open")
    assert not eg.push_to_hub(made[0], "me/open", private=False)["private"]


@pytest.mark.parametrize(
    ("status", "says"), [(401, "hf auth login"), (403, "a token that may do this"), (418, "try again later")]
)
def test_what_the_hub_refuses_is_one_line_with_the_next_step(status: int, says: str, hub: Hub, made: Any) -> None:
    hub.refuses = status
    for ask in (lambda: eg.push_to_hub(made[0], "me/facts"), lambda: eg.load_graft("me/facts")):
        with pytest.raises(UserError, match=says) as error:
            ask()
        assert "\n" not in str(error.value)


def test_without_a_token_the_error_names_the_command(
    hub: Hub, made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    hub.refuses = 401  # what the hub answers to somebody unknown
    with pytest.raises(UserError, match="hf auth login"):
        eg.push_to_hub(made[0], "me/facts")


def test_names_that_are_none_are_refused(hub: Hub, made: Any) -> None:
    with pytest.raises(UserError, match="user/name"):
        eg.push_to_hub(made[0], "me/a/b")
    with pytest.raises(UserError, match="me/none: no such directory here, and the hub did not give .* check the name"):
        eg.load_graft("me/none")


def test_without_a_network_the_cache_answers_or_the_error_says_so(
    hub: Hub, made: Any, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    eg.push_to_hub(made[0], "me/facts")
    before, _ = eg.load_graft("me/facts")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", "http://127.0.0.1:9/{repo_id}/resolve/{revision}/{filename}")
    hub_options.cache_clear()
    again, _ = eg.load_graft("me/facts")
    assert torch.equal(before(ids).logits, again(ids).logits)
    with pytest.raises(UserError, match="check the name and the network"):
        eg.load_graft("me/other")
    with pytest.raises(UserError, match="could not be pushed to .*check the network"):
        eg.push_to_hub(made[0], "me/facts")


def test_only_what_can_be_a_repository_is_looked_for_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    assert on_hub("user/name") and on_hub("user-1/name.v2_x")
    for name in ("runs/mine", "name", "./a/b", "../b", "/a/b", "a/b/c", "~/b", tmp_path / "a", "smollm2", ""):
        assert not on_hub(name), name
        assert resolve(name) == Path(name)
    with pytest.raises(UserError, match="only what is on the hub has revisions"):
        resolve("runs/mine", "main")
    assert find("runs/mine") is None


def test_the_commands_push_and_read_by_name(hub: Hub, made: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from engram_graft import cli

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["engram-graft", *arguments])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        return int(stopped.value.code or 0), *capsys.readouterr()

    code, out, _ = run("push", str(made[0]), "me/facts")
    assert code == 0 and "7 files to me/facts (private)" in out and 'load_graft("me/facts")' in out
    code, out, _ = run("push", str(made[0]), "me/facts", "--json")
    assert code == 0 and json.loads(out)["repo_id"] == "me/facts"
    code, out, _ = run("inspect", "me/facts", "--json")
    assert code == 0 and json.loads(out)["base"].endswith("base")
    code, out, _ = run("generate", "me/facts", "--prompt", "The river", "--max-new-tokens", "2", "--json")
    assert code == 0 and json.loads(out)["answers"]
    code, out, _ = run("verify", "me/facts")
    assert code == 0 and "saved again == the files" in out
    code, _, error = run("export", "me/facts", "--output", str(made[0].parent / "pack"), "--adapter-only")
    assert code == 0 and (made[0].parent / "pack" / CONFIG_FILE).is_file(), error
    code, _, error = run("probe", "me/facts")
    assert code == 2 and "--output" in error
    code, _, error = run("push", str(made[0]), "me/facts", "--public")
    assert code == 0 and hub.repos["me/facts"]["private"], "what is private stays so until its owner says otherwise on the hub"
    code, _, error = run("push", str(made[0] / "nothing"), "me/facts")
    assert code == 2 and "no graft here" in error and error.count("\n") == 1
