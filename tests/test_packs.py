"""Memory packs: side by side they add up, each is what it is alone, and when they are gone nothing of them is left."""

import copy
import gc
import json
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TINY_ENGRAM, randomize, tiny_model
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import DynamicCache

import engram_graft as eg
from engram_graft.adapter_config import STARTS
from engram_graft.adapters import active_adapters, adapter_configs, require_addable
from engram_graft.errors import UserError
from engram_graft.files import CONFIG_FILE, TENSOR_FILE, memory_tensors
from engram_graft.grafted import disable_lora, explicit_ids, find_graft, grafts, memories
from engram_graft.params import adapter_names

Make = Callable[..., Path]
LORA = {"r": 2, "target_modules": ["q_proj"]}
SETTINGS: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


@pytest.fixture
def pack(tmp_path: Path, tokenizer: Any) -> Make:
    """Makes a graft directory on one tiny base: `pack("a", seed=1, lora=LORA, layer_ids=(0, 1))`; the memory is random everywhere."""

    def make(name: str, seed: int, lora: dict[str, Any] | None = None, architecture: str = "llama", **changes: Any) -> Path:
        model: Any = tiny_model(architecture)
        if not (tmp_path / "base").exists():
            model.save_pretrained(tmp_path / "base")
            tokenizer.save_pretrained(tmp_path / "base")
        model.name_or_path = str(tmp_path / "base")
        if lora is not None:
            model = get_peft_model(model, LoraConfig(**lora))
            stir(model, seed)
        eg.graft(model, tokenizer, eg.EngramConfig(**{**TINY_ENGRAM, "seed": seed, **changes}))
        randomize(model, seed)
        eg.save_graft(model, tmp_path / name)
        return tmp_path / name

    return make


@pytest.fixture
def two(pack: Make) -> dict[str, Path]:
    """Two packs with LoRA; layer 1 is a's alone, layer 2 is both's, layer 3 is b's alone; their n-grams and kernels differ."""
    second = {"layer_ids": (2, 3), "max_ngram_size": 2, "engram_vocab_size": (67,), "kernel_size": 3}
    return {
        "a": pack("a", 1, LORA),
        "b": pack("b", 2, {"r": 3, "target_modules": ["q_proj", "v_proj"]}, **second),
    }


def stir(model: nn.Module, seed: int) -> None:
    """Give every adapter values that matter."""
    generator = torch.Generator().manual_seed(seed)
    adapters = adapter_names(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in adapters:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)


@torch.no_grad()
def logits(model: Any, ids: Tensor, **kwargs: Any) -> Tensor:
    return model(input_ids=ids, **kwargs).logits


@torch.no_grad()
def in_chunks(model: Any, ids: Tensor, size: int, cache: DynamicCache | None = None) -> Tensor:
    cache = DynamicCache() if cache is None else cache
    return torch.cat([model(input_ids=part, past_key_values=cache, use_cache=True).logits for part in ids.split(size, 1)], 1)


def traces(model: nn.Module) -> dict[str, Any]:
    """All that a pack could leave behind: classes, attributes, hooks, names, what is trainable."""
    found: dict[str, Any] = {}
    for path, module in model.named_modules():
        inside = vars(module)
        hooks = {name: len(held) for name, held in inside.items() if "hooks" in name and isinstance(held, dict)}
        children = list(module._modules), list(module._parameters), list(module._buffers)
        found[path] = (type(module), set(inside), hooks, children)
    found["trainable"] = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    found["config"] = model.config.to_dict()  # type: ignore[operator, union-attr]
    return found


def same_bits(one: nn.Module, other: nn.Module) -> bool:
    mine, its = one.state_dict(), other.state_dict()
    return list(mine) == list(its) and all(torch.equal(mine[name], its[name]) for name in mine)


