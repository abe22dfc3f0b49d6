"""Memories of the field: what is imported computes what the model it comes from computes, and what is written says the same."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import TINY_ENGRAM, randomize, tiny_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel
from typer.testing import CliRunner

import engram_graft as eg
from engram_graft.cli import app
from engram_graft.codes import GROUP
from engram_graft.compress import compress
from engram_graft.errors import UserError
from engram_graft.files import read_graft
from engram_graft.grafted import disable_graft, find_graft, memories
from engram_graft.layouts import import_memory, write_layout
from engram_graft.weights import INDEX
from engram_graft.window import Window

EOS, WIDTH, STREAMS = 1, 16, 2
pytestmark = pytest.mark.filterwarnings("ignore")

MakeQwen = Callable[..., PreTrainedModel]


def qwen(ple_layers: list[int], seed: int = 0) -> PreTrainedModel:
    """A tiny `qwen4_exp` with a memory in front of these layers (counted from 1), nothing of which is zero."""
    torch.manual_seed(seed)
    model = tiny_model(
        "qwen4_exp_text",
        hidden_size=WIDTH,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        moe_intermediate_size=8,
        shared_expert_intermediate_size=8,
        num_experts=2,
        num_experts_per_tok=1,
        layer_types=["linear_attention", "linear_attention", "indexed_attention"],
        hc_count=STREAMS,
        hc_lowrank=4,
        ple_layer_ids=ple_layers,
        ple_embed_dim=32,
        heads_per_ngram=2,
        ngram_vocab_size_base=50,
        split_ngram_parts=3,
        indexer_n_heads=1,
        indexer_kv_heads=1,
        indexer_head_dim=8,
        indexer_budget=64,
        indexer_compress_ratio=4,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0, "mrope_section": [2, 1, 1]},
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".ple." in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
    return model


def bare(model: PreTrainedModel) -> PreTrainedModel:
    """The same model without its memory."""
    base = qwen([])
    missing, unexpected = base.load_state_dict(model.state_dict(), strict=False)
    assert not missing and all(".ple." in name for name in unexpected)
    return base


@pytest.fixture
def native(tmp_path: Path) -> tuple[PreTrainedModel, Path]:
    """A `qwen4_exp` with a memory, and the directory it is saved in."""
    model = qwen([1, 2])
    model.save_pretrained(tmp_path / "native")
    return model, tmp_path / "native"


@pytest.fixture
def texts(ids: Tensor) -> Tensor:
    """Two rows of 24 ids with ends of text in them."""
    ids = ids.clone()
    ids[0, 4] = ids[1, 3] = ids[1, 8] = ids[1, 9] = EOS
    return ids


def logits(model: nn.Module, ids: Tensor, **arguments: Any) -> Tensor:
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False, **arguments).logits


def token_by_token(model: PreTrainedModel, ids: Tensor) -> Tensor:
    cache, parts = DynamicCache(config=model.config), []
    with torch.no_grad():
        for t in range(ids.shape[1]):
            parts.append(model(input_ids=ids[:, t : t + 1], cache=cache, use_cache=True).logits)
    return torch.cat(parts, 1)


def near(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-5, atol=1e-6)


def test_a_qwen4_exp_with_its_memory_imported_is_the_model_it_comes_from(
    native: tuple[PreTrainedModel, Path], tokenizer: Any, texts: Tensor
) -> None:
    model, directory = native
    base = bare(model)
    assert import_memory(directory, base, tokenizer) == "qwen4_exp"
    expected = logits(model, texts)
    assert near(logits(base, texts), expected)
    assert near(token_by_token(base, texts), expected)
    padded, mask = F.pad(texts, (3, 0)), F.pad(torch.ones_like(texts), (3, 0))
    assert near(logits(base, padded, attention_mask=mask)[:, 3:], logits(model, padded, attention_mask=mask)[:, 3:])
    assert torch.equal(
        *(m.generate(texts[:1], max_new_tokens=5, do_sample=False, attention_mask=mask[:1, 3:]) for m in (model, base))
    )
    with disable_graft(base):
        assert not near(logits(base, texts), expected), "control: without the memory it is another model"
    find_graft(base).resets = False
    assert not near(logits(base, texts), expected), "control: an end of text matters"


def test_rows_and_forward_are_those_of_transformers_own_layer(
    native: tuple[PreTrainedModel, Path], tokenizer: Any, texts: Tensor
) -> None:
    model, directory = native
    base = bare(model)
    import_memory(directory, base, tokenizer)
    rows = find_graft(base).plan.rows(texts.numpy())
    for index, ours in enumerate(memories(base)):
        theirs: Any = model.get_decoder().layers[index].ple
        asked: list[Tensor] = []
        theirs.ple_embedding.ngram_embedding.register_forward_pre_hook(lambda _, args, asked=asked: asked.append(args[0]))
        hidden = torch.randn(2, 24, STREAMS * WIDTH)
        with torch.no_grad():
            expected = theirs(hidden, texts, None)
            found, _ = ours(hidden, torch.from_numpy(rows[:, :, index]), Window(0, 24))
        assert np.array_equal(asked[0].numpy(), rows[:, :, index])
        assert near(found, expected)
        for name, parameter in ours.named_parameters():
            with torch.no_grad():
                before = parameter.clone()
                parameter.add_(0.1 * torch.randn(parameter.shape))
                other, _ = ours(hidden, torch.from_numpy(rows[:, :, index]), Window(0, 24))
                parameter.copy_(before)
            assert not near(other, expected), f"control: {name} matters"


def test_an_imported_memory_is_a_graft_directory_and_written_it_is_the_checkpoint_again(
    native: tuple[PreTrainedModel, Path], tokenizer: Any, texts: Tensor, tmp_path: Path
) -> None:
    model, directory = native
    base = bare(model)
    import_memory(directory, base, tokenizer)
    eg.save_graft(base, tmp_path / "graft")
    loaded, _ = eg.load_graft(tmp_path / "graft", bare(model), tokenizer)
    assert torch.equal(logits(loaded, texts), logits(base, texts))
    _, config, _, _ = read_graft(tmp_path / "graft")
    assert not config.seen_filter and not config.whole_ngrams and config.pad_id == EOS and config.gate_eps == 1e-6
    report = write_layout(tmp_path / "graft", "qwen4_exp", tmp_path / "written")
    assert report["layers"] == [0, 1] and not report["adapter"] and report["rounding"] < 1e-6
    # transformers opens what was written, beside the base's own tensors
    bare(model).save_pretrained(tmp_path / "opened")
    shutil.move(tmp_path / "opened" / "model.safetensors", tmp_path / "opened" / "base.safetensors")
    index = json.loads((tmp_path / "written" / INDEX).read_text())
    for file in set(index["weight_map"].values()):
        shutil.copy(tmp_path / "written" / file, tmp_path / "opened")
    index["weight_map"] |= dict.fromkeys(load_file(tmp_path / "opened" / "base.safetensors"), "base.safetensors")
    (tmp_path / "opened" / INDEX).write_text(json.dumps(index))
    merged = json.loads((tmp_path / "opened" / "config.json").read_text())
    merged |= json.loads((tmp_path / "written" / "config.json").read_text()) | {"number_of_conv_states": 3}
    (tmp_path / "opened" / "config.json").write_text(json.dumps(merged))
    opened, loading = AutoModelForCausalLM.from_pretrained(tmp_path / "opened", output_loading_info=True)
    assert not loading["missing_keys"] and not loading["unexpected_keys"]
    assert near(logits(opened.eval(), texts), logits(model, texts))


def trained(tokenizer: Any, path: Path, seed: int = 3, **changes: Any) -> tuple[PreTrainedModel, Path]:
    """A graft that qwen4_exp can say, as if trained: some rows looked up, everything random."""
    base = qwen([])
    fields = {
        "layer_ids": (0, 1),
        "engram_vocab_size": (53, 53),
        "n_embed_per_ngram": 16,
        "n_head_per_ngram": 2,
        "hc_mult": STREAMS,
        "addresses": "qwen4_exp",
        "whole_ngrams": False,
        "seen_filter": False,
        "gate_eps": 1e-6,
        "conv_eps": 1e-6,
    }
    eg.graft(base, tokenizer, eg.EngramConfig(**{**fields, **changes}))
    randomize(base, seed)
    with torch.no_grad():
        for memory in memories(base):
            for gain in (memory.key_norm, memory.query_norm, memory.short_conv.norm):
                gain.copy_(0.5 + 1.5 * torch.rand(gain.shape))
            kept = torch.arange(0, len(memory.table.weight), 3)
            memory.table.load_rows(kept, memory.table.weight.detach()[kept])
    eg.save_graft(base, path)
    return base, path


def test_a_memory_trained_in_the_layout_of_qwen4_exp_comes_back_bit_for_bit(
    tokenizer: Any, texts: Tensor, tmp_path: Path
) -> None:
    model, directory = trained(tokenizer, tmp_path / "graft")
    assert find_graft(model).plan.pad == EOS, "the base's end of text"
    report = write_layout(directory, "qwen4_exp", tmp_path / "written")
    assert report["rounding"] == 0 and report["rows"] == sum(find_graft(model).plan.table_rows)
    base = qwen([])
    import_memory(tmp_path / "written", base, tokenizer)
    assert torch.equal(logits(base, texts), logits(model, texts))
    for one, other in zip(memories(base), memories(model), strict=True):
        for name, parameter in one.named_parameters():
            if name != "table.weight":
                assert torch.equal(parameter, other.get_parameter(name)), name
        every = torch.arange(len(one.table.weight))
        assert torch.equal(one.table.read(every), other.table.read(every)) and one.table.count_seen() == len(every)
    assert one.table.count_seen() > other.table.count_seen(), "control: the graft had rows that nobody looked up"


def test_an_export_saved_again_is_written_as_its_graft_is_and_no_option_of_its_import_is_ignored(
    tokenizer: Any, tmp_path: Path
) -> None:
    model, directory = trained(tokenizer, tmp_path / "graft")
    eg.export_merged(model, tokenizer, tmp_path / "m")
    reopened = AutoModelForCausalLM.from_pretrained(tmp_path / "m", trust_remote_code=True)
    reopened.save_pretrained(tmp_path / "again")
    for source, target in ((directory, "one"), (tmp_path / "again", "two")):
        write_layout(source, "qwen4_exp", tmp_path / target)
    names = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert all((tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes() for name in names)
    command = ["import", str(tmp_path / "m"), "--output", str(tmp_path / "out"), "--dtype", "bfloat16", "--table-dir", "t"]
    assert "leave out --dtype, --table-dir" in str(CliRunner().invoke(app, command).exception)
    assert not (tmp_path / "out").exists()


def test_a_gain_that_its_difference_from_one_cannot_say_is_measured(tokenizer: Any, tmp_path: Path) -> None:
    model, _ = trained(tokenizer, tmp_path / "graft")
    with torch.no_grad():
        memories(model)[0].key_norm.fill_(0.1)
    eg.save_graft(model, tmp_path / "again")
    assert 0 < write_layout(tmp_path / "again", "qwen4_exp", tmp_path / "written")["rounding"] < 1e-7


def test_layers_of_the_base_can_be_chosen_and_keep_their_addresses(native: tuple[PreTrainedModel, Path], tokenizer: Any) -> None:
    model, directory = native
    base, moved = bare(model), bare(model)
    import_memory(directory, base, tokenizer)
    import_memory(directory, moved, tokenizer, layers=[2, 1])
    assert find_graft(moved).config.layer_ids == (2, 1)
    assert np.array_equal(find_graft(moved).plan.multipliers, find_graft(base).plan.multipliers)
    assert torch.equal(memories(moved)[0].table.weight, memories(base)[0].table.weight)


# DeepSeek-V4.1

HEADS, DIM, ORDERS = 2, 32, 3


def deepseek_base(streams: int = STREAMS) -> PreTrainedModel:
    return tiny_model(
        "deepseek_v4",
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        qk_rope_head_dim=8,
        q_lora_rank=16,
        o_lora_rank=8,
        o_groups=1,
        moe_intermediate_size=16,
        n_routed_experts=2,
        num_experts_per_tok=1,
        n_shared_experts=1,
        hc_mult=streams,
        sliding_window=16,
        index_n_heads=2,
        index_head_dim=16,
        index_topk=8,
    )


def deepseek_checkpoint(tokenizer: Any, path: Path, fp8: bool = True, **changes: Any) -> dict[str, Tensor]:
    """A checkpoint of random codes and scales in `path`; returns its tensors."""
    text = {
        "hidden_size": 32,
        "hc_mult": STREAMS,
        "rms_norm_eps": 1e-6,
        "engram_layer_ids": [1, 2],
        "engram_max_ngram_size": ORDERS + 1,
        "engram_vocab_size": 60,
        "engram_n_heads": HEADS,
        "engram_head_dim": DIM,
        "engram_pad_id": 0,
        "engram_compressed_vocab_size": compress(tokenizer).size,
        **changes,
    }
    generator = torch.Generator().manual_seed(4)
    embed, tensors = ORDERS * HEADS * DIM, {"embed.weight": torch.ones(4)}
    for layer, rows in ((1, 61 + 67 + 71 + 73 + 79 + 83), (2, 89 + 97 + 101 + 103 + 107 + 109 + 3)):  # three rows of padding
        prefix = f"layers.{layer}.engram."
        codes = torch.randint(0, 256, (rows, DIM), generator=generator, dtype=torch.uint8)
        codes[codes & 0x7F == 0x7F] = 0  # not a number
        tensors[f"{prefix}embed.weight"] = codes.view(torch.float8_e4m3fn)
        scales = torch.randint(115, 122, (rows, DIM // GROUP), generator=generator, dtype=torch.uint8)
        tensors[f"{prefix}embed.scale"] = scales.view(torch.float8_e8m0fnu)
        wkv = torch.randn((STREAMS + 1) * 32, embed, generator=generator)
        tensors[f"{prefix}wkv.weight"] = wkv.to(torch.float8_e4m3fn) if fp8 else wkv
        if fp8:
            blocks = torch.randint(120, 125, (len(wkv) // GROUP, embed // GROUP), generator=generator, dtype=torch.uint8)
            tensors[f"{prefix}wkv.scale"] = blocks.view(torch.float8_e8m0fnu)
        for name in ("q_weight", "k_weight"):
            tensors[f"{prefix}{name}"] = torch.randn(STREAMS, 32, generator=generator).to(torch.bfloat16)
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"model_type": "deepseek_v41", "text_config": text}))
    save_file(tensors, path / "model.safetensors")
    return tensors


def reference(tensors: dict[str, Tensor], layer: int, hidden: Tensor, rows: Tensor) -> Tensor:
    """What a layer adds to `hidden` `[B, T, streams, D]`, written down from the description of the format."""
    of = {name.rpartition("engram.")[2]: tensor for name, tensor in tensors.items() if name.startswith(f"layers.{layer}.")}
    table = of["embed.weight"].float() * of["embed.scale"].float().repeat_interleave(32, 1)
    wkv = of["wkv.weight"].float() * of["wkv.scale"].float().repeat_interleave(32, 0).repeat_interleave(32, 1)
    projected = table[rows].flatten(2) @ wkv.T
    value = projected[..., STREAMS * 32 :]
    out = []
    for g in range(STREAMS):
        key, query = projected[..., g * 32 : (g + 1) * 32], hidden[:, :, g]
        gain = of["q_weight"][g].float() * of["k_weight"][g].float()
        norms = [(x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() for x in (key, query)]
        score = (key * query * gain).sum(-1, keepdim=True) * norms[0] * norms[1] / 32**0.5
        out.append(torch.sigmoid(score.abs().clamp_min(1e-6).sqrt() * score.sign()) * value)
    return torch.stack(out, 2)


def test_a_memory_of_deepseek_v41_is_read_exactly_and_computes_what_its_format_says(
    tokenizer: Any, ids: Tensor, tmp_path: Path
) -> None:
    tensors = deepseek_checkpoint(tokenizer, tmp_path / "checkpoint")
    base = deepseek_base()
    assert import_memory(tmp_path / "checkpoint", base, tokenizer) == "deepseek_v41"
    plan = find_graft(base).plan
    assert plan.primes.tolist() == [[61, 67, 71, 73, 79, 83], [89, 97, 101, 103, 107, 109]]
    token_map = compress(tokenizer)
    draws = np.random.default_rng(10007 * 2).integers(0, (2**63 - 1) // token_map.size // 2, 4)
    assert plan.multipliers[1].tolist() == (draws * 2 + 1).tolist() and plan.pad == token_map.lookup[0]
    rows = torch.from_numpy(plan.rows(ids.numpy()))
    hidden = torch.randn(2, 24, STREAMS, 32)
    for index, (layer, memory) in enumerate(zip((1, 2), memories(base), strict=True)):
        codes, scales = (tensors[f"layers.{layer}.engram.embed.{leaf}"] for leaf in ("weight", "scale"))
        exact = codes.double().unflatten(1, (-1, 32)) * 2.0 ** (scales.view(torch.uint8).double() - 127)[..., None]
        assert torch.equal(memory.table.weight.double(), exact.flatten(1)[: plan.table_rows[index]])
        with torch.no_grad():
            found, _ = memory(hidden, rows[:, :, index], Window(0, 24))
        expected = reference(tensors, layer, hidden, rows[:, :, index])
        assert torch.allclose(found, expected, rtol=1e-4, atol=1e-5)
        assert not torch.allclose(found, reference(tensors, 3 - layer, hidden, rows[:, :, 0]), rtol=1e-4, atol=1e-5), "control"
    assert not torch.equal(logits(base, ids), logits(deepseek_base(), ids))


def test_a_memory_of_deepseek_v41_is_written_as_it_was_read(tokenizer: Any, ids: Tensor, tmp_path: Path) -> None:
    tensors = deepseek_checkpoint(tokenizer, tmp_path / "checkpoint")
    base = deepseek_base()
    import_memory(tmp_path / "checkpoint", base, tokenizer)
    eg.save_graft(base, tmp_path / "graft")
    report = write_layout(tmp_path / "graft", "deepseek_v41", tmp_path / "written")
    assert report["rounding"] == 0 and report["bytes"] == sum(p.stat().st_size for p in (tmp_path / "written").iterdir())
    again = deepseek_base()
    import_memory(tmp_path / "written", again, tokenizer)
    assert torch.equal(logits(again, ids), logits(base, ids))
    index = json.loads((tmp_path / "written" / INDEX).read_text())["weight_map"]
    leaves = ("embed.weight", "embed.scale", "wkv.weight", "q_weight", "k_weight")
    assert sorted(index) == sorted(f"layers.{layer}.engram.{leaf}" for layer in (1, 2) for leaf in leaves)
    assert index.keys() == tensors.keys() - {"embed.weight", *(f"layers.{layer}.engram.wkv.scale" for layer in (1, 2))}
    with pytest.raises(UserError, match="not empty"):
        write_layout(tmp_path / "graft", "deepseek_v41", tmp_path / "written")


# Refusals


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(UserError) as error:
        call()
    return str(error.value)


def test_a_memory_that_does_not_fit_is_refused_with_every_reason_and_leaves_the_base_bare(
    native: tuple[PreTrainedModel, Path], tokenizer: Any, ids: Tensor
) -> None:
    llama = tiny_model()
    before = logits(llama, ids)
    message = refusal(lambda: import_memory(native[1], llama, tokenizer, layers=[1, 9, 3]))
    for part in (
        "16 channels, the base's 32",
        "2 residual streams, the base 1",
        "[1, 9, 3] are 3, it has 2",
        "layers [9]",
        "0 to 3",
    ):
        assert part in message, part
    assert torch.equal(logits(llama, ids), before) and not any("engram" in name for name, _ in llama.named_modules())


def test_another_vocabulary_is_refused_with_both_numbers(
    native: tuple[PreTrainedModel, Path], tokenizer: Any, tmp_path: Path
) -> None:
    size = compress(tokenizer).size
    deepseek_checkpoint(tokenizer, tmp_path / "checkpoint", engram_compressed_vocab_size=size + 5, engram_pad_id=900)
    message = refusal(lambda: import_memory(tmp_path / "checkpoint", deepseek_base(), tokenizer))
    assert f"{size} ids compressed, the memory's {size + 5}" in message and "the id 900" in message
    model, directory = native
    config = json.loads((directory / "config.json").read_text()) | {"vocab_size": 300}
    (directory / "config.json").write_text(json.dumps(config))
    assert "has 320 ids, the memory knows 300" in refusal(lambda: import_memory(directory, bare(model), tokenizer))


def test_a_tokenizer_beside_the_checkpoint_has_to_be_the_bases(native: tuple[PreTrainedModel, Path], tokenizer: Any) -> None:
    model, directory = native
    tokenizer.save_pretrained(directory)
    import_memory(directory, bare(model), tokenizer)
    path = directory / "tokenizer.json"
    names = json.loads(path.read_text())
    vocabulary = names["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    path.write_text(json.dumps(names))
    assert "of 320 token ids that both have, 2 are other" in refusal(lambda: import_memory(directory, bare(model), tokenizer))


def damaged(directory: Path, change: Callable[[dict[str, Tensor]], object]) -> Path:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")
    return directory


PLE = "model.layers.0.ple."


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (
            lambda t: (t.pop(f"{PLE}key_proj.weight"), t.pop(f"{PLE}norm_conv.weight")),
            ["key_proj.weight is missing", "norm_conv"],
        ),
        (lambda t: t.update({f"{PLE}conv1d.weight": torch.zeros(32, 1, 3)}), ["conv1d.weight is [32, 1, 3]", "[32, 1, 4]"]),
        (lambda t: t.pop(f"{PLE}ple_embedding.ngram_embedding.shard_1.weight"), ["not 0 to 1", "shard_2"]),
        (lambda t: t.pop(f"{PLE}ple_embedding.ngram_embedding.shard_2.weight"), ["172 rows, its primes add up to 240"]),
        (lambda t: t[f"{PLE}ple_embedding.ngram_heads_offsets"].add_(1), ["running sums"]),
        (lambda t: t[f"{PLE}ple_embedding.ngram_heads_vocab_sizes"].zero_(), ["moduli go from 0"]),
        (lambda t: t.update({f"{PLE}value_proj.weight": torch.zeros(16, 32, dtype=torch.int8)}), ["is I8", "F32 or BF16"]),
        (lambda t: t[f"{PLE}ple_embedding.ngram_embedding.shard_0.weight"].fill_(torch.nan), ["not finite"]),
        (lambda t: t.update({f"{PLE}ple_embedding.ngram_embedding.shard_0.weight": torch.tensor(1.0)}), ["is [], its config"]),
        (lambda t: t[f"{PLE}key_proj.weight"].fill_(torch.inf), ["key_proj.weight is not finite"]),
        (lambda t: [t.pop(name) for name in list(t) if "layers.1.ple" in name], ["front of layers [0, 1]", "[0]"]),
    ],
)
def test_a_damaged_checkpoint_is_refused_and_the_message_names_what_is_wrong(
    native: tuple[PreTrainedModel, Path], tokenizer: Any, change: Any, parts: list[str]
) -> None:
    model, directory = native
    base = bare(model)
    message = refusal(lambda: import_memory(damaged(directory, change), base, tokenizer))
    for part in parts:
        assert part in message
    assert not any("engram" in name for name, _ in base.named_modules())


def test_an_index_is_read_but_not_out_of_the_directory_and_other_shards_need_not_be_there(
    native: tuple[PreTrainedModel, Path], tokenizer: Any
) -> None:
    model, directory = native
    tensors = load_file(directory / "model.safetensors")
    names = {name: "a.safetensors" if ".ple." in name else "b.safetensors" for name in tensors}
    save_file({name: tensors[name] for name in tensors if ".ple." in name}, directory / "a.safetensors")
    (directory / "model.safetensors").unlink()
    (directory / INDEX).write_text(json.dumps({"weight_map": names}))
    import_memory(directory, bare(model), tokenizer)
    for outside in ("../native/a.safetensors", "/tmp/a.safetensors", "..", "x\\a.safetensors"):
        (directory / INDEX).write_text(json.dumps({"weight_map": names | {f"{PLE}key_proj.weight": outside}}))
        assert "leaves the directory" in refusal(lambda: import_memory(directory, bare(model), tokenizer)), outside
    (directory / INDEX).write_text(json.dumps({"weight_map": names | {f"{PLE}key_proj.weight": "b.safetensors"}}))
    assert "b.safetensors: missing" in refusal(lambda: import_memory(directory, bare(model), tokenizer))
    (directory / INDEX).write_text(json.dumps({"weight_map": names | {f"{PLE}norm_key.weightx": "a.safetensors"}}))
    (directory / "a.safetensors").write_bytes((directory / "a.safetensors").read_bytes()[:-9])
    assert "corrupt or truncated" in refusal(lambda: import_memory(directory, bare(model), tokenizer))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("ngram_size", 10**9),
        ("ngram_size", 1),
        ("heads_per_ngram", 10**9),
        ("heads_per_ngram", True),
        ("vocab_size", 0),
        ("ple_layer_ids", [0]),
        ("ple_layer_ids", "1"),
        ("eos_token_id", None),
        ("eos_token_id", [[1]]),
        ("rms_norm_eps", "x"),
        ("hidden_size", -16),
        ("ngram_vocab_size_base", 10**15),
        ("seed", -1),
        ("hc_count", 10**9),
        ("ple_conv_kernel_size", 10**12),
    ],
)
def test_a_config_that_says_nonsense_is_refused_at_once(
    native: tuple[PreTrainedModel, Path], tokenizer: Any, key: str, value: object
) -> None:
    model, directory = native
    config = json.loads((directory / "config.json").read_text()) | {key: value}
    (directory / "config.json").write_text(json.dumps(config))
    assert refusal(lambda: import_memory(directory, bare(model), tokenizer))


def test_what_is_no_memory_is_refused_with_what_is_known(model: PreTrainedModel, tokenizer: Any, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "llama")
    message = refusal(lambda: import_memory(tmp_path / "llama", model, tokenizer))
    assert "model_type 'llama'" in message and "qwen4_exp" in message and "deepseek_v41" in message
    (tmp_path / "llama" / "config.json").write_text('{"ple_layer_ids": [1]}')
    assert "hidden_size=None" in refusal(lambda: import_memory(tmp_path / "llama", model, tokenizer))


def test_a_memory_that_a_layout_cannot_say_is_refused_with_every_reason(
    model: PreTrainedModel, tokenizer: Any, tmp_path: Path
) -> None:
    config = eg.EngramConfig(**{**TINY_ENGRAM, "bias": True, "gate": "sigmoid", "seen_filter": True, "seed": 5})
    eg.save_graft(eg.graft(model, tokenizer, config), tmp_path / "graft")
    for layout, own in (
        ("qwen4_exp", ["addresses='engram'", "hc_mult=1", "gate_eps=1.19"]),
        ("deepseek_v41", ["conv=True", "seed=5", "engram_vocab_size=[53, 61]", "8 channels"]),
    ):
        message = refusal(lambda layout=layout: write_layout(tmp_path / "graft", layout, tmp_path / "out"))
        for part in ["gate='sigmoid'", "bias=True", "whole_ngrams=True", "seen_filter=True", *own]:
            assert part in message, (layout, part)
        assert not (tmp_path / "out").exists()
    assert "must be one of qwen4_exp" in refusal(lambda: write_layout(tmp_path / "graft", "llama", tmp_path / "out"))


def test_a_memory_in_front_of_other_layers_than_its_addresses_say_is_not_written_as_if_it_were(
    tokenizer: Any, tmp_path: Path
) -> None:
    deepseek_checkpoint(tokenizer, tmp_path / "checkpoint", fp8=False)
    base = deepseek_base()
    import_memory(tmp_path / "checkpoint", base, tokenizer, layers=[0, 1])
    eg.save_graft(base, tmp_path / "graft")
    message = refusal(lambda: write_layout(tmp_path / "graft", "deepseek_v41", tmp_path / "out"))
    assert "its multipliers are not those drawn for layers [0, 1]" in message and "primes" not in message


def test_addresses_of_qwen4_exp_need_an_end_of_text(tokenizer: Any) -> None:
    base, config = (
        qwen([]),
        eg.EngramConfig(**{**TINY_ENGRAM, "addresses": "qwen4_exp", "engram_vocab_size": (53, 53), "hc_mult": 2}),
    )
    base.config.eos_token_id, before = None, tokenizer.eos_token
    tokenizer.eos_token = None
    try:
        assert "end of text" in refusal(lambda: eg.graft(base, tokenizer, config))
    finally:
        tokenizer.eos_token = before
    eg.graft(base, tokenizer, config)
    assert find_graft(base).plan.pad == EOS


def test_the_command_makes_a_graft_directory_or_nothing(
    native: tuple[PreTrainedModel, Path], tokenizer: Any, texts: Tensor, tmp_path: Path
) -> None:
    model, directory = native
    bare(model).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    out, command = tmp_path / "out", ["import", str(directory), "--output", str(tmp_path / "out")]
    result = CliRunner().invoke(app, [*command, "--base", str(tmp_path / "base"), "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["layers"] == [0, 1] and json.loads(result.stdout)["layout"] == "qwen4_exp"
    loaded, _ = eg.load_graft(out)
    assert near(logits(loaded, texts), logits(model, texts))
    shutil.rmtree(out)
    for options, part in (([], "--base"), (["--base", str(tmp_path / "base"), "--layers", "0"], "are 1, it has 2")):
        failed = CliRunner().invoke(app, [*command, *options])
        assert part in str(failed.exception) and not out.exists()
    assert "no such directory" in str(CliRunner().invoke(app, ["import", "nowhere", "--output", str(out)]).exception)


def test_tables_in_files_give_the_same_memory(
    native: tuple[PreTrainedModel, Path], tokenizer: Any, texts: Tensor, tmp_path: Path
) -> None:
    model, directory = native
    resident, mapped = bare(model), bare(model)
    import_memory(directory, resident, tokenizer)
    import_memory(directory, mapped, tokenizer, table_dir=tmp_path / "tables")
    assert torch.equal(logits(mapped, texts), logits(resident, texts))
    assert (tmp_path / "tables").is_dir()
