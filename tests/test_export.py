"""Export: one directory, reloaded bit for bit; LoRA merged in float32 and cast once; a failed check leaves nothing."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TINY_ENGRAM, keep_seen, randomize, tiny_model
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import engram_graft as eg
from engram_graft import export
from engram_graft import repack as repacking
from engram_graft.codes import decode, encode
from engram_graft.errors import PromiseError, UserError
from engram_graft.export import reopen
from engram_graft.files import memory_tensors, write_graft
from engram_graft.grafted import memories
from engram_graft.integrity import read_description
from engram_graft.locate import unwrap
from engram_graft.merge import merged_state
from engram_graft.repack import repack


def with_lora(tokenizer: Any, architecture: str = "llama", targets: Any = ("q_proj", "v_proj"), **changes: Any) -> Any:
    """A grafted tiny model with a LoRA that matters."""
    options = changes.pop("lora", {})
    model: Any = get_peft_model(tiny_model(architecture, **changes), LoraConfig(r=4, target_modules=targets, **options))
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    eg.graft(model, tokenizer, eg.EngramConfig(**TINY_ENGRAM))
    randomize(model)
    return model.eval()


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gpt2", "gpt_neox"])
def test_memory_only_exports_and_reloads_bit_equal(
    architecture: str, tmp_path: Path, grafted: Any, tokenizer: Any, ids: Any
) -> None:
    model = grafted(architecture)
    report = eg.export_merged(model, tokenizer, tmp_path / "merged")
    assert report["max_difference"] == 0 and report["flips"] == 0
    loaded, _ = eg.load_graft(tmp_path / "merged")
    with torch.no_grad():
        assert torch.equal(model(ids).logits, loaded(ids).logits)
    own, other = memory_tensors(model), memory_tensors(loaded)
    assert own.keys() == other.keys() and all(torch.equal(own[name], other[name]) for name in own)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("lora", [{}, {"use_rslora": True}, {"use_dora": True}])
def test_case_25_lora_is_merged_and_tied_embeddings_stay_tied(
    tied: bool, lora: dict[str, Any], tmp_path: Path, tokenizer: Any, ids: Any
) -> None:
    model = with_lora(tokenizer, tie_word_embeddings=tied, lora=lora)
    keep_seen(model, torch.arange(0, 100, 3))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    report = eg.export_merged(model, tokenizer, tmp_path / "merged")
    assert 0 < report["max_difference"] < 1e-4
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items()), (
        "the model itself is not changed"
    )
    loaded, _ = eg.load_graft(tmp_path / "merged")
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    with torch.no_grad():
        assert (model(ids).logits - loaded(ids).logits).abs().max() < 1e-4


def test_automodel_opens_the_export_as_the_base_with_lora_merged(tmp_path: Path, tokenizer: Any, ids: Any) -> None:
    model = with_lora(tokenizer)
    eg.export_merged(model, tokenizer, tmp_path / "merged")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    with torch.no_grad(), eg.disable_graft(model):
        assert (plain(ids).logits - model(ids).logits).abs().max() < 1e-4
    assert not (tmp_path / "merged" / "adapter_config.json").exists()


def test_case_26_lora_is_merged_in_float32_and_cast_once(tokenizer: Any) -> None:
    model = with_lora(tokenizer, dtype=torch.bfloat16)
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    assert layer.weight.dtype == torch.bfloat16 and layer.lora_A["default"].weight.dtype == torch.float32
    once = layer.weight.float() + layer.get_delta_weight("default").float()
    merged = merged_state(model)["model.layers.0.self_attn.q_proj.weight"]
    assert torch.equal(merged, once.to(torch.bfloat16))
    twice = layer.weight + layer.get_delta_weight("default").to(torch.bfloat16)
    assert not torch.equal(merged, twice), "control: rounding twice is something else"


def test_case_26_adapters_in_bfloat16_are_multiplied_in_float32_too(tokenizer: Any) -> None:
    model = with_lora(tokenizer).to(torch.bfloat16)
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    down, up = (matrix["default"].weight.float() for matrix in (layer.lora_A, layer.lora_B))
    once = layer.weight.float() + up @ down * layer.scaling["default"]
    merged = merged_state(model)["model.layers.0.self_attn.q_proj.weight"]
    assert torch.equal(merged, once.to(torch.bfloat16))
    assert not torch.equal(merged, layer.weight + layer.get_delta_weight("default")), "control: in bfloat16 it is something else"


def test_a_bfloat16_base_exports_and_reloads(tmp_path: Path, tokenizer: Any) -> None:
    model = with_lora(tokenizer, dtype=torch.bfloat16)
    eg.export_merged(model, tokenizer, tmp_path / "merged")
    loaded, _ = eg.load_graft(tmp_path / "merged")
    assert loaded.dtype == torch.bfloat16 and memory_tensors(loaded)["layers.1.key_norm"].dtype == torch.float32


def test_shards_are_written_and_read(tmp_path: Path, grafted: Any, tokenizer: Any, ids: Any) -> None:
    model = grafted()
    eg.export_merged(model, tokenizer, tmp_path / "merged", max_shard_size="50KB")
    assert len(list((tmp_path / "merged").glob("*.safetensors"))) > 2
    assert torch.equal(eg.load_graft(tmp_path / "merged")[0](ids).logits, model(ids).logits)


def test_a_failed_check_leaves_no_directory(tmp_path: Path, grafted: Any, tokenizer: Any, monkeypatch: Any) -> None:
    def fails(*args: Any) -> None:
        raise PromiseError("planted")

    monkeypatch.setattr("engram_graft.export._check_tensors", fails)
    with pytest.raises(PromiseError, match="planted"):
        eg.export_merged(grafted(), tokenizer, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_the_check_notices_a_changed_tensor(tmp_path: Path, grafted: Any, tokenizer: Any, monkeypatch: Any) -> None:
    real = export.reopen

    def nudged(directory: Path) -> Any:
        model = real(directory)
        with torch.no_grad():
            model.get_parameter("model.layers.1.engram.key_norm")[0, 0] += 1
        return model

    monkeypatch.setattr(export, "reopen", nudged)
    with pytest.raises(PromiseError, match=r"changed \['model.layers.1.engram.key_norm'\]"):
        eg.export_merged(grafted(), tokenizer, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_a_non_empty_directory_is_refused_and_untouched(tmp_path: Path, grafted: Any, tokenizer: Any) -> None:
    (tmp_path / "mine").write_text("precious")
    with pytest.raises(UserError, match="not empty"):
        eg.export_merged(grafted(), tokenizer, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_case_27_a_quantized_base_is_refused(tmp_path: Path, grafted: Any, tokenizer: Any) -> None:
    class Quantizer:
        class quantization_config:
            quant_method = "bitsandbytes"

    model = grafted()
    model.hf_quantizer = Quantizer()
    with pytest.raises(UserError, match=r"quantized \(bitsandbytes\).*bfloat16"):
        eg.export_merged(model, tokenizer, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_lora_on_a_tied_embedding_is_refused(tmp_path: Path, tokenizer: Any) -> None:
    model = with_lora(tokenizer, targets=("q_proj", "embed_tokens"), tie_word_embeddings=True)
    with pytest.raises(UserError, match="embedding"):
        eg.export_merged(model, tokenizer, tmp_path / "merged")


# -- options


@pytest.mark.parametrize("seen_filter", [True, False])
@pytest.mark.parametrize("tables", ["sparse", "dense"])
def test_tables_sparse_or_dense_open_to_the_same_bits(
    tables: str, seen_filter: bool, tmp_path: Path, grafted: Any, tokenizer: Any, ids: Any
) -> None:
    model = grafted(seen_filter=seen_filter)
    keep_seen(model, torch.arange(0, 200, 3))
    report = eg.export_merged(model, tokenizer, tmp_path / "m", tables=tables)
    assert report["max_difference"] == 0
    here = model(ids).logits
    assert torch.equal(reopen(tmp_path / "m")(ids).logits, here)
    loaded, _ = eg.load_graft(tmp_path / "m")
    assert torch.equal(loaded(ids).logits, here)
    own, other = memory_tensors(model), memory_tensors(loaded)
    assert own.keys() == other.keys() and all(torch.equal(own[name], other[name]) for name in own)


def test_a_table_of_which_nothing_was_learned_exports(tmp_path: Path, grafted: Any, tokenizer: Any, ids: Any) -> None:
    for tables in ("sparse", "dense"):
        model = grafted(seen_filter=True)
        keep_seen(model)
        eg.export_merged(model, tokenizer, tmp_path / tables, tables=tables)
        assert torch.equal(reopen(tmp_path / tables)(ids).logits, model(ids).logits)


def test_dense_tables_take_the_room_of_every_row_and_sparse_ones_of_what_was_learned(
    tmp_path: Path, grafted: Any, tokenizer: Any
) -> None:
    model = grafted(seen_filter=True)
    keep_seen(model, torch.arange(10))
    sizes = {t: eg.export_merged(model, tokenizer, tmp_path / t, tables=t)["table_bytes"] for t in ("sparse", "dense")}
    rows, width = [len(memory.table.weight) for memory in memories(model)], 8
    assert sizes["sparse"] == 2 * 10 * (8 + 4 * width) and sizes["dense"] == sum(n * 4 * width + (n + 7) // 8 for n in rows)


@pytest.mark.parametrize("code", ["float32", "bfloat16", "float16", "float8"])
@pytest.mark.parametrize("tables", ["sparse", "dense"])
def test_tables_in_fewer_bits_are_rounded_once_and_the_report_says_what_it_costs(
    tables: str, code: str, tmp_path: Path, grafted: Any, tokenizer: Any, ids: Any
) -> None:
    model = grafted(seen_filter=True)
    questions = [("The river rises in", " the"), ("def", " area")]
    report = eg.export_merged(model, tokenizer, tmp_path / "m", tables=tables, table_dtype=code, questions=questions)
    assert (report["max_difference"] == 0) == (code == "float32") and report["kl"] < 0.1
    assert report["questions"] == 2 and {"recall_before", "recall_after", "same_answers"} <= report.keys()
    own, opened = memory_tensors(model), memory_tensors(eg.load_graft(tmp_path / "m")[0])
    for name in own:
        if name.endswith("table.values"):
            coded = encode(own[name], code)
            assert torch.equal(opened[name], decode(coded["values"], coded.get("scale"), torch.float32))
            assert torch.equal(opened[name], own[name]) == (code == "float32")
        else:
            assert torch.equal(opened[name], own[name]), name
    loaded, _ = eg.load_graft(tmp_path / "m")
    assert torch.equal(loaded(ids).logits, reopen(tmp_path / "m")(ids).logits)


def test_tables_without_float8_need_no_torch_that_has_its_scales(
    tmp_path: Path, grafted: Any, tokenizer: Any, ids: Any, monkeypatch: Any
) -> None:
    monkeypatch.delattr(torch, "float8_e8m0fnu")  # as torch 2.6 is
    model = grafted()
    for tables in ("sparse", "dense"):
        eg.export_merged(model, tokenizer, tmp_path / tables, tables=tables)
        assert torch.equal(reopen(tmp_path / tables)(ids).logits, model(ids).logits)
    with pytest.raises(UserError, match="float8 tables need torch 2.7"):
        eg.export_merged(model, tokenizer, tmp_path / "float8", table_dtype="float8")


def test_float8_is_within_a_sixteenth_and_keeps_what_it_can_say() -> None:
    values = torch.randn(50, 70) * torch.logspace(-6, 6, 50)[:, None]
    values[0], values[1, :32], values[2, 0], values[3, 32:64] = 0, 448, 448.001, 0
    coded = encode(values, "float8")
    assert coded["scale"].shape == (50, 3) and coded["scale"].dtype == torch.float8_e8m0fnu
    read = decode(coded["values"], coded["scale"], torch.float32)
    largest = torch.nn.functional.pad(values, (0, 26)).unflatten(1, (3, 32)).abs().amax(-1).repeat_interleave(32, 1)[:, :70]
    # 3 bits of mantissa; below 2**-6 of the scale steps are equal
    assert ((values - read).abs() <= values.abs() / 16 + largest * 2.0**-18).all() and read.isfinite().all()
    assert ((values - read).abs() > values.abs() / 64).any(), "control: it does round"
    assert coded["scale"].view(torch.uint8)[1, 0] == 127 and coded["values"].float().abs().max() == 448
    again = encode(read, "float8")
    assert torch.equal(decode(again["values"], again["scale"], torch.float32), read), "what was rounded once stays"


def test_case_26_the_base_is_merged_in_float32_and_cast_once_to_another_dtype(tmp_path: Path, tokenizer: Any) -> None:
    model = with_lora(tokenizer)
    report = eg.export_merged(model, tokenizer, tmp_path / "m", dtype="bfloat16")
    assert report["max_difference"] > 0 and "flips" in report
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    assert opened.dtype == torch.bfloat16
    wide = merged_state(model)
    assert all(torch.equal(tensor, wide[name].to(torch.bfloat16)) for name, tensor in opened.state_dict().items())
    assert reopen(tmp_path / "m").get_parameter("model.layers.1.engram.key_norm").dtype == torch.float32


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
@pytest.mark.parametrize("tied", [True, False])
def test_what_is_tied_is_written_once_in_every_dtype(tied: bool, dtype: str | None, tmp_path: Path, tokenizer: Any) -> None:
    eg.export_merged(with_lora(tokenizer, tie_word_embeddings=tied), tokenizer, tmp_path / "m", dtype=dtype)
    assert ("lm_head.weight" in load_file(tmp_path / "m" / "model.safetensors")) != tied


def test_several_adapters_are_chosen_from(tmp_path: Path, tokenizer: Any, ids: Any) -> None:
    model = with_lora(tokenizer)
    model.add_adapter("other", LoraConfig(r=2, target_modules=["q_proj"]))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B.other" in name:
                parameter.fill_(0.05)
    with pytest.raises(UserError, match="adapters default, other: say which to merge, adapter='default'"):
        eg.export_merged(model, tokenizer, tmp_path / "m")
    with pytest.raises(UserError, match="no LoRA adapter 'third'; the model has default, other"):
        eg.export_merged(model, tokenizer, tmp_path / "m", adapter="third")
    trainable = {name: p.requires_grad for name, p in model.named_parameters()}
    for adapter in ("default", "other"):
        eg.export_merged(model, tokenizer, tmp_path / adapter, adapter=adapter)
        assert list(model.active_adapters) == ["default"], "as before"
        assert {name: p.requires_grad for name, p in model.named_parameters()} == trainable
        model.set_adapter(adapter)
        assert (reopen(tmp_path / adapter)(ids).logits - model(ids).logits).abs().max() < 1e-4
        model.set_adapter("default")
    assert (reopen(tmp_path / "default")(ids).logits - reopen(tmp_path / "other")(ids).logits).abs().max() > 1e-3, "control"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"dtype": "float7"}, "dtype='float7': must be one of float32"),
        ({"tables": "full"}, "tables='full': must be one of sparse, dense"),
        ({"tables": None}, "tables=None: must be one of sparse, dense"),
        ({"max_shard_size": "1KiB"}, "max_shard_size='1KiB': must look like 500MB"),
        ({"max_shard_size": 5}, "max_shard_size=5: must look like 500MB"),
        ({"table_dtype": "int4"}, "table_dtype='int4': must be one of"),
        ({"adapter": "default"}, "no LoRA adapter 'default'; the model has none"),
    ],
)
def test_a_wrong_option_is_refused_before_anything_is_written(
    options: dict[str, Any], says: str, tmp_path: Path, grafted: Any, tokenizer: Any
) -> None:
    with pytest.raises(UserError, match=says):
        eg.export_merged(grafted(), tokenizer, tmp_path / "m", **options)
    assert not (tmp_path / "m").exists()


def test_an_export_of_an_export_is_the_same(tmp_path: Path, grafted: Any, tokenizer: Any, ids: Any) -> None:
    eg.export_merged(grafted(), tokenizer, tmp_path / "one")
    loaded, again = eg.load_graft(tmp_path / "one")
    eg.export_merged(loaded, again, tmp_path / "two")
    assert torch.equal(reopen(tmp_path / "two")(ids).logits, reopen(tmp_path / "one")(ids).logits)
    assert (tmp_path / "two" / "model.safetensors").read_bytes() == (tmp_path / "one" / "model.safetensors").read_bytes()


def test_another_tokenizer_or_a_resized_embedding_is_refused(tmp_path: Path, grafted: Any, tokenizer: Any) -> None:
    other = copy.deepcopy(tokenizer)
    other.add_tokens(["<|new|>"])
    with pytest.raises(UserError, match="reopens with 321 ids, it was given with 321 and the memory was trained with 320"):
        eg.export_merged(grafted(), other, tmp_path / "m")
    with pytest.raises(UserError, match="reopens with 321 ids, it was given with 320"):  # qwen2's own class adds a token
        eg.export_merged(grafted("qwen2"), tokenizer, tmp_path / "m")
    model = grafted()
    model.resize_token_embeddings(340)
    with pytest.raises(UserError, match="resized to 340 rows after the graft, which knows 328 ids"):
        eg.export_merged(model, tokenizer, tmp_path / "m")
    assert not (tmp_path / "m").exists()


def test_what_a_dtype_cannot_say_is_refused(tmp_path: Path, grafted: Any, tokenizer: Any) -> None:
    model = grafted(seen_filter=True)
    with torch.no_grad():
        model.model.layers[1].engram.table.weight[98] = 1e5
    for options in ({"table_dtype": "float16"}, {"table_dtype": "float16", "tables": "dense"}):
        with pytest.raises(UserError, match=r"float16 cannot say, up to 1e\+05"):
            eg.export_merged(model, tokenizer, tmp_path / "m", **options)
    eg.export_merged(model, tokenizer, tmp_path / "m", table_dtype="float8")
    with torch.no_grad():
        model.model.embed_tokens.weight[-1] = 1e6
    with pytest.raises(UserError, match=r"embed_tokens.weight reaches 1e\+06, more than torch.float16"):
        eg.export_merged(model, tokenizer, tmp_path / "other", dtype="float16")


def test_logits_that_are_no_numbers_are_no_agreement(tmp_path: Path, grafted: Any, tokenizer: Any) -> None:
    model = grafted()
    with torch.no_grad():
        model.model.norm.weight[0] = float("inf")
    with pytest.raises(PromiseError, match="not all numbers"):
        eg.export_merged(model, tokenizer, tmp_path / "m", dtype="bfloat16")
    assert not (tmp_path / "m").exists()


def test_a_base_that_transformers_does_not_save_is_a_clear_error(tmp_path: Path, grafted: Any, tokenizer: Any) -> None:
    model = grafted()
    model.generation_config.temperature = 0.3
    with pytest.raises(UserError, match="refuses to save this base: .*temperature"):
        eg.export_merged(model, tokenizer, tmp_path / "m")
    assert not (tmp_path / "m").exists()


# -- a graft directory from another directory


@pytest.mark.parametrize("lora", [False, True])
def test_graft_to_merged_to_graft_is_bit_equal(lora: bool, tmp_path: Path, grafted: Any, tokenizer: Any, ids: Any) -> None:
    tiny_model().save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    model = with_lora(tokenizer) if lora else grafted(seen_filter=True)
    unwrap(model).name_or_path = str(tmp_path / "base")
    keep_seen(model, torch.arange(0, 200, 3))
    eg.save_graft(model, tmp_path / "graft")
    for tables in ("sparse", "dense"):
        eg.export_merged(model, tokenizer, tmp_path / tables, tables=tables)
        repack(tmp_path / tables, tmp_path / f"{tables}-back")
        back = tmp_path / f"{tables}-back"
        assert (back / "engram.safetensors").read_bytes() == (tmp_path / "graft" / "engram.safetensors").read_bytes()
        assert read_description(back)["base"]["name"] == str(tmp_path / (tables if lora else "base"))
        loaded, _ = eg.load_graft(back)
        assert (loaded(ids).logits - model(ids).logits).abs().max() <= (1e-4 if lora else 0)


@pytest.mark.parametrize("code", [None, "bfloat16", "float8"])
def test_the_memory_alone_is_small_and_loads(code: str | None, tmp_path: Path, tokenizer: Any, ids: Any) -> None:
    tiny_model().save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    model = with_lora(tokenizer)
    unwrap(model).name_or_path = str(tmp_path / "base")
    eg.save_graft(model, tmp_path / "graft")
    report = repack(tmp_path / "graft", tmp_path / "pack", code)
    names = {path.name for path in (tmp_path / "pack").iterdir()}
    assert names == {"README.md", "adapter_config.json", "adapter_model.safetensors", "engram.safetensors", "engram_config.json"}
    loaded, _ = eg.load_graft(tmp_path / "pack")
    difference = (loaded(ids).logits - model(ids).logits).abs().max()
    assert (difference == 0) == (code is None) and difference < 1
    full = sum(t.nbytes for name, t in memory_tensors(model).items() if ".table." in name)
    assert report["table_bytes"] == full if code is None else report["table_bytes"] < 0.8 * full
    model.eval()
    eg.save_graft(loaded, tmp_path / "resaved")  # the coded values are what it now has
    assert (eg.load_graft(tmp_path / "resaved")[0](ids).logits == loaded(ids).logits).all()


def changed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """With one number of the memory another."""
    name = "layers.1.key_norm"
    return {**tensors, name: tensors[name] + 1}


def test_a_failed_repack_leaves_nothing(tmp_path: Path, grafted: Any, monkeypatch: Any) -> None:
    eg.save_graft(grafted(), tmp_path / "graft")
    with pytest.raises(UserError, match="table_dtype='int8'"):
        repack(tmp_path / "graft", tmp_path / "pack", "int8")
    with monkeypatch.context() as patched, pytest.raises(PromiseError, match="read back"):
        patched.setattr(repacking, "write_graft", lambda target, tensors, *rest: write_graft(target, changed(tensors), *rest))
        repack(tmp_path / "graft", tmp_path / "pack", "float8")
    assert not (tmp_path / "pack").exists()
    (tmp_path / "graft" / "engram.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match="corrupt"):
        repack(tmp_path / "graft", tmp_path / "pack")
    assert not (tmp_path / "pack").exists()


def test_an_export_named_as_an_alias_opens_by_a_relative_name(
    tmp_path: Path, grafted: Any, tokenizer: Any, ids: Any, monkeypatch: Any
) -> None:
    model = grafted()
    monkeypatch.chdir(tmp_path)
    eg.export_merged(model, tokenizer, "smollm2", dtype="bfloat16")
    loaded, _ = eg.load_graft("smollm2")
    assert torch.equal(loaded(ids).logits, reopen(tmp_path / "smollm2")(ids).logits)
    repack("smollm2", "back")
    monkeypatch.chdir("/")
    assert torch.equal(eg.load_graft(tmp_path / "back")[0](ids).logits, loaded(ids).logits)


def test_others_may_read_what_is_written_as_they_may_any_new_file(tmp_path: Path, grafted: Any, tokenizer: Any) -> None:
    model = grafted()
    eg.export_merged(model, tokenizer, tmp_path / "m")
    eg.save_graft(model, tmp_path / "graft")
    repack(tmp_path / "m", tmp_path / "back")
    (tmp_path / "new").write_text("")
    expected = (tmp_path / "new").stat().st_mode
    written = [path for name in ("m", "graft", "back") for path in (tmp_path / name).iterdir()]
    assert {path.stat().st_mode for path in written} == {expected} and len(written) > 12