# -- A, B, A+B, neither


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("lora", [True, False])
def test_a_then_b_then_both_then_neither_and_the_base_is_bit_equal(
    dtype: str, lora: bool, pack: Make, ids: Tensor, tokenizer: Any
) -> None:
    from engram_graft.bases import load_base

    packs = {"a": pack("a", 1, LORA if lora else None), "b": pack("b", 2, LORA if lora else None, layer_ids=(2, 3))}
    base: Any = load_base(str(packs["a"].parent / "base"), dtype)[0]
    base.get_input_embeddings().weight.requires_grad_(False)
    pristine = copy.deepcopy(base)
    expected, before = logits(pristine, ids), traces(base)
    alone = {name: logits(eg.load_graft(path, dtype=dtype)[0], ids) for name, path in packs.items()}

    model: Any = eg.load_graft(packs, base=base, tokenizer=tokenizer)[0]
    both = logits(model, ids)
    for name in packs:
        with eg.use_packs(model, [name]):
            assert torch.equal(logits(model, ids), alone[name])
    with eg.use_packs(model, []):
        assert torch.equal(logits(model, ids), expected)
    with eg.disable_graft(model, lora=True):
        assert torch.equal(logits(model, ids), expected)
    assert torch.equal(logits(model, ids), both)
    assert len({tensor.numpy(force=True).tobytes() for tensor in map(Tensor.float, (both, expected, *alone.values()))}) == 4

    model = eg.remove_pack(model, "b")
    assert torch.equal(logits(model, ids), alone["a"])
    model = eg.remove_pack(model, "a")
    assert model is base and traces(model) == before
    assert same_bits(model, pristine) and torch.equal(logits(model, ids), expected)


def test_control_a_trace_is_noticed(model: nn.Module, tokenizer: Any, config: Any) -> None:
    before = traces(model)
    eg.graft(model, tokenizer, config)
    assert traces(model) != before
    eg.ungraft(model)
    assert traces(model) == before
    model.model.layers[1].forgotten = 1
    assert traces(model) != before


def test_a_removed_pack_leaves_the_other_as_if_it_had_been_alone(two: dict[str, Path], ids: Tensor) -> None:
    for gone, kept in (("a", "b"), ("b", "a")):
        model: Any = eg.remove_pack(eg.load_graft(two)[0], gone)
        alone: Any = eg.load_graft({kept: two[kept]})[0]
        assert traces(model) == traces(alone) and same_bits(model, alone)
        assert torch.equal(logits(model, ids), logits(alone, ids))
        assert active_adapters(model) == [kept] and model.active_adapters == [kept] and model.active_adapter == kept


# -- the sum


@pytest.mark.parametrize("architecture", ["llama", "falcon"])
def test_at_a_layer_a_and_b_are_the_stream_and_both_addends(architecture: str, pack: Make, ids: Tensor) -> None:
    packs = {"a": pack("a", 1, architecture=architecture), "b": pack("b", 2, architecture=architecture, layer_ids=(2,))}
    model: Any = eg.load_graft(packs)[0]
    streams: list[Tensor] = []
    addends: dict[str, Tensor] = {}
    layer = memories(model, "b")[0]
    owner = next(module for module in model.modules() if layer in module.children())
    inside = next(module for module in owner.modules() if "norm" in type(module).__name__.lower())
    inside.register_forward_pre_hook(lambda module, args: streams.append(args[0]))
    for name, memory in (("a", memories(model, "a")[1]), ("b", layer)):
        memory.register_forward_hook(lambda module, args, out, name=name: addends.update({name: out[0], f"{name} of": args[0]}))
    logits(model, ids)
    assert torch.equal(addends["a of"], addends["b of"]), "both read the same stream"
    assert torch.equal(streams[0], addends["a of"] + addends["a"] + addends["b"])
    assert not torch.equal(streams[0], addends["a of"] + addends["a"]), "control: the second addend matters"


def test_the_order_of_loading_is_of_no_account_to_the_last_bit(two: dict[str, Path], ids: Tensor) -> None:
    one, other = eg.load_graft(two)[0], eg.load_graft(dict(reversed(two.items())))[0]
    assert [memory.name for memory in grafts(one)] == ["a", "b"] and [memory.name for memory in grafts(other)] == ["b", "a"]
    assert torch.equal(logits(one, ids), logits(other, ids))


def test_where_only_one_pack_has_a_layer_the_stream_before_the_others_is_as_with_it_alone(pack: Make, ids: Tensor) -> None:
    packs = {"a": pack("a", 1, layer_ids=(0,)), "b": pack("b", 2, layer_ids=(3,))}
    both: Any = eg.load_graft(packs)[0]
    alone: Any = eg.load_graft(packs["a"])[0]
    mine, its = (model(ids, output_hidden_states=True).hidden_states for model in (both, alone))
    assert all(torch.equal(*streams) for streams in zip(mine[:4], its[:4], strict=True))
    assert not torch.equal(mine[4], its[4])


