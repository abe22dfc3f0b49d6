"""Over 600 damaged or doctored graft and merged directories, the same ones each time: each is refused by `load_graft` with one line that
names what is wrong. "Fitted" ones have hashes made to fit again, as somebody would who means harm."""

import io
import json
import os
import pickle
import random
import re
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TINY_ENGRAM, keep_seen, randomize, tiny_model
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn

import engram_graft as eg
from engram_graft.bases import load_base
from engram_graft.errors import UserError
from engram_graft.export import reopen
from engram_graft.files import ADAPTER_CONFIG, ADAPTER_FILE, TENSOR_FILE
from engram_graft.grafted import memories
from engram_graft.integrity import CODE_FILE, CONFIG_FILE, file_hash, write_description
from engram_graft.params import is_memory

Change = Callable[[Path], Any]
INDEX = "model.safetensors.index.json"
HUGE = 2**40


class Payload:
    """Unpickled, it leaves a mark."""

    def __reduce__(self) -> Any:
        return os.system, ("touch unpickled",)


# -- what a mutation is made of


def described(directory: Path) -> dict[str, Any]:
    found = json.loads((directory / CONFIG_FILE).read_text())
    found.pop("sha256")
    return found


def fit(directory: Path) -> None:
    """Make all hashes fit the files that are there."""
    found = described(directory)
    files = {name: directory / name for name in found["files"]}
    found["files"] = {name: file_hash(path) if path.is_file() else found["files"][name] for name, path in files.items()}
    write_description(directory, found)


def tensors(name: str, change: Callable[[dict[str, torch.Tensor]], Any]) -> Change:
    """Other tensors in a file, whose hash fits."""

    def apply(directory: Path) -> None:
        found = load_file(directory / name)
        change(found)
        save_file({key: tensor.contiguous() for key, tensor in found.items()}, directory / name, metadata={"format": "pt"})
        fit(directory)

    return apply


def header(name: str, change: Callable[[dict[str, Any]], Any]) -> Change:
    """Another header before the same bytes in a safetensors file, whose hash fits."""

    def apply(directory: Path) -> None:
        whole = (directory / name).read_bytes()
        size = struct.unpack("<Q", whole[:8])[0]
        entries = json.loads(whole[8 : 8 + size])
        change(entries)
        changed = json.dumps(entries).encode()
        (directory / name).write_bytes(struct.pack("<Q", len(changed)) + changed + whole[8 + size :])
        fit(directory)

    return apply


def content(name: str, change: Callable[[bytes], bytes], fitted: bool = False) -> Change:
    def apply(directory: Path) -> None:
        (directory / name).write_bytes(change((directory / name).read_bytes()))
        if fitted:
            fit(directory)

    return apply


def about(change: Callable[[dict[str, Any]], Any]) -> Change:
    """Another engram_config.json, whose own hash fits."""

    def apply(directory: Path) -> None:
        found = described(directory)
        change(found)
        write_description(directory, found)

    return apply


def edited(change: Callable[[dict[str, Any]], Any]) -> Change:
    """engram_config.json changed by hand: its own hash does not fit."""

    def apply(directory: Path) -> None:
        found = json.loads((directory / CONFIG_FILE).read_text())
        change(found)
        (directory / CONFIG_FILE).write_text(json.dumps(found))

    return apply


def as_json(name: str, change: Callable[[dict[str, Any]], Any]) -> Change:
    """Another JSON file, whose hash fits if it has one."""

    def apply(directory: Path) -> None:
        found = json.loads((directory / name).read_text())
        change(found)
        (directory / name).write_text(json.dumps(found))
        fit(directory)

    return apply


def outside(name: str) -> Change:
    """The file itself elsewhere, a link to it in the directory."""

    def apply(directory: Path) -> None:
        target = directory.parent / f"outside-{name}"
        shutil.move(directory / name, target)
        (directory / name).symlink_to(target)

    return apply


def pickled(directory: Path, name: str) -> None:
    buffer = io.BytesIO()
    torch.save({"weight": torch.zeros(2)}, buffer)
    (directory / name).write_bytes(buffer.getvalue())


