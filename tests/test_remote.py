"""An export opens where the toolkit is not installed, by the code it ships, and answers there as the graft does."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ARCHITECTURES, TINY_ENGRAM, keep_seen, randomize, tiny_model
from test_export import with_lora
from transformers import AutoModelForCausalLM

import engram_graft as eg
from engram_graft import bundle
from engram_graft.bundle import modelling_code
from engram_graft.errors import UserError
from engram_graft.export import reopen

PROMPTS = ["The river rises in", "To make bread, mix flour, water", "Velmora"]


def opened_without_toolkit(asked: dict[str, Any], scratch: Path) -> list[dict[str, Any]]:
    """What a process that cannot import the toolkit finds in these directories."""
    (scratch / "asked.json").write_text(json.dumps(asked))
    environment = {**os.environ, "HF_HOME": str(scratch / "hf"), "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
    ran = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("opened_without_toolkit.py")), str(scratch / "asked.json")],
        capture_output=True,
        text=True,
        cwd=scratch,
        env=environment,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    return [json.loads(line) for line in ran.stdout.splitlines()]


def expected(model: Any, tokenizer: Any, **options: Any) -> list[list[int]]:
    """Greedy answers of a grafted model in this process."""
    found = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        made = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, do_sample=False, eos_token_id=-1, **options
        )
        found.append(made[0, ids.shape[1] :].tolist())
    return found


def test_without_the_toolkit_an_export_answers_as_the_graft_does_on_every_architecture(
    tmp_path: Path, grafted: Any, tokenizer: Any, ids: Any
) -> None:
    models = {
        name: grafted(name, seen_filter=True, base={"tie_word_embeddings": name in ("llama", "qwen3")}) for name in ARCHITECTURES
    }
    for name, model in models.items():
        keep_seen(model, torch.arange(0, 200, 2))
        eg.export_merged(model, tokenizer, tmp_path / name)
    directories = [str(tmp_path / name) for name in models]
    found = opened_without_toolkit({"directories": directories, "ids": ids.tolist(), "prompts": PROMPTS, "tokens": 5}, tmp_path)
    assert len(found) == len(models)
    for (name, model), there in zip(models.items(), found, strict=True):
        with torch.no_grad():
            here = model(ids).logits.float()
            with eg.disable_graft(model):
                assert not torch.equal(model(ids).logits.float(), here), f"control: {name}'s memory matters"
        assert torch.equal(here, torch.tensor(there["logits"])), name
        assert there["again"], f"{name}: saved there once more and opened again"
        saved_there, _ = eg.load_graft(tmp_path / f"{name}-again")
        with torch.no_grad():
            assert torch.equal(saved_there(ids).logits.float(), here), f"{name}: and with the toolkit"
        assert there["class"] == f"Engram{there['without_code']}" and there["without_code"] == type(model).__name__
        assert there["cached"] == there["uncached"] == there["batch"] == expected(model, tokenizer), name
        assert there["beams"] == expected(model, tokenizer, num_beams=3), name


def test_lora_in_bfloat16_with_coded_tables_opens_without_the_toolkit(tmp_path: Path, tokenizer: Any, ids: Any) -> None:
    model = with_lora(tokenizer, dtype=torch.bfloat16)
    report = eg.export_merged(model, tokenizer, tmp_path / "m", tables="dense", table_dtype="float8")
    (there,) = opened_without_toolkit(
        {"directories": [str(tmp_path / "m")], "ids": ids.tolist(), "prompts": PROMPTS, "tokens": 3}, tmp_path
    )
    with torch.no_grad():
        here = reopen(tmp_path / "m")(ids).logits.float()
    assert torch.equal(here, torch.tensor(there["logits"])) and there["again"] and report["max_difference"] > 0


def test_the_shipped_code_is_our_modules_line_by_line() -> None:
    from transformers import LlamaForCausalLM

    code = modelling_code(LlamaForCausalLM)
    tree = ast.parse(code)
    assert "engram_graft" not in {
        alias.name.split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.Import) for alias in n.names
    }
    assert not any(isinstance(n, ast.ImportFrom) and (n.module or "").startswith("engram_graft") for n in ast.walk(tree))
    shipped = {node.name: ast.dump(node) for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    ours = {}
    for module in bundle.MODULES:
        source = Path(bundle.__file__).with_name(f"{module}.py").read_text()
        ours |= {n.name: ast.dump(n) for n in ast.parse(source).body if isinstance(n, ast.ClassDef | ast.FunctionDef)}
    assert shipped.keys() - ours.keys() == {"EngramLlamaForCausalLM"}
    assert {name: shipped[name] for name in ours} == ours
    outside = {n.module.split(".")[0] for n in tree.body if isinstance(n, ast.ImportFrom) and n.module}
    outside |= {alias.name.split(".")[0] for n in tree.body if isinstance(n, ast.Import) for alias in n.names}
    assert outside - set(sys.stdlib_module_names) == {"numpy", "safetensors", "torch", "transformers"}


def test_names_that_would_collide_in_the_shipped_file_are_noticed(monkeypatch: Any) -> None:
    from transformers import LlamaForCausalLM

    monkeypatch.setattr(bundle, "_defined", lambda node: ["same"])
    with pytest.raises(AssertionError, match="both define same"):
        modelling_code(LlamaForCausalLM)


def test_a_base_from_elsewhere_than_transformers_is_refused(tmp_path: Path, tokenizer: Any) -> None:
    model = tiny_model()
    model.__class__ = type("OwnForCausalLM", (type(model),), {"__module__": "somewhere"})
    eg.graft(model, tokenizer, eg.EngramConfig(**TINY_ENGRAM))
    with pytest.raises(UserError, match="OwnForCausalLM is no class of transformers"):
        eg.export_merged(model, tokenizer, tmp_path / "m")
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize("damage", ["missing", "unexpected", "byte"])
def test_the_shipped_code_refuses_what_does_not_fit(damage: str, tmp_path: Path, grafted: Any, tokenizer: Any) -> None:
    from safetensors.torch import load_file, save_file

    from engram_graft.integrity import file_hash, read_description, write_description

    eg.export_merged(grafted(), tokenizer, tmp_path / "m")
    path = tmp_path / "m" / "model.safetensors"
    if damage == "byte":
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
    else:
        tensors = load_file(path)
        name = "model.layers.1.engram.key_norm"
        tensors = {k: t for k, t in tensors.items() if k != name} | ({"x.y": torch.ones(1)} if damage == "unexpected" else {})
        if damage == "unexpected":
            tensors[name] = load_file(path)[name]
        save_file(tensors, path, metadata={"format": "pt"})
        described = read_description(tmp_path / "m")
        described["files"][path.name] = file_hash(path)
        write_description(tmp_path / "m", described)
    says = {"missing": "missing_keys.*key_norm", "unexpected": "unexpected_keys.*x.y", "byte": "corrupt"}[damage]
    with pytest.raises(ValueError, match=says):
        reopen(tmp_path / "m")


def test_no_code_of_a_directory_runs_without_the_flag(tmp_path: Path, grafted: Any, tokenizer: Any) -> None:
    eg.export_merged(grafted(), tokenizer, tmp_path / "m")
    (tmp_path / "m" / "modeling_engram.py").write_text("raise SystemExit('ran')")
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path / "m")).__name__ == "LlamaForCausalLM"


def test_an_opened_export_can_be_fine_tuned_like_any_model(tmp_path: Path, grafted: Any, tokenizer: Any, ids: Any) -> None:
    eg.export_merged(grafted(), tokenizer, tmp_path / "m")
    model = reopen(tmp_path / "m").train()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(ids, labels=ids).loss.backward()
    optimizer.step()
    assert all(not torch.equal(before[name], parameter) for name, parameter in model.named_parameters() if ".engram." in name)


def test_an_export_refuses_paged_attention(tmp_path: Path, grafted: Any, tokenizer: Any, ids: Any) -> None:
    eg.export_merged(grafted(), tokenizer, tmp_path / "m")
    model: Any = reopen(tmp_path / "m")
    model.config._attn_implementation_internal = "paged|sdpa"
    with pytest.raises(ValueError, match=r"paged\|sdpa.*cannot carry a memory"):
        model(ids)
    with pytest.raises(ValueError, match="continuous batching"):
        model.generate_batch([[1, 2]])


def test_a_model_made_from_the_config_alone_has_a_silent_memory(tmp_path: Path, grafted: Any, tokenizer: Any, ids: Any) -> None:
    eg.export_merged(grafted(seen_filter=True), tokenizer, tmp_path / "m")
    opened = reopen(tmp_path / "m")
    fresh = type(opened)(opened.config).eval()
    plain = fresh.base_class(opened.config).eval()
    plain.load_state_dict({name: t for name, t in fresh.state_dict().items() if "engram" not in name})
    assert torch.equal(fresh(ids).logits, plain(ids).logits)


@pytest.mark.parametrize("architecture", ["falcon_h1", "diffllama"])
def test_what_a_class_computes_or_places_itself_while_loading_is_right(
    architecture: str, tmp_path: Path, tokenizer: Any, ids: Any
) -> None:
    """falcon_h1 computes buffers after loading, diffllama makes some parameters on the CPU while the rest are on "meta"."""
    mamba = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_ssm": 64, "mamba_d_state": 8, "mamba_n_groups": 1}
    model = tiny_model(architecture, **(mamba if architecture == "falcon_h1" else {}))
    eg.graft(model, tokenizer, eg.EngramConfig(**TINY_ENGRAM))
    randomize(model)
    eg.export_merged(model, tokenizer, tmp_path / "m")
    for _ in range(2):  # memory that was not written may hold the right numbers by chance
        assert torch.equal(reopen(tmp_path / "m")(ids).logits, model(ids).logits)


def opened_as_a_user(directory: Path, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True, **options).eval()


@pytest.mark.parametrize("code", ["float32", "float16", "float8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_opened_export_can_be_cast_and_saved(
    code: str, dtype: torch.dtype, tmp_path: Path, grafted: Any, tokenizer: Any, ids: Any
) -> None:
    eg.export_merged(grafted("gpt2"), tokenizer, tmp_path / "m", table_dtype=code)  # gpt2 has no buffers that a cast rounds
    model = opened_as_a_user(tmp_path / "m")
    exact = model(ids).logits
    cast = model.to(dtype)(ids).logits
    assert cast.dtype == dtype and (cast.float() - exact).abs().max() < 0.1
    model.save_pretrained(tmp_path / "again")
    tokenizer.save_pretrained(tmp_path / "again")
    assert torch.equal(opened_as_a_user(tmp_path / "again")(ids).logits, cast)
    loaded, _ = eg.load_graft(tmp_path / "again")
    assert torch.equal(loaded(ids).logits, cast)
    with pytest.raises(ValueError, match=r"memory is in float64: call model.float\(\)"):
        model.double().save_pretrained(tmp_path / "double")
    assert not (tmp_path / "double").exists()


@pytest.mark.parametrize("sizes", [("40KB", "5GB"), ("5GB", "40KB"), ("40KB", "80KB")])
def test_saving_over_another_sharding_leaves_none_of_its_files(
    sizes: tuple[str, str], tmp_path: Path, grafted: Any, tokenizer: Any, ids: Any
) -> None:
    eg.export_merged(grafted(), tokenizer, tmp_path / "m")
    model = opened_as_a_user(tmp_path / "m")
    model.save_pretrained(tmp_path / "again", max_shard_size=sizes[0])
    (tmp_path / "again" / "other.safetensors").write_bytes(b"another's")
    with torch.no_grad():
        model.model.norm.weight.mul_(2)
    model.save_pretrained(tmp_path / "again", max_shard_size=sizes[1])
    assert torch.equal(opened_as_a_user(tmp_path / "again")(ids).logits, model(ids).logits)
    assert (tmp_path / "again" / "other.safetensors").read_bytes() == b"another's"


def test_a_tuned_export_is_its_own_base(tmp_path: Path, grafted: Any, tokenizer: Any, ids: Any) -> None:
    """A few changed weights lie between those that a fingerprint samples: on the base it came from, it would be silently another."""
    from engram_graft.repack import repack

    tiny_model().save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    grown = grafted()
    grown.name_or_path = str(tmp_path / "base")
    eg.export_merged(grown, tokenizer, tmp_path / "m")
    model = opened_as_a_user(tmp_path / "m")
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight[3, :5] += 0.5
    model.save_pretrained(tmp_path / "tuned")
    tokenizer.save_pretrained(tmp_path / "tuned")
    repack(tmp_path / "tuned", tmp_path / "back")
    assert torch.equal(eg.load_graft(tmp_path / "back")[0](ids).logits, model(ids).logits)


def test_an_export_that_would_be_pushed_unfinished_is_refused(tmp_path: Path, grafted: Any, tokenizer: Any) -> None:
    eg.export_merged(grafted(), tokenizer, tmp_path / "m")
    with pytest.raises(ValueError, match="call push_to_hub"):
        reopen(tmp_path / "m").save_pretrained(tmp_path / "again", push_to_hub=True)
    assert not (tmp_path / "again").exists()


def test_a_memory_that_would_be_offloaded_is_refused(tmp_path: Path, grafted: Any, tokenizer: Any, ids: Any) -> None:
    model = grafted()
    eg.export_merged(model, tokenizer, tmp_path / "m")
    places = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "model.engram_hash", "lm_head"), "cpu")
    places |= {f"model.layers.{layer}": "cpu" for layer in range(4)}
    for offloaded, works in (("model.layers.3", True), ("model.layers.2", False)):
        options = {"device_map": places | {offloaded: "disk"}, "offload_folder": tmp_path / offloaded}
        if works:
            assert torch.equal(opened_as_a_user(tmp_path / "m", **options)(ids).logits, model(ids).logits)
        else:
            with pytest.raises(ValueError, match=r"offloads the memory of layers \[2\]"):
                opened_as_a_user(tmp_path / "m", **options)