def test_lora_of_two_packs_adds_up(two: dict[str, Path], ids: Tensor) -> None:
    model: Any = eg.load_graft(two)[0]
    projection = model.base_model.model.model.layers[0].self_attn.q_proj
    x = torch.randn(1, 3, 32, generator=torch.Generator().manual_seed(0))
    deltas = [projection.lora_B[n](projection.lora_A[n](x)) * projection.scaling[n] for n in ("a", "b")]
    expected = projection.base_layer(x) + deltas[0] + deltas[1]
    assert torch.equal(projection(x), expected)
    assert not torch.equal(expected, projection.base_layer(x) + deltas[0]), "control"
    with eg.use_packs(model, ["b"]):
        assert torch.equal(projection(x), projection.base_layer(x) + deltas[1])


def test_a_pack_with_lora_beside_one_without(pack: Make, ids: Tensor, tokenizer: Any) -> None:
    packs = {"a": pack("a", 1), "b": pack("b", 2, LORA)}
    for order in (packs, dict(reversed(packs.items()))):
        model: Any = eg.load_graft(order)[0]
        assert isinstance(model, PeftModel)
        for name, path in packs.items():
            with eg.use_packs(model, [name]):
                assert torch.equal(logits(model, ids), logits(eg.load_graft(path)[0], ids))
        model = eg.remove_pack(model, "b")
        assert not isinstance(model, PeftModel) and torch.equal(logits(model, ids), logits(eg.load_graft(packs["a"])[0], ids))


# -- loading


def test_a_list_is_named_after_its_directories_and_packs_can_be_loaded_one_by_one(
    two: dict[str, Path], ids: Tensor, tokenizer: Any
) -> None:
    together: Any = eg.load_graft([two["a"], str(two["b"])])[0]
    assert [memory.name for memory in grafts(together)] == ["a", "b"]
    first = eg.load_graft(two["a"], name="a")[0]
    second: Any = eg.load_graft(two["b"], base=first, tokenizer=tokenizer, name="b")[0]
    assert second is first and not second.training
    assert torch.equal(logits(second, ids), logits(together, ids))
    assert sorted(adapter_configs(second)) == ["a", "b"] == active_adapters(second)
    assert not any(parameter.requires_grad for parameter in second.parameters())


def test_trainable_is_a_matter_of_the_pack_that_is_loaded(two: dict[str, Path], tokenizer: Any) -> None:
    def trainable(model: nn.Module) -> set[str]:
        return {name for name, parameter in model.named_parameters() if parameter.requires_grad}

    first = eg.load_graft(two["a"], name="a", trainable=True)[0]
    before = trainable(first)
    assert any("lora_A.a" in name for name in before) and any("engram_pack_a" in name for name in before)
    assert trainable(eg.load_graft(two["b"], base=first, tokenizer=tokenizer, name="b")[0]) == before
    model = eg.remove_pack(first, "b")
    last = eg.load_graft(two["b"], base=model, tokenizer=tokenizer, name="b", trainable=True)[0]
    assert trainable(last) > before and not any(".b." not in n and "_pack_b" not in n for n in trainable(last) - before)


@pytest.mark.parametrize("name", ["", "a.b", "a b", "../a", "ä", "a/b", "a\n"])
def test_a_name_that_could_be_no_childs_is_refused(name: str, two: dict[str, Path]) -> None:
    with pytest.raises(UserError, match="letters, digits, _ and - only"):
        eg.load_graft({name: two["a"]})


@pytest.mark.parametrize("name", ["a", "lora", "A-1_b", "engram", "hash", "pack_x"])
def test_a_name_that_looks_like_a_part_changes_nothing(name: str, two: dict[str, Path], ids: Tensor) -> None:
    model: Any = eg.load_graft({name: two["a"], "zz": two["b"]})[0]
    assert torch.equal(logits(model, ids), logits(eg.load_graft(two)[0], ids))
    assert torch.equal(logits(eg.remove_pack(model, name), ids), logits(eg.load_graft(two["b"])[0], ids))