def flip(at: int) -> Callable[[bytes], bytes]:
    return lambda whole: whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :]


# -- the mutations of each kind of directory, by name


def of_files(directory: Path) -> Iterator[tuple[str, Change]]:
    """Damage that happens to any file: every one that has a hash."""
    generator = random.Random(0)
    for name in sorted(described(directory)["files"]):
        size = (directory / name).stat().st_size
        for length in (0, 1, 7, size // 2, size - 1):
            yield f"{name}: cut to {length} bytes", content(name, lambda whole, length=length: whole[:length])
        yield f"{name}: a byte more", content(name, lambda whole: whole + b"\0")
        for at in (0, 9, *(generator.randrange(size) for _ in range(3)), size - 1):
            yield f"{name}: byte {at} flipped", content(name, flip(at))
        if name != CODE_FILE:  # which load_graft has no use for
            yield f"{name}: not there", lambda directory, name=name: (directory / name).unlink()
        yield f"{name}: a link out of the directory", outside(name)
        yield f"{name}: a directory", lambda directory, name=name: ((directory / name).unlink(), (directory / name).mkdir())
        yield f"{name}: not listed", about(lambda found, name=name: found["files"].pop(name))


def of_safetensors(name: str, directory: Path) -> Iterator[tuple[str, Change]]:
    """Files that a converter with a fault, or somebody who means harm, would write: every hash fits."""
    found = load_file(directory / name)
    generator = random.Random(1)
    whole = name in (TENSOR_FILE, ADAPTER_FILE)
    matrices = [key for key, tensor in found.items() if tensor.ndim > 1 and (whole or is_memory(key))]
    key = generator.choice(matrices or list(found))
    yield f"{name}: fitted, empty", content(name, lambda whole: b"", True)
    yield f"{name}: fitted, cut", content(name, lambda whole: whole[:-4], True)
    yield f"{name}: fitted, longer", content(name, lambda whole: whole + b"\0\0\0\0", True)
    yield f"{name}: a pickle", lambda directory: (pickled(directory, name), fit(directory))
    yield f"{name}: a bare pickle", content(name, lambda whole: pickle.dumps(Payload()), True)
    for size in (0, 2**20, HUGE, 2**64 - 1):
        yield (
            f"{name}: a header of {size} bytes",
            content(name, lambda whole, size=size: struct.pack("<Q", size) + whole[8:], True),
        )
    yield f"{name}: header no JSON", content(name, lambda whole: whole[:8] + b"x" + whole[9:], True)
    yield f"{name}: {key} shaped {HUGE}", header(name, lambda h: h[key].update(shape=[HUGE, HUGE]))
    yield f"{name}: {key} shaped below 0", header(name, lambda h: h[key].update(shape=[-1]))
    yield f"{name}: {key} ends beyond the file", header(name, lambda h: h[key].update(data_offsets=[0, HUGE]))
    yield f"{name}: {key} ends before it begins", header(name, lambda h: h[key].update(data_offsets=[8, 4]))
    yield f"{name}: {key} in the place of another", header(name, lambda h: h[key].update(data_offsets=[0, 4]))
    yield f"{name}: {key} of no known dtype", header(name, lambda h: h[key].update(dtype="F31"))
    yield f"{name}: {key} without a shape", header(name, lambda h: h[key].pop("shape"))
    yield f"{name}: header a list", content(name, lambda whole: struct.pack("<Q", 2) + b"[]" + whole[10:], True)
    yield f"{name}: {key} renamed", tensors(name, lambda t: t.update({key + "x": t.pop(key)}))
    yield f"{name}: {key} missing", tensors(name, lambda t: t.pop(key))
    more = key.replace("engram.", "engram.more_") if "engram." in key else "more"
    yield f"{name}: one more beside {key}", tensors(name, lambda t: t.update({more: t[key].clone()}))
    if matrices:  # a base in another dtype is the same base
        yield f"{name}: {key} in float64", tensors(name, lambda t: t.update({key: t[key].double()}))
    yield (
        f"{name}: {key} transposed and longer",
        tensors(name, lambda t: t.update({key: torch.cat([t[key], t[key]]).movedim(0, -1)})),
    )
    yield (
        f"{name}: {key} flat, and one longer",
        tensors(name, lambda t: t.update({key: torch.cat([t[key].flatten(), torch.zeros(1)])})),
    )
    yield f"{name}: {key} empty", tensors(name, lambda t: t.update({key: t[key][:0]}))


def of_integers(name: str, directory: Path) -> Iterator[tuple[str, Change]]:
    """Addresses that lead nowhere, or into memory that is not there."""
    keys = {key.rpartition(".")[2]: key for key in load_file(directory / name) if "hash." in key}
    rows = next((key for key in load_file(directory / name) if key.endswith("table.rows")), None)
    if "primes" in keys:
        for part in ("lookup", "multipliers", "primes", "offsets", "pad"):
            yield f"{part} missing", tensors(name, lambda t, key=keys[part]: t.pop(key))
            yield f"{part} as float", tensors(name, lambda t, key=keys[part]: t.update({key: t[key].double()}))
            yield (
                f"{part} of another shape",
                tensors(name, lambda t, key=keys[part]: t.update({key: t[key].reshape(-1)[:1].repeat(3)})),
            )
        for value in (0, -7, 10**15, 2**62):
            yield f"primes of {value}", tensors(name, lambda t, value=value: t[keys["primes"]][0].fill_(value))
        yield "offsets moved", tensors(name, lambda t: t[keys["offsets"]].add_(1))
        yield "offsets below 0", tensors(name, lambda t: t[keys["offsets"]].fill_(-5))
        yield "multipliers of 0", tensors(name, lambda t: t[keys["multipliers"]].zero_())
        yield "multipliers below 0", tensors(name, lambda t: t[keys["multipliers"]].fill_(-3))
        yield "lookup of another token", tensors(name, lambda t: t[keys["lookup"]][5:6].add_(1))
        yield "lookup beyond its ids", tensors(name, lambda t: t[keys["lookup"]].fill_(10**12))
        yield "pad beyond its ids", tensors(name, lambda t: t[keys["pad"]].fill_(10**12))
    if rows is not None:
        yield "rows beyond the table", tensors(name, lambda t: t[rows][-1:].fill_(HUGE))
        yield "rows in disorder", tensors(name, lambda t: t.update({rows: t[rows].flip(0)}))
        yield "a row twice", tensors(name, lambda t: t[rows][1:2].copy_(t[rows][:1]))


def of_config(directory: Path) -> Iterator[tuple[str, Change]]:
    """engram_config.json: text that is none, parts that are missing or something else, names that lead away."""
    text = (directory / CONFIG_FILE).read_bytes()
    for name, other in {
        "empty": b"",
        "cut": text[: len(text) // 2],
        "no UTF-8": b"\xff\xfe" + text,
        "a list": b"[]",
        "null": b"null",
        "a pickle": pickle.dumps(Payload()),
        "nested deep": b"[" * 100_000,
        "a number": b"1",
    }.items():
        yield f"{CONFIG_FILE}: {name}", content(CONFIG_FILE, lambda whole, other=other: other)
    found = described(directory)
    for part in found:
        yield f"{CONFIG_FILE}: no {part}", about(lambda d, part=part: d.pop(part))
        for value in (None, 7, "x", [], {}):
            if part != "merged" or not isinstance(value, bool):
                yield f"{CONFIG_FILE}: {part} is {value!r}", about(lambda d, part=part, value=value: d.update({part: value}))
    for section in ("tokenizer", "base"):
        for key in (key for key in found[section] if key != "changed"):  # that is the model card's
            yield f"{CONFIG_FILE}: no {section}.{key}", about(lambda d, s=section, k=key: d[s].pop(k))
            yield f"{CONFIG_FILE}: {section}.{key} is a list", about(lambda d, s=section, k=key: d[s].update({k: []}))
    yield f"{CONFIG_FILE}: base.name is a list, its own hash not fitted", edited(lambda d: d["base"].update(name=[]))
    for key in ("model_type", "hidden_size", "num_hidden_layers", "vocab_size", "samples"):
        yield f"{CONFIG_FILE}: no fingerprint of {key}", about(lambda d, key=key: d["base"]["fingerprint"].pop(key))
        yield f"{CONFIG_FILE}: fingerprint of {key} is 1", about(lambda d, key=key: d["base"]["fingerprint"].update({key: 1}))
    for key, value in {"layout": "other", "code": "int3"}.items():
        yield (
            f"{CONFIG_FILE}: {key} of tables is {value}",
            about(lambda d, key=key, value=value: d["tables"].update({key: value})),
        )
    yield f"{CONFIG_FILE}: tables said dense", about(lambda d: d["tables"].update(layout="dense"))
    yield f"{CONFIG_FILE}: tables said float8", about(lambda d: d["tables"].update(code="float8"))
    yield f"{CONFIG_FILE}: a graft said merged, or the other way", about(lambda d: d.update(merged=not d["merged"]))
    for section, key in (("config", "seen_filter"), ("config", "gate"), ("base", "dtype"), ("tokenizer", "ids")):
        yield f"{CONFIG_FILE}: no {section}.{key}, its own hash not fitted", edited(lambda d, s=section, k=key: d[s].pop(k))
    yield (
        f"{CONFIG_FILE}: other seen_filter, not fitted",
        edited(lambda d: d["config"].update(seen_filter=not d["config"]["seen_filter"])),
    )
    yield f"{CONFIG_FILE}: other seed, not fitted", edited(lambda d: d["config"].update(seed=1))
    yield f"{CONFIG_FILE}: without its own hash", edited(lambda d: d.pop("sha256"))
    yield f"{CONFIG_FILE}: its own hash another", edited(lambda d: d.update(sha256="0" * 64))
    for key, value in {
        "layer_ids": [99],
        "engram_vocab_size": [10**12, 10**12],
        "n_embed_per_ngram": 2**40,
        "n_head_per_ngram": 2**40,
        "max_ngram_size": 10**9,
        "kernel_size": 10**12,
        "hc_mult": 10**9,
        "gate": "other",
        "dtype": "float64",
        "seed": "0",
        "more": 1,
    }.items():
        yield f"{CONFIG_FILE}: {key} is {value}", about(lambda d, key=key, value=value: d["config"].update({key: value}))
    for name in ("../x.safetensors", "/etc/passwd", "a/../../x", "", ".", "..", "x\0y", "none.safetensors", "sub/x"):
        yield f"{CONFIG_FILE}: lists {name!r}", about(lambda d, name=name: d["files"].update({name: "0" * 64}))
    for value in (None, 7, "0" * 64, ["x"]):
        yield (
            f"{CONFIG_FILE}: a hash is {str(value)[:8]}",
            about(lambda d, value=value: d["files"].update(dict.fromkeys(d["files"], value))),
        )


def of_adapter(directory: Path) -> Iterator[tuple[str, Change]]:
    """adapter_config.json, its hash fitting: what PEFT would import, fetch, build or change."""
    for key, value in {
        "peft_type": "XLORA",
        "r": 10**9,
        "rank_pattern": {"q_proj": 10**9},
        "lora_alpha": "x",
        "target_modules": ["none"],
        "exclude_modules": 7,
        "modules_to_save": ["lm_head"],
        "layers_to_transform": [99],
        "trainable_token_indices": [10**9],
        "bias": "all",
        "init_lora_weights": "pissa",
        "layer_replication": [[0, 4], [0, 4]],
        "megatron_config": {"x": 1},
        "megatron_core": "os.path",
        "eva_config": {"rho": 2.0},
        "arrow_config": {"x": 1},
        "use_qalora": True,
        "runtime_config": {"ephemeral_gpu_offload": True},
        "use_dora": True,
        "more": 1,
    }.items():
        yield (
            f"{ADAPTER_CONFIG}: {key} is {value}",
            as_json(ADAPTER_CONFIG, lambda d, key=key, value=value: d.update({key: value})),
        )
    yield f"{ADAPTER_CONFIG}: another pattern", as_json(ADAPTER_CONFIG, lambda d: d.update(target_modules="(("))
    for name, other in {"empty": b"", "a list": b"[]", "no UTF-8": b"\xff", "a pickle": pickle.dumps(Payload())}.items():
        yield f"{ADAPTER_CONFIG}: {name}", content(ADAPTER_CONFIG, lambda whole, other=other: other, True)


def of_index(directory: Path) -> Iterator[tuple[str, Change]]:
    """The index of a merged directory: names that lead away, shards that are not there."""
    shard = sorted(set(json.loads((directory / INDEX).read_text())["weight_map"].values()))[0]

    def named(name: Any) -> Change:
        return as_json(INDEX, lambda d: d["weight_map"].update(dict.fromkeys(list(d["weight_map"])[:1], name)))

    for name in (
        f"../{shard}",
        f"../merged/{shard}",
        "/etc/passwd",
        f"./{shard}",
        "",
        "..",
        "none.safetensors",
        "pytorch_model.bin",
        7,
        None,
    ):
        yield f"{INDEX}: names {name!r}", named(name)
    yield f"{INDEX}: no weight_map", as_json(INDEX, lambda d: d.pop("weight_map"))
    yield f"{INDEX}: weight_map a list", as_json(INDEX, lambda d: d.update(weight_map=[shard]))
    yield f"{INDEX}: one shard only", as_json(INDEX, lambda d: d.update(weight_map=dict.fromkeys(d["weight_map"], shard)))
    for name, other in {"empty": b"", "a list": b"[]", "a pickle": pickle.dumps(Payload())}.items():
        yield f"{INDEX}: {name}", content(INDEX, lambda whole, other=other: other, True)
    yield f"{INDEX}: not there", lambda directory: (directory / INDEX).unlink()


def of_base(directory: Path) -> Iterator[tuple[str, Change]]:
    """The other files of a merged directory."""
    yield "config.json: not there", lambda directory: (directory / "config.json").unlink()
    for name, other in {"empty": b"", "a list": b"[]", "a pickle": pickle.dumps(Payload())}.items():
        yield f"config.json: {name}", content("config.json", lambda whole, other=other: other, True)
        yield f"tokenizer.json: {name}", content("tokenizer.json", lambda whole, other=other: other, True)
    for key, value in {
        "model_type": "none",
        "num_hidden_layers": 3,
        "hidden_size": HUGE,
        "vocab_size": 64,
        "transformers_weights": "../x.safetensors",
    }.items():
        yield f"config.json: {key} is {value}", as_json("config.json", lambda d, key=key, value=value: d.update({key: value}))
    yield (
        "config.json: code of its own",
        as_json(
            "config.json",
            lambda d: d.update(model_type="none", auto_map={"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}),
        ),
    )
    yield "tokenizer.json: another word", as_json("tokenizer.json", lambda d: d["model"]["vocab"].update(zzzz=7))
    yield (
        "pickles instead of shards",
        lambda directory: [(pickled(directory, "pytorch_model.bin"), path.unlink()) for path in directory.glob("*.safetensors")],
    )
    yield "an adapter beside", lambda directory: (directory / ADAPTER_CONFIG).write_text('{"peft_type": "LORA"}')


# -- the directories, and what becomes of each mutation


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> dict[str, Path]:
    """A graft directory with LoRA, and a merged one in shards, on the same tiny base."""
    folder = tmp_path_factory.mktemp("whole")
    tiny_model().save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    model: Any = get_peft_model(load_base(str(folder / "base"))[0], LoraConfig(r=2, target_modules=["q_proj"]))
    eg.graft(model, tokenizer, eg.EngramConfig(**{**TINY_ENGRAM, "seen_filter": True}))
    randomize(model)
    for memory in memories(model):
        keep_seen(memory, torch.arange(0, len(memory.table.weight), 2))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.constant_(parameter, 0.1)
    eg.save_graft(model, folder / "graft")
    eg.export_merged(model, tokenizer, folder / "merged", max_shard_size="60KB")
    return {"graft": folder / "graft", "merged": folder / "merged"}


def mutations(directory: Path) -> Iterator[tuple[str, Change]]:
    yield from of_files(directory)
    for name in sorted(described(directory)["files"]):
        if name.endswith(".safetensors"):
            yield from of_safetensors(name, directory)
            yield from of_integers(name, directory)
    yield from of_config(directory)
    if (directory / ADAPTER_CONFIG).exists():
        yield from of_adapter(directory)
    if (directory / INDEX).exists():
        yield from of_index(directory)
        yield from of_base(directory)


def copied(directory: Path, scratch: Path) -> Path:
    shutil.rmtree(scratch, ignore_errors=True)
    return Path(shutil.copytree(directory, scratch / directory.name, copy_function=shutil.copyfile))


def answer(directory: Path) -> str | None:
    """What is wrong with how `load_graft` answers; None: it refuses, in one line, and says what."""
    what = rf"{re.escape(str(directory))}|wrong base|wrong tokenizer|tensors do not fit|unknown memory option|^\w+=|layer\d: .* GB do not"
    try:
        eg.load_graft(directory)
    except UserError as error:
        text = str(error)
        return None if "\n" not in text and re.search(what, text) else f"does not say what in one line: {text!r}"
    except BaseException as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    return "loaded"


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", ["graft", "merged"])
def test_every_mutated_directory_is_refused_with_what_is_wrong(
    kind: str, directories: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where a pickle would leave its mark
    assert answer(copied(directories[kind], tmp_path / "scratch")) == "loaded", "control: a copy as it is"
    faults, names = [], []
    for name, change in mutations(directories[kind]):
        copy = copied(directories[kind], tmp_path / "scratch")
        change(copy)
        names.append(name)
        if fault := answer(copy):
            faults.append(f"{name}: {fault}")
    assert not faults, f"{len(faults)} of {len(names)}:\n" + "\n".join(faults)
    assert len(names) >= 200 and not (tmp_path / "unpickled").exists()


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_code_an_export_ships_refuses_what_is_damaged(directories: dict[str, Path], tmp_path: Path) -> None:
    """Of all mutations those of its files, but its own: a changed program cannot be asked whether it is."""
    own = [(name, change) for name, change in of_files(directories["merged"]) if CODE_FILE not in name]
    for name in sorted(described(directories["merged"])["files"]):
        own += [*of_safetensors(name, directories["merged"])] if name.endswith(".safetensors") else []
    own += of_index(directories["merged"])
    reopen(copied(directories["merged"], tmp_path / "scratch"))
    opened, unsaid = [], []
    for name, change in own:
        copy = copied(directories["merged"], tmp_path / "scratch")
        change(copy)
        try:
            reopen(copy)
        except (ValueError, RuntimeError, OSError, SyntaxError) as error:
            unsaid += [] if str(error).strip() else [name]
        else:
            opened.append(name)
    assert not opened and not unsaid and len(own) > 100, (opened, unsaid)


def test_the_mutations_are_the_same_each_time(directories: dict[str, Path]) -> None:
    for directory in directories.values():
        once, again = ([name for name, _ in mutations(directory)] for _ in range(2))
        assert once == again


def test_the_hashes_can_be_made_to_fit(directories: dict[str, Path], tmp_path: Path) -> None:
    """A control: what refuses the fitted mutations is not that their hashes fail to fit."""
    for directory in directories.values():
        copy = copied(directory, tmp_path / "scratch")
        fit(copy)
        assert answer(copy) == "loaded"
        tensors(memory_file(copy), lambda t: next(v for k, v in t.items() if k.endswith("key_norm")).add_(0.5))(copy)
        assert answer(copy) == "loaded", "other values are another graft, not a damaged one"


def memory_file(directory: Path) -> str:
    files = [name for name in described(directory)["files"] if name.endswith(".safetensors") and name != ADAPTER_FILE]
    return next(name for name in files if any(key.endswith("key_norm") for key in load_file(directory / name)))