@pytest.mark.parametrize("name", ["weight", "self_attn", "q_proj", "modules", "training", "lora_A", "base_layer", "model"])
def test_a_name_that_peft_would_mix_up_with_a_modules_is_refused_where_there_is_lora(
    name: str, two: dict[str, Path], pack: Make, ids: Tensor
) -> None:
    base = tiny_model()
    with pytest.raises(UserError, match="is also the name of a part of the model"):
        eg.load_graft({name: two["a"]}, base=base, tokenizer=eg.load_graft(two["b"])[1])
    assert traces(base) == traces(tiny_model())
    plain = pack("plain", 4)
    assert torch.equal(logits(eg.load_graft({name: plain})[0], ids), logits(eg.load_graft(plain)[0], ids))


def test_names_that_cannot_be_are_refused_with_the_way_out(two: dict[str, Path], tmp_path: Path, tokenizer: Any) -> None:
    (tmp_path / "other").mkdir()
    two["b"].rename(tmp_path / "other" / "a")
    with pytest.raises(UserError, match=r"both named 'a': name them in a dict, \{'a': .*, 'another': "):
        eg.load_graft([two["a"], tmp_path / "other" / "a"])
    with pytest.raises(UserError, match="to name several, pass a dict"):
        eg.load_graft([two["a"]], name="x")
    with pytest.raises(UserError, match="no directory"):
        eg.load_graft([])
    model = eg.load_graft(two["a"], name="a")[0]
    with pytest.raises(UserError, match="has a memory 'a' already: give this one another name"):
        eg.load_graft(two["a"], base=model, tokenizer=tokenizer, name="a")
    with pytest.raises(UserError, match="load this graft with a name of its own"):
        eg.load_graft(two["a"], base=eg.load_graft(two["a"])[0], tokenizer=tokenizer)
    with pytest.raises(UserError, match="or what load_graft returned"):
        eg.load_graft(two["a"], base=get_peft_model(tiny_model(), LoraConfig(**LORA)), tokenizer=tokenizer)


def damage(directory: Path, kind: str) -> None:
    if kind == "tensors":
        tensors = load_file(directory / TENSOR_FILE)
        tensors.pop("layers.3.value_proj.weight")
        replace(directory, TENSOR_FILE, tensors)
    elif kind == "adapter misses a key":
        tensors = load_file(directory / "adapter_model.safetensors")
        tensors.pop(next(iter(tensors)))
        replace(directory, "adapter_model.safetensors", tensors)
    elif kind == "adapter of another shape":
        tensors = load_file(directory / "adapter_model.safetensors")
        replace(directory, "adapter_model.safetensors", {name: torch.cat([t, t], 1) for name, t in tensors.items()})
    elif kind == "adapter of layers there are none of":
        config = json.loads((directory / "adapter_config.json").read_text())
        (directory / "adapter_config.json").write_text(json.dumps({**config, "target_modules": ["embed_tokens", "mlp"]}))
        mend(directory, "adapter_config.json")
    elif kind == "base":
        described = json.loads((directory / CONFIG_FILE).read_text())
        described["base"]["fingerprint"]["hidden_size"] = 33
        (directory / CONFIG_FILE).write_text(json.dumps(described))
    else:
        (directory / TENSOR_FILE).write_bytes(b"")


def replace(directory: Path, name: str, tensors: dict[str, Tensor]) -> None:
    from safetensors.torch import save_file

    save_file(tensors, directory / name)
    mend(directory, name)


def mend(directory: Path, name: str) -> None:
    from engram_graft.files import file_hash

    described = json.loads((directory / CONFIG_FILE).read_text())
    described["files"][name] = file_hash(directory / name)
    (directory / CONFIG_FILE).write_text(json.dumps(described))


DAMAGES = [
    "tensors",
    "adapter misses a key",
    "adapter of another shape",
    "adapter of layers there are none of",
    "base",
    "corrupt",
]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", DAMAGES)
def test_a_second_pack_that_fails_leaves_the_model_with_the_first(
    kind: str, two: dict[str, Path], ids: Tensor, tokenizer: Any, pack: Make
) -> None:
    damage(two["b"], kind)
    for first in (two["a"], pack("plain", 4)):  # with LoRA and without
        model: Any = eg.load_graft(first, name="a", trainable=True)[0]
        before, expected, state = traces(model), logits(model, ids), copy.deepcopy(model)
        with pytest.raises(UserError):
            eg.load_graft(two["b"], base=model, tokenizer=tokenizer, name="b")
        assert traces(model) == before and same_bits(model, state) and torch.equal(logits(model, ids), expected)
        assert active_adapters(model) == active_adapters(state)
        if isinstance(model, PeftModel):
            assert (model.active_adapter, model.active_adapters, list(model.peft_config)) == ("a", ["a"], ["a"])


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", DAMAGES)
def test_a_list_that_fails_leaves_a_given_base_as_it_was(kind: str, two: dict[str, Path], tokenizer: Any) -> None:
    damage(two["b"], kind)
    base = tiny_model()
    before = traces(base)
    with pytest.raises(UserError):
        eg.load_graft(two, base=base, tokenizer=tokenizer)
    assert traces(base) == before and same_bits(base, tiny_model())


@pytest.mark.parametrize("options", [{"use_dora": True}, {"modules_to_save": ["lm_head"]}])
def test_adapters_that_do_not_add_up_are_refused_together_and_work_alone(
    options: dict[str, Any], pack: Make, ids: Tensor, tokenizer: Any
) -> None:
    a, b, plain = pack("a", 1, {**LORA, **options}), pack("b", 2, {**LORA, **options}), pack("c", 3)
    with pytest.raises(UserError, match="cannot be added: '[ab]' (is a DoRA|replaces whole modules)"):
        eg.load_graft([a, b])
    model: Any = eg.load_graft([a, plain])[0]
    with eg.use_packs(model, ["a"]):
        assert torch.equal(logits(model, ids), logits(eg.load_graft(a)[0], ids))
    with eg.use_packs(model, ["c"]):
        assert torch.equal(logits(model, ids), logits(eg.load_graft(plain)[0], ids))
    base = eg.remove_pack(eg.remove_pack(model, "a"), "c")
    assert traces(base)["trainable"] == traces(tiny_model())["trainable"] and same_bits(base, tiny_model())


def test_a_dora_is_no_addend_to_a_plain_lora_and_whole_modules_of_one_pack_are(pack: Make, ids: Tensor) -> None:
    plain, dora, head = (
        pack("a", 1, LORA),
        pack("d", 2, {**LORA, "use_dora": True}),
        pack("m", 3, {**LORA, "modules_to_save": ["lm_head"]}),
    )
    with pytest.raises(UserError, match="'d' is a DoRA, which scales the sum of all"):
        eg.load_graft([plain, dora])
    model: Any = eg.load_graft([plain, head])[0]
    for name, path in (("a", plain), ("m", head)):
        with eg.use_packs(model, [name]):
            assert torch.equal(logits(model, ids), logits(eg.load_graft(path)[0], ids))
    assert torch.equal(logits(eg.remove_pack(model, "m"), ids), logits(eg.load_graft(plain)[0], ids))


# -- switching


def test_use_packs_nests_comes_back_after_errors_and_never_thaws(two: dict[str, Path], ids: Tensor) -> None:
    model: Any = eg.load_graft(two)[0]
    both = logits(model, ids)
    alone = {name: logits(eg.load_graft(path)[0], ids) for name, path in two.items()}
    before = traces(model)
    with pytest.raises(KeyError), eg.use_packs(model, ["a"]):
        assert torch.equal(logits(model, ids), alone["a"])
        with eg.use_packs(model, ["b"]):
            assert torch.equal(logits(model, ids), alone["b"])
            with eg.disable_graft(model, lora=True):
                assert torch.equal(logits(model, ids), logits(tiny_model(), ids))
                with eg.use_packs(model, ["b", "a", "a"]):
                    assert torch.equal(logits(model, ids), both)
                    assert traces(model)["trainable"] == before["trainable"]
            assert torch.equal(logits(model, ids), alone["b"])
        with eg.use_packs(model, []):
            with disable_lora(model):
                pass
            assert torch.equal(logits(model, ids), logits(tiny_model(), ids)), "disable_lora leaves off what was off"
        assert torch.equal(logits(model, ids), alone["a"])
        raise KeyError
    assert torch.equal(logits(model, ids), both) and traces(model) == before
    assert active_adapters(model) == ["a", "b"] == model.active_adapters
    eg.trainable_parameters(eg.remove_pack(model, "a"))
    thawed = traces(model)["trainable"]
    with eg.use_packs(model, []), eg.use_packs(model, ["b"]):
        assert traces(model)["trainable"] == thawed
    assert traces(model)["trainable"] == thawed and any(thawed.values())


def test_blocks_that_end_in_another_order_leave_all_on(two: dict[str, Path], ids: Tensor) -> None:
    model: Any = eg.remove_pack(eg.load_graft({"a": two["a"], "b": two["b"], "c": two["a"]})[0], "c")
    one, other = eg.use_packs(model, ["a"]), eg.use_packs(model, ["b"])
    one.__enter__()
    other.__enter__()
    one.__exit__(None, None, None)
    other.__exit__(None, None, None)
    assert [memory.switched_off for memory in grafts(model)] == [0, 0]


def test_a_pack_there_is_none_of_and_a_merged_adapter_are_refused(two: dict[str, Path], ids: Tensor) -> None:
    model: Any = eg.load_graft(two)[0]
    for call in (lambda: eg.use_packs(model, ["c"]).__enter__(), lambda: eg.remove_pack(model, "c")):
        with pytest.raises(UserError, match="no memory 'c'; it carries a, b"):
            call()
    model.merge_adapter()
    for call in (lambda: eg.use_packs(model, ["a"]).__enter__(), lambda: eg.remove_pack(model, "a")):
        with pytest.raises(UserError, match="unmerge_adapter"):
            call()


def test_an_adapter_that_changed_the_bases_weights_is_not_taken_for_one_that_can_go(pack: Make, tokenizer: Any) -> None:
    model: Any = get_peft_model(tiny_model(), LoraConfig(**{**LORA, "init_lora_weights": "pissa"}))
    eg.graft(model, tokenizer, eg.EngramConfig(**TINY_ENGRAM))
    for call in (lambda: eg.use_packs(model, []).__enter__(), lambda: eg.remove_pack(model, "default")):
        with pytest.raises(UserError, match="'default' changes the base's weights .*: to be without it, load the base anew"):
            call()
    with pytest.raises(UserError, match="'default' changes the base's weights .*; load it alone"):
        require_addable({**adapter_configs(model), "b": LoraConfig(**LORA)})


@pytest.mark.parametrize("start", [name for name in STARTS if name is not True])
def test_an_adapter_that_starts_otherwise_but_leaves_the_base_can_go(start: Any, tokenizer: Any, ids: Tensor) -> None:
    model: Any = get_peft_model(tiny_model(), LoraConfig(**{**LORA, "init_lora_weights": start}))
    eg.graft(model, tokenizer, eg.EngramConfig(**TINY_ENGRAM))
    require_addable({**adapter_configs(model), "b": LoraConfig(**LORA)})
    assert torch.equal(logits(eg.remove_pack(model, "default"), ids), logits(tiny_model(), ids))


def test_removing_inside_of_a_block_works_too(two: dict[str, Path], ids: Tensor) -> None:
    model: Any = eg.load_graft(two)[0]
    with eg.use_packs(model, ["a"]):
        eg.remove_pack(model, "b")
    assert torch.equal(logits(model, ids), logits(eg.load_graft(two["a"])[0], ids))
    with eg.use_packs(model, []):
        base = eg.remove_pack(model, "a")
    assert torch.equal(logits(base, ids), logits(tiny_model(), ids))


# -- decoding


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "gpt2", "lfm2", "falcon"])
def test_two_packs_token_by_token_beams_and_left_padding_equal_the_full_forward(
    architecture: str, pack: Make, ids: Tensor
) -> None:
    own = {"r": 2, "target_modules": "all-linear"}
    second = {"layer_ids": (2, 3), "max_ngram_size": 2, "engram_vocab_size": (67,), "kernel_size": 3, "seen_filter": True}
    packs = {"a": pack("a", 1, own, architecture), "b": pack("b", 2, None, architecture, **second)}
    model: Any = eg.load_graft(packs)[0]
    whole = logits(model, ids, use_cache=False)
    for size in (1, 5):
        assert (in_chunks(model, ids, size) - whole).abs().max() <= 1e-5
    for beams in ({}, {"num_beams": 3}):
        with_cache = model.generate(input_ids=ids, **SETTINGS, **beams)
        assert torch.equal(with_cache, model.generate(input_ids=ids, **SETTINGS, **beams, use_cache=False))
    padded, mask = ids.clone(), torch.ones_like(ids)
    padded[1, :9], mask[1, :9] = 5, 0
    batch = model.generate(input_ids=padded, attention_mask=mask, **SETTINGS)[:, 24:]
    assert torch.equal(batch, torch.cat([model.generate(input_ids=row, **SETTINGS)[:, -8:] for row in (ids[:1], ids[1:, 9:])]))
    with eg.use_packs(model, ["a"]):
        assert (logits(model, ids, use_cache=False) - whole).abs().max() > 1e-3, "control: the second pack speaks"


def test_packs_switched_in_the_middle_of_a_cache_are_refused(two: dict[str, Path], ids: Tensor) -> None:
    model: Any = eg.load_graft(two)[0]

    def go_on(first: list[str], then: list[str]) -> None:
        cache = DynamicCache()
        with eg.use_packs(model, first):
            in_chunks(model, ids[:, :8], 8, cache)
        with eg.use_packs(model, then):
            in_chunks(model, ids[:, 8:], 4, cache)

    for same in (["a"], ["b"], ["a", "b"]):
        go_on(same, same)
    for first, then in ((["a"], ["a", "b"]), (["a"], ["b"]), ([], ["a"])):
        with pytest.raises(UserError, match=r"holds 8 tokens and the memory has followed 0|memory that is off now"):
            go_on(first, then)
    for first, then in ((["a", "b"], ["a"]), (["a", "b"], ["b"]), (["a"], [])):
        with pytest.raises(UserError, match="filled with a memory that is off now: start from an empty cache"):
            go_on(first, then)
    cache = DynamicCache()
    in_chunks(model, ids[:, :8], 8, cache)
    cache.crop(-8)
    with eg.use_packs(model, ["a"]):
        assert (in_chunks(model, ids, 4, cache) - logits(model, ids, use_cache=False)).abs().max() <= 1e-5, (
            "emptied, it is anyone's"
        )
    cache = DynamicCache()
    in_chunks(model, ids[:, :8], 8, cache)
    eg.remove_pack(model, "b")
    with pytest.raises(UserError, match="memory that is off now"):
        in_chunks(model, ids[:, 8:], 8, cache)


def test_a_deepcopy_carries_both_packs_and_loses_them_by_itself(two: dict[str, Path], ids: Tensor) -> None:
    model: Any = eg.load_graft(two)[0]
    before = logits(model, ids)
    twin = copy.deepcopy(model)
    assert torch.equal(logits(twin, ids), before)
    with eg.use_packs(twin, ["a"]):
        assert torch.equal(logits(model, ids), before) and not torch.equal(logits(twin, ids), before)
    bare = eg.remove_pack(eg.remove_pack(twin, "a"), "b")
    assert torch.equal(logits(bare, ids), logits(tiny_model(), ids)) and torch.equal(logits(model, ids), before)
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in bare.modules())


def test_ids_given_beside_embeddings_reach_every_pack(two: dict[str, Path], ids: Tensor) -> None:
    model: Any = eg.load_graft(two)[0]
    embeds = model.get_input_embeddings()(ids)
    with explicit_ids(model, ids), torch.no_grad():
        assert torch.equal(model(inputs_embeds=embeds).logits, logits(model, ids))
    assert all(memory.explicit_ids is None for memory in grafts(model))


def test_torch_compile_notices_packs_that_come_and_go(pack: Make, ids: Tensor, tokenizer: Any) -> None:
    model: Any = eg.load_graft([pack("a", 1, layer_ids=(1,)), pack("b", 2, layer_ids=(1,))])[0]
    torch._dynamo.reset()
    compiled: Any = torch.compile(model, backend="eager")

    def equal() -> bool:
        return bool((logits(compiled, ids, use_cache=False) - logits(model, ids, use_cache=False)).abs().max() <= 1e-5)

    assert equal()
    with eg.use_packs(model, ["b"]):
        assert equal()
    eg.remove_pack(eg.remove_pack(model, "a"), "b")
    assert torch.equal(logits(compiled, ids), logits(tiny_model(), ids))
    torch._dynamo.reset()


# -- one of several, and one of another name


def test_one_pack_of_several_is_saved_as_it_was_loaded(two: dict[str, Path], tmp_path: Path) -> None:
    model: Any = eg.load_graft(two)[0]
    with pytest.raises(UserError, match=r"carries the memories a, b and this works with one: remove_pack"):
        eg.save_graft(model, tmp_path / "saved")
    for name, path in two.items():
        eg.save_graft(model, tmp_path / f"saved {name}", name=name)
        assert {file.name for file in (tmp_path / f"saved {name}").iterdir()} == {file.name for file in path.iterdir()}
        for file in (TENSOR_FILE, "adapter_model.safetensors"):
            mine, its = load_file(tmp_path / f"saved {name}" / file), load_file(path / file)
            assert mine.keys() == its.keys() and all(torch.equal(mine[key], its[key]) for key in mine)
    with pytest.raises(UserError, match="no memory 'c'"):
        eg.save_graft(model, tmp_path / "saved", name="c")
    with pytest.raises(UserError, match="works with one"):
        eg.export_merged(model, None, tmp_path / "merged")  # type: ignore[arg-type]
    assert not (tmp_path / "saved").exists() and not (tmp_path / "merged").exists()


def test_a_pack_that_is_the_only_one_is_trained_probed_verified_and_saved(pack: Make, tmp_path: Path, ids: Tensor) -> None:
    from engram_graft.data import load_data
    from engram_graft.probes import Subject, run_probes
    from engram_graft.recipe import load_recipe
    from engram_graft.verify import verify_decoding

    facts = tmp_path / "facts.jsonl"
    facts.write_text(json.dumps({"prompt": "Velmora exports", "answer": "wool"}) + "\n")
    model, tokenizer = eg.load_graft({"mine": pack("a", 1, LORA)}, trainable=True)
    before = {key: tensor.clone() for key, tensor in memory_tensors(model).items()}
    data = load_data(str(facts))
    changes = {
        "data": str(facts),
        "output": str(tmp_path / "out"),
        "train.max_steps": 4,
        "train.batch_size": 1,
        "train.save_steps": 2,
    }
    recipe = load_recipe(None, changes)
    assert eg.train(model, tokenizer, recipe, data)["steps"] == 4
    trained = memory_tensors(model)
    assert any(not torch.equal(before[key], trained[key]) for key in before)
    again = eg.load_graft(tmp_path / "out")[0]
    assert torch.equal(logits(again, ids), logits(model, ids)) and find_graft(again).name == "default"
    assert verify_decoding(model, tokenizer)["ok"]
    arms = run_probes(Subject(model, tokenizer, data))["arms"]
    assert {"graft", "memory_off", "lora_off", "shuffled"} <= set(arms)

    resumed, _ = eg.load_graft({"mine": pack("a", 1, LORA)}, trainable=True)
    (tmp_path / "out" / "checkpoint-4").rename(tmp_path / "gone")
    assert eg.train(resumed, tokenizer, recipe, data, resume=True)["resumed_from"] == 2
    assert torch.equal(logits(resumed, ids), logits(model, ids))


def test_packs_in_files_have_a_directory_each(pack: Make, ids: Tensor, tmp_path: Path) -> None:
    packs = [pack("a", 1, seen_filter=True), pack("b", 2, seen_filter=True)]
    expected = logits(eg.load_graft(packs)[0], ids)
    for _ in range(2):  # filled, then used again
        model = eg.load_graft(packs, table_dir=tmp_path / "tables")[0]
        assert torch.equal(logits(model, ids), expected)
        del model
    assert {path.name for path in (tmp_path / "tables").iterdir()} >= {"a", "b"}


def test_what_packs_hold_is_freed_when_they_are_removed(pack: Make, tokenizer: Any) -> None:
    model = eg.load_graft({"a": pack("a", 1, LORA), "b": pack("b", 2)})[0]
    held = [weakref.ref(memory.table.weight) for name in ("a", "b") for memory in memories(model, name)]
    base = eg.remove_pack(eg.remove_pack(model, "b"), "a")
    assert not grafts(base)
    gc.collect()
    assert not any(table() is not None for table in held)


def test_a_fresh_memory_beside_a_pack_changes_no_bit(pack: Make, tokenizer: Any, ids: Tensor) -> None:
    model: Any = eg.load_graft(pack("a", 1), name="a")[0]
    before = logits(model, ids)
    eg.graft(model, tokenizer, eg.EngramConfig(**TINY_ENGRAM))
    assert torch.equal(logits(model, ids), before) and [memory.name for memory in grafts(model)] == ["a", "default"]
    with pytest.raises(UserError, match="works with one"):
        eg.verify_identity(model, tokenizer)
