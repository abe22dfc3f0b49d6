"""The command line: help is quick, a wrong input is one line and leaves nothing behind, a whole run leaves exactly its files."""

import contextlib
import dataclasses
import io
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import yaml
from conftest import TINY_ENGRAM, tiny_model
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedTokenizerFast
from typer.main import get_command

import engram_graft as eg
import engram_graft.cli
from engram_graft.cli import generate
from engram_graft.errors import PromiseError
from engram_graft.grafted import memories
from engram_graft.integrity import read_description, write_description

ROOT = Path(__file__).parents[1]
COMMANDS = ["train", "verify", "probe", "export", "import", "generate", "inspect", "bench"]
FACTS: list[dict[str, Any]] = [
    {
        "prompt": ["The cat sleeps in the", "At noon the cat is in the"],
        "answer": "sun",
        "aliases": ["sunshine"],
        "paraphrases": ["Cats rest in the"],
    },
    {"prompt": "Velmora exports", "answer": "wool"},
]
SMALL = [
    *("--set", "engram.engram_vocab_size=[53,61]"),
    *("--set", "engram.n_embed_per_ngram=16"),
    *("--set", "engram.n_head_per_ngram=2"),
]
GRAFT_FILES = {
    "README.md",
    "adapter_config.json",
    "adapter_model.safetensors",
    "engram.safetensors",
    "engram_config.json",
    "identity.json",
    "metrics.jsonl",
    "probes.json",
    "recipe.yaml",
    "report.html",
}
MERGED_FILES = {
    "README.md",
    "config.json",
    "engram_config.json",
    "generation_config.json",
    "model.safetensors",
    "modeling_engram.py",
    "tokenizer.json",
    "tokenizer_config.json",
}


@dataclasses.dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str


def run(*arguments: object) -> Ran:
    """The command in this process, as the shell would see it."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        patch.setattr(sys, "argv", ["engram-graft", *map(str, arguments)])
        patch.setenv("COLUMNS", "160")
        try:
            engram_graft.cli.main()
        except SystemExit as end:
            code = 0 if end.code is None else int(end.code)
    return Ran(code, out.getvalue(), err.getvalue())


def spawn(*arguments: object, code: list[str] | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    command = [sys.executable, *(code or ["-m", "engram_graft.cli"]), *map(str, arguments)]
    variables = {**os.environ, "COLUMNS": "160", "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(command, capture_output=True, text=True, env=variables, cwd=Path(__file__).anchor, timeout=300)


def refused(ran: Ran, *parts: object) -> None:
    """Exit code 2; on standard error one line beside what train says as it goes; nothing on standard output."""
    lines = [line for line in ran.err.splitlines() if not line.startswith("base ")]
    assert ran.code == 2, ran.err
    assert len(lines) == 1 and lines[0].startswith("error: "), ran.err
    assert ran.out == ""
    for part in parts:
        assert str(part) in lines[0], lines[0]


def tree(directory: Path) -> dict[str, bytes | None]:
    return {str(p.relative_to(directory)): p.read_bytes() if p.is_file() else None for p in directory.rglob("*")}


@pytest.fixture(scope="module", autouse=True)
def surroundings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One thread, which tiny tensors are quicker on; and what the command changes of the environment is put back."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TQDM_DISABLE", "1")
        patch.chdir(tmp_path_factory.mktemp("cwd"))
        yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast) -> Path:
    """A tiny base with its tokenizer, as save_pretrained writes them."""
    directory = tmp_path_factory.mktemp("bases") / "tiny"
    tiny_model().save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "facts.jsonl"
    path.write_text("".join(json.dumps(fact) + "\n" for fact in FACTS), encoding="utf-8")
    return path


@dataclasses.dataclass(frozen=True)
class Trained:
    out: Path
    merged: Path
    ran: Ran


@pytest.fixture(scope="module")
def trained(base: Path, facts: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """A whole run: train with LoRA, probe, export."""
    directory = tmp_path_factory.mktemp("runs")
    out, merged = directory / "out", directory / "merged"
    where = ["--base", base, "--data", facts, "--output", out, "--merged", merged]
    return Trained(out, merged, run("train", *where, "--layers", "1,2", "--steps", 3, "--lora-rank", 2, *SMALL))


@pytest.fixture
def graft(trained: Trained, tmp_path: Path) -> Path:
    """A copy of the trained graft, to break."""
    return Path(shutil.copytree(trained.out, tmp_path / "graft"))


def train_arguments(base: object, data: object, output: object, **changes: object) -> list[object]:
    options = {"base": base, "data": data, "output": output, "layers": "1,2", "steps": 1, "lora-rank": 0, **changes}
    return ["train", *(part for name, value in options.items() for part in (f"--{name}", value)), "--no-probe", *SMALL]


# -- help


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_takes_less_than_a_second_and_ends_in_examples(command: str) -> None:
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        done = spawn(*filter(None, [command]), "--help")
        seconds.append(time.perf_counter() - start)
        if seconds[-1] < 1:
            break
    assert min(seconds) < 1, seconds
    assert done.returncode == 0 and done.stderr == ""
    before, found, end = done.stdout.partition("Examples:")
    assert found and "Options" in before and "│" not in end
    lines = [line.strip() for line in end.splitlines() if line.strip()]
    assert lines and lines[0].startswith(f"engram-graft {command or 'train'} ")


def test_the_commands_are_the_documented_ones() -> None:
    assert set(COMMANDS) <= set(get_command(engram_graft.cli.app).commands)  # type: ignore[attr-defined]


@pytest.mark.parametrize("command", COMMANDS)
def test_the_examples_of_the_help_are_valid(command: str) -> None:
    known = get_command(engram_graft.cli.app).commands  # type: ignore[attr-defined]
    module = {"import": "import_graft"}.get(command, command)  # no module can be named so
    ends = getattr(engram_graft.cli, module).HELP_END.split("\n\n")[1:]
    assert ends
    for example in ends:
        program, name, *arguments = shlex.split(example)
        assert program == "engram-graft" and name == command
        context = known[name].make_context(name, arguments)  # raises for an option that is not there
        if recipe := context.params.get("recipe"):
            assert (ROOT / recipe).is_file(), f"{recipe} does not exist"


def test_the_command_line_imports_nothing_heavy() -> None:
    heavy = ["torch", "transformers", "peft", "datasets", "numpy", "matplotlib", "safetensors"]
    code = f"import sys, engram_graft.cli; print([name for name in {heavy} if name in sys.modules])"
    done = spawn(code=["-c", code])
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_without_a_command_the_help_is_shown() -> None:
    ran = run()
    assert "Usage:" in ran.out and all(f"│ {command} " in ran.out for command in COMMANDS)


# -- a wrong input: one line, exit code 2, nothing left behind


BAD_DATA = {
    "empty": ("facts.jsonl", "", "empty"),
    "not JSON": ("facts.jsonl", json.dumps(FACTS[0]) + "\n{oops\n", "line 2: not JSON"),
    "missing answer": ("facts.jsonl", json.dumps(FACTS[0]) + '\n\n{"prompt": "x"}\n', "line 3: answer is missing"),
    "unknown ending": ("facts.xlsx", "x", "cannot read .xlsx"),
    "no train split": ("facts.jsonl", json.dumps({**FACTS[1], "split": "test"}), 'no fact has split "train"'),
    "a fact too long": ("facts.jsonl", json.dumps({"prompt": "x " * 600, "answer": "y"}), "more than max_length=512"),
}


@pytest.mark.parametrize("fault", BAD_DATA)
def test_train_refuses_bad_data_with_file_and_line(fault: str, base: Path, tmp_path: Path) -> None:
    name, text, message = BAD_DATA[fault]
    (tmp_path / name).write_text(text)
    ran = run(*train_arguments(base, tmp_path / name, tmp_path / "out"))
    if fault in ("no train split", "a fact too long"):  # found when encoding: train has said more by then
        assert ran.code == 2 and ran.err.splitlines()[-1].startswith("error: ") and "Traceback" not in ran.err
        assert message in ran.err
    else:
        refused(ran, message, tmp_path / name)
    assert not (tmp_path / "out").exists()


def test_train_refuses_missing_data(base: Path, tmp_path: Path) -> None:
    refused(run(*train_arguments(base, tmp_path / "no.jsonl", tmp_path / "out")), tmp_path / "no.jsonl", "no such file")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("option", ["base", "data", "output"])
def test_train_names_the_option_that_is_missing(option: str, base: Path, facts: Path, tmp_path: Path) -> None:
    arguments = train_arguments(base, facts, tmp_path / "out")
    at = arguments.index(f"--{option}")
    refused(run(*arguments[:at], *arguments[at + 2 :]), f"--{option}")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("/no/such/base", "no such file or directory"),
        ("./no.gguf", "no such file or directory"),
        ("empty", "no config.json"),
    ],
)
def test_train_refuses_a_base_that_is_not_there(name: str, message: str, facts: Path, tmp_path: Path) -> None:
    if name == "empty":
        (tmp_path / "empty").mkdir()
        name = str(tmp_path / "empty")
    refused(run(*train_arguments(name, facts, tmp_path / "out")), repr(name), message)
    assert not (tmp_path / "out").exists()


def test_an_unreachable_hub_id_is_one_line_too(facts: Path, tmp_path: Path) -> None:
    arguments = train_arguments("nobody/no-such-model", facts, tmp_path / "out")
    done = spawn(*arguments, HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path / "hf"))
    refused(Ran(done.returncode, done.stdout, done.stderr), "'nobody/no-such-model'", "smollm2", "hub")
    assert not (tmp_path / "out").exists()


def test_a_base_whose_weights_are_cut_off_is_refused(base: Path, facts: Path, tmp_path: Path) -> None:
    broken = Path(shutil.copytree(base, tmp_path / "broken"))
    weights = (broken / "model.safetensors").read_bytes()
    (broken / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    refused(run(*train_arguments(broken, facts, tmp_path / "out")), f"base {str(broken)!r}")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("layers", ["1,4", "99"])
def test_a_layer_out_of_range_is_refused_with_the_range(layers: str, base: Path, facts: Path, tmp_path: Path) -> None:
    bad = f"layer {layers.split(',')[-1]} does not exist"
    refused(run(*train_arguments(base, facts, tmp_path / "out", layers=layers)), bad, "layers 0 to 3")
    refused(run("inspect", base, "--layers", layers), bad, "layers 0 to 3")
    assert not (tmp_path / "out").exists()


def test_verify_refuses_a_layer_out_of_range_with_the_range(base: Path) -> None:
    refused(run("verify", "--base", base, "--layers", "4"), "layer 4 does not exist", "layers 0 to 3")


@pytest.mark.parametrize("layers", ["two", "", "1;2", "1,,2", "1.5"])
def test_layers_that_are_no_numbers_are_refused(layers: str, base: Path, facts: Path, tmp_path: Path) -> None:
    refused(run(*train_arguments(base, facts, tmp_path / "out", layers=layers)), "--layers", repr(layers), "2,6")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--set", "train.max_step=3"], ["unknown recipe option train.max_step", "did you mean train.max_steps"]),
        (["--set", "train.max_steps"], ["'train.max_steps'", "must look like"]),
        (["--set", "train.max_steps=many"], ["train.max_steps='many'"]),
        (["--set", "train.trainer={no_such: 1}"], ["no_such"]),
        (["--dtype", "float7"], ["'float7'", "bfloat16"]),
        (["--lora-rank", "-1"], ["lora.rank=-1", "0 or more"]),
        (["--lora-rank", "2", "--set", "lora.target_modules=[nope]"], ["lora.target_modules=['nope']", "not found"]),
        (["--set", "engram.hc_mult=4"], ["hc_mult=4", "1 residual streams"]),
        (["--device", "nowhere"], ["'nowhere'"]),
        (["--recipe", "no-such.yaml"], ["no-such.yaml", "cannot be read"]),
    ],
)
def test_train_refuses_a_bad_option(arguments: list[str], parts: list[str], base: Path, facts: Path, tmp_path: Path) -> None:
    ran = run(*train_arguments(base, facts, tmp_path / "out"), *arguments)
    assert ran.code == 2 and "Traceback" not in ran.err and ran.out == ""
    errors = [line for line in ran.err.splitlines() if line.startswith("error: ")]
    assert errors == ran.err.splitlines()[-1:] and all(part in errors[0] for part in parts), ran.err
    assert not (tmp_path / "out").exists()


def test_an_unknown_key_in_a_recipe_file_is_refused(base: Path, facts: Path, tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text("train:\n  learn_rate: 1e-3\n")
    refused(
        run(*train_arguments(base, facts, tmp_path / "out"), "--recipe", tmp_path / "r.yaml"),
        "train.learn_rate",
        "did you mean",
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "line", ["train --steps many", "train --step 3", "generate somewhere", "no-such-command", "verify one two"]
)
def test_a_wrong_option_is_one_line_too(line: str) -> None:
    refused(run(*line.split()))


def test_an_output_that_is_not_empty_is_refused_and_left_alone(base: Path, facts: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("years of work")
    before = tree(tmp_path)
    refused(run(*train_arguments(base, facts, tmp_path / "out")), tmp_path / "out", "exists and is not empty")
    assert tree(tmp_path) == before


@pytest.mark.parametrize("same", [False, True])
def test_a_merged_directory_that_cannot_be_is_refused_before_anything_is_trained(
    same: bool, base: Path, facts: Path, tmp_path: Path
) -> None:
    merged = tmp_path / ("out" if same else "merged")
    if not same:
        merged.mkdir()
        (merged / "thesis.txt").write_text("years of work")
    ran = run(*train_arguments(base, facts, tmp_path / "out", merged=merged))
    assert ran.code == 2 and str(merged) in ran.err.splitlines()[-1]
    assert tree(tmp_path) == ({} if same else {"merged": None, "merged/thesis.txt": b"years of work"})
    assert "trained " not in ran.err, "a whole run was spent, and then thrown away"


def test_export_refuses_an_output_that_is_not_empty_and_leaves_it_alone(graft: Path, tmp_path: Path) -> None:
    before = tree(tmp_path)
    for output in (graft, tmp_path):
        refused(run("export", graft, "--output", output), output, "exists and is not empty")
    assert tree(tmp_path) == before


USES = {
    "verify": ["verify", "{graft}"],
    "probe": ["probe", "{graft}"],
    "generate": ["generate", "{graft}", "--prompt", "The cat"],
    "export": ["export", "{graft}", "--output", "{out}"],
    "inspect": ["inspect", "{graft}"],
}


def use(command: str, graft: Path, tmp_path: Path) -> Ran:
    return run(*(part.format(graft=graft, out=tmp_path / "made") for part in USES[command]))


@pytest.mark.parametrize("command", USES)
def test_a_graft_that_is_cut_off_is_refused_and_nothing_is_written(command: str, graft: Path, tmp_path: Path) -> None:
    content = (graft / "engram.safetensors").read_bytes()
    (graft / "engram.safetensors").write_bytes(content[: len(content) // 2])
    before = tree(tmp_path)
    refused(use(command, graft, tmp_path), graft / "engram.safetensors", "corrupt")
    assert tree(tmp_path) == before


@pytest.mark.parametrize("name", ["engram.safetensors", "adapter_model.safetensors"])
def test_a_graft_with_one_changed_byte_or_a_missing_file_is_refused(name: str, graft: Path) -> None:
    content = bytearray((graft / name).read_bytes())
    content[-1] ^= 1
    (graft / name).write_bytes(content)
    refused(run("generate", graft, "--prompt", "x"), graft / name, "corrupt")
    (graft / name).unlink()
    refused(run("generate", graft, "--prompt", "x"), graft / name, "missing")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda described: '{"format": 1', "corrupt"),
        (lambda described: "[]", "corrupt"),
        (lambda described: {**described, "format": 99}, "format 99"),
        (lambda described: {k: v for k, v in described.items() if k != "tokenizer"}, "tokenizer"),
        (
            lambda described: {**described, "config": {**described["config"], "layer_ids": "two"}},
            "layer_ids",
        ),
        (lambda described: {**described, "config": {**described["config"], "surprise": 1}}, "surprise"),
        (
            lambda described: {**described, "config": {**described["config"], "layer_ids": [1, 3]}},
            "layers.3",
        ),
        (
            lambda described: {**described, "config": {**described["config"], "n_head_per_ngram": 4}},
            "hash.primes",
        ),
    ],
)
@pytest.mark.parametrize("command", ["generate", "inspect"])
def test_a_graft_whose_description_is_damaged_is_refused(
    command: str, change: Any, message: str, graft: Path, tmp_path: Path
) -> None:
    changed = change(read_description(graft))
    if isinstance(changed, str):
        (graft / "engram_config.json").write_text(changed)
    else:
        write_description(graft, changed)
    refused(use(command, graft, tmp_path), message)


@pytest.mark.parametrize("command", ["verify", "probe", "generate", "export"])
def test_a_directory_without_a_graft_is_refused(command: str, tmp_path: Path) -> None:
    (tmp_path / "graft").mkdir()
    refused(
        use(command, tmp_path / "graft", tmp_path),
        tmp_path / "graft",
        "engram_config.json" if command != "probe" else "",
    )
    refused(use(command, tmp_path / "nowhere", tmp_path), tmp_path / "nowhere")
    assert not (tmp_path / "made").exists()


def rebase(graft: Path, base: Path) -> None:
    """Let the graft name another base."""
    described = json.loads((graft / "engram_config.json").read_text())
    described["base"]["name"] = str(base)
    (graft / "engram_config.json").write_text(json.dumps(described))


@pytest.mark.parametrize("command", ["verify", "probe", "generate", "export"])
def test_the_wrong_tokenizer_is_refused(command: str, graft: Path, base: Path, tokenizer: Any, tmp_path: Path) -> None:
    other = Path(shutil.copytree(base, tmp_path / "other"))
    changed = PreTrainedTokenizerFast.from_pretrained(base)
    changed.add_tokens(["<|one more|>"])
    changed.save_pretrained(other)
    rebase(graft, other)
    refused(use(command, graft, tmp_path), "wrong tokenizer", f"{len(tokenizer)} ", f"{len(tokenizer) + 1} ids")
    assert not (tmp_path / "made").exists()


def test_the_wrong_base_is_refused_and_a_copy_of_the_right_one_is_not(graft: Path, base: Path, tmp_path: Path) -> None:
    rebase(graft, Path(shutil.copytree(base, tmp_path / "copy")))
    assert run("generate", graft, "--prompt", "x").code == 0
    other = Path(shutil.copytree(base, tmp_path / "other"))
    tiny_model(seed=1).save_pretrained(other)
    rebase(graft, other)
    refused(run("generate", graft, "--prompt", "x"), "wrong base")
    rebase(graft, tmp_path / "gone")
    refused(run("generate", graft, "--prompt", "x"), "gone", "no such file or directory")


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["generate", "{graft}", "--prompt", " "], "--prompt is empty"),
        (["generate", "{graft}", "--prompt", "x", "--max-new-tokens", "0"], "--max-new-tokens 0"),
        (["generate", "{graft}", "--prompt", "x", "--device", "nowhere"], "'nowhere'"),
        (["generate", "{graft}", "--prompt", "x", "--dtype", "float7"], "float7"),
        (["export", "{graft}", "--output", "{out}", "--max-shard-size", "big"], "big"),
        (["export", "{graft}", "--output", "x" * 300], "File name too long"),
        (
            ["export", "{graft}", "--output", "{out}", "--adapter-only", "--max-shard-size", "1GB"],
            "--max-shard-size has no meaning",
        ),
        (["export", "{graft}", "--output", "{out}", "--layout", "qwen4_exp", "--table-dir", "t"], "--table-dir has no meaning"),
        (["probe", "{graft}", "--batch-size", "0"], "batch_size"),
        (["probe", "{graft}", "--data", "no.jsonl", "--output", "{graft}-elsewhere"], "no.jsonl"),
        (["probe", "{graft}", "--data", "no.jsonl"], "--data needs --output"),
        (["verify"], "either"),
        (["verify", "{graft}", "--base", "x"], "either"),
        (["verify", "--base", "{base}", "--layers", "1", "--lora-rank", "-1"], "rank"),
        (["inspect", "{base}", "--layers", "1", "--set", "gate=soft"], "gate='soft'"),
        (["inspect", "{base}", "--layers", "1", "--set", "gates=soft"], "unknown memory option 'gates'"),
        (["inspect", "{nowhere}"], "no such file or directory"),
    ],
)
def test_the_other_commands_refuse_a_bad_option(arguments: list[str], part: str, graft: Path, base: Path, tmp_path: Path) -> None:
    names = {"graft": graft, "base": base, "out": tmp_path / "made", "nowhere": tmp_path / "no" / "such" / "base"}
    refused(run(*(argument.format(**names) for argument in arguments)), part)
    assert not (tmp_path / "made").exists()


# -- debug, broken promises, interruption


def test_debug_shows_the_traceback_wherever_it_stands() -> None:
    for arguments in (["--debug", "verify"], ["verify", "--debug"]):
        ran = run(*arguments)
        assert ran.code == 2 and "Traceback (most recent call last)" in ran.err and "UserError: give either" in ran.err
    plain = spawn("verify")
    assert "Traceback" not in plain.stderr and plain.returncode == 2


def test_debug_keeps_the_exit_code() -> None:
    assert spawn("verify", "--debug").returncode == 2


def test_a_promise_that_does_not_hold_is_exit_code_1(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = {"max_difference": 1.0, "base": 0.0, "ok": False}
    monkeypatch.setattr("engram_graft.verify.verify_decoding", lambda *a: {"ok": False, "token by token": entry})
    ran = run("verify", trained.out)
    assert ran.code == 1 and ran.err.startswith("error: a promise does not hold")
    assert "FAIL  token by token" in ran.out
    ran = run("verify", trained.out, "--json")
    assert ran.code == 1 and json.loads(ran.out)["ok"] is False


@pytest.mark.parametrize(("error", "code"), [(PromiseError("no identity"), 1), (KeyboardInterrupt(), 130)])
def test_a_run_that_fails_or_is_stopped_leaves_nothing_behind(
    error: BaseException, code: int, base: Path, facts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any) -> None:
        assert (tmp_path / "out" / "recipe.yaml").is_file(), "it fails late"
        raise error

    monkeypatch.setattr("engram_graft.trainer.save_graft", fail)
    ran = run(*train_arguments(base, facts, tmp_path / "out"))
    assert ran.code == code and "Traceback" not in ran.err
    assert list(tmp_path.iterdir()) == []


def test_a_check_that_fails_after_training_keeps_the_graft(
    base: Path, facts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engram_graft.verify.verify_decoding", lambda *a: {"ok": False})
    ran = run(*train_arguments(base, facts, tmp_path / "out"))
    assert ran.code == 1 and (tmp_path / "out" / "engram.safetensors").is_file()


def test_a_fault_of_ours_is_exit_code_3_with_its_traceback(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **named: Any) -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr("engram_graft.checkpoint.load_graft", fail)
    ran = run("verify", trained.out)
    assert ran.code == 3 and "planted" in ran.err and "Traceback" in ran.err


def test_train_refuses_to_start_where_the_fresh_graft_is_no_identity(
    base: Path, facts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh = engram_graft.layer.Engram.reset_parameters

    def nudged(memory: Any) -> None:
        fresh(memory)
        nn.init.constant_(memory.value_proj.weight, 0.01)

    monkeypatch.setattr("engram_graft.layer.Engram.reset_parameters", nudged)
    ran = run(*train_arguments(base, facts, tmp_path / "out"))
    assert ran.code == 1 and "error: identity does not hold" in ran.err and "step " not in ran.err
    assert list(tmp_path.iterdir()) == []


# -- a whole run


def test_train_leaves_exactly_the_documented_files(trained: Trained) -> None:
    assert trained.ran.code == 0, trained.ran.err
    assert {path.name for path in trained.out.iterdir()} == GRAFT_FILES
    assert {path.name for path in trained.merged.iterdir()} == MERGED_FILES


def test_memory_only_without_probes_leaves_fewer_files(base: Path, facts: Path, tmp_path: Path) -> None:
    assert run(*train_arguments(base, facts, tmp_path / "out")).code == 0
    left_out = {"adapter_config.json", "adapter_model.safetensors", "probes.json", "report.html"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == GRAFT_FILES - left_out


def test_train_prints_the_arms_and_what_comes_next(trained: Trained) -> None:
    ran = trained.ran
    for arm in ("base", "graft", "memory_off", "shuffled", "gate_open", "lora_off"):
        assert f"\n {arm} " in ran.out
    assert "identity " in ran.err and "bit for bit" in ran.err
    assert f"engram-graft generate {trained.out}" in ran.err
    named = next(line for line in ran.err.splitlines() if line.startswith("files "))
    assert all((trained.out / name).is_file() for name in named.rpartition(": ")[2].split(", "))


def test_what_train_writes_is_what_scripts_read(trained: Trained, base: Path, facts: Path) -> None:
    lines = [json.loads(line) for line in (trained.out / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    fields = {"step", "loss", "learning_rate", "table_rate", "grad_norm", "rows_touched", "seconds"}
    assert all(fields <= set(line) for line in lines) and "recall" in lines[-1]
    assert all(line["table_rate"] == pytest.approx(5 * line["learning_rate"]) for line in lines)
    recipe = yaml.safe_load((trained.out / "recipe.yaml").read_text())
    assert recipe["base"] == str(base) and recipe["data"] == str(facts) and recipe["train"]["max_steps"] == 3
    assert recipe["engram"]["layer_ids"] == [1, 2] and recipe["engram"]["engram_vocab_size"] == [53, 61]
    identity = json.loads((trained.out / "identity.json").read_text())
    assert identity["bitwise"] is True and identity["logits"] > 0
    assert (trained.out / "report.html").read_text().lower().startswith("<!doctype html>")
    card = (trained.out / "README.md").read_text()
    assert card.startswith("---\n") and "| shuffled |" in card and "load_graft" in card
    assert not list(trained.out.parent.rglob(".writing-*")), "no scratch is left"


def test_probes_json_has_the_documented_keys(trained: Trained) -> None:
    report = json.loads((trained.out / "probes.json").read_text())
    assert list(report["arms"]) == ["base", "graft", "memory_off", "shuffled", "gate_open", "lora_off"]
    for scores in report["arms"].values():
        for part in ("recall", "paraphrase"):
            assert {"greedy_exact", "teacher_forced_exact", "first_token_rank", "answer_ce", "n"} <= set(scores[part])
        assert set(scores["task_exact"]) == {"exact_match", "n"}
    assert {"kl", "kl_hit", "kl_miss", "unchanged_positions"} <= set(report["locality"])
    assert set(report["identity"]) == {"bitwise", "logits"} and report["identity"]["bitwise"] is True


def test_the_saved_recipe_trains_the_same_graft_again(trained: Trained, tmp_path: Path) -> None:
    again = ["--recipe", trained.out / "recipe.yaml", "--output", tmp_path / "again", "--set", "merged=null"]
    ran = run("train", *again, "--no-probe", "--json")
    assert ran.code == 0, ran.err
    assert {"steps", "loss", "identity", "decoding", "rows_touched"} <= set(json.loads(ran.out))
    for name in ("engram.safetensors", "adapter_model.safetensors"):
        one, other = load_file(trained.out / name), load_file(tmp_path / "again" / name)
        assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def test_verify_a_trained_graft(trained: Trained) -> None:
    before = tree(trained.out)
    ran = run("verify", trained.out)
    assert ran.code == 0, ran.err + ran.out
    lines = ran.out.splitlines()
    assert len(lines) == 7 and all(line.startswith("ok  ") for line in lines)
    report = json.loads(run("verify", trained.out, "--json").out)
    assert report["ok"] is True and report["reload"]["bitwise"] is True and report["greedy"] == {"same": 2, "n": 2}
    assert tree(trained.out) == before, "checking writes nothing"


def test_verify_a_merged_model(trained: Trained) -> None:
    ran = run("verify", trained.merged)
    assert ran.code == 0 and "FAIL" not in ran.out


def test_verify_and_generate_do_not_need_the_training_data(graft: Path, tmp_path: Path) -> None:
    recipe = yaml.safe_load((graft / "recipe.yaml").read_text())
    (graft / "recipe.yaml").write_text(yaml.safe_dump({**recipe, "data": str(tmp_path / "elsewhere.jsonl")}))
    assert run("generate", graft, "--prompt", "The cat").code == 0
    ran = run("verify", graft)
    assert ran.code == 0, ran.err
    refused(run("probe", graft), "elsewhere.jsonl")


def test_verify_a_fresh_graft(base: Path) -> None:
    ran = run("verify", "--base", base, "--layers", "1", "--lora-rank", 2, "--json")
    report = json.loads(ran.out)
    assert ran.code == 0 and report["ok"] is True and report["identity"]["bitwise"] is True


def test_probe_again_gives_the_same_numbers_and_keeps_the_identity(trained: Trained, graft: Path) -> None:
    before = json.loads((graft / "probes.json").read_text())
    ran = run("probe", graft, "--json", "--batch-size", 1)
    assert ran.code == 0, ran.err
    report = json.loads(ran.out)
    assert report == json.loads((graft / "probes.json").read_text())
    assert report["identity"] == before["identity"] and report["decoding"] == before["decoding"]
    for arm, scores in before["arms"].items():
        for part in ("recall", "paraphrase", "task_exact"):
            assert report["arms"][arm][part].pop("new", None) == scores[part].pop("new", None)
            assert report["arms"][arm][part] == pytest.approx(scores[part], abs=1e-5)
    assert {path.name for path in graft.iterdir()} == GRAFT_FILES


def test_probe_on_other_data_into_another_directory_leaves_the_graft_alone(graft: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps({"prompt": "Ostrenk exports", "answer": "honey"}) + "\n")
    before = tree(graft)
    ran = run("probe", graft, "--data", other, "--output", tmp_path / "report")
    assert ran.code == 0 and "\n lora_off " in ran.out and "Ostrenk exports" in ran.out
    assert {path.name for path in (tmp_path / "report").iterdir()} == {"probes.json", "report.html"}
    assert tree(graft) == before


@pytest.mark.parametrize("paraphrases", [[], ["Ostrenk sells"]])
def test_probe_on_facts_that_were_not_trained(paraphrases: list[str], graft: Path, tmp_path: Path) -> None:
    """Facts of split "test" are data like any other: they are probed, or refused in one line."""
    held_out = tmp_path / "held-out.jsonl"
    fact = {"prompt": "Ostrenk exports", "answer": "honey", "paraphrases": paraphrases, "split": "test"}
    held_out.write_text(json.dumps(fact) + "\n")
    ran = run("probe", graft, "--data", held_out, "--output", tmp_path / "report")
    if ran.code:
        refused(ran, held_out)
        assert not (tmp_path / "report").exists()


def test_generate_shows_graft_and_base(trained: Trained) -> None:
    ran = run(
        "generate",
        trained.out,
        "--prompt",
        "The cat sleeps in the",
        "--prompt",
        "Velmora exports",
        "--max-new-tokens",
        3,
    )
    assert ran.code == 0, ran.err
    assert [line.split(":")[0].strip() for line in ran.out.splitlines()] == [
        *("The cat sleeps in the", "graft", "base"),
        *("Velmora exports", "graft", "base"),
    ]
    answers = json.loads(run("generate", trained.out, "--prompt", "x", "--json").out)["answers"]
    assert len(answers) == 1 and set(answers[0]) == {"prompt", "graft", "base"}
    merged = run("generate", trained.merged, "--prompt", "The cat sleeps in the", "--max-new-tokens", 3)
    assert merged.code == 0 and merged.out.splitlines()[1] == ran.out.splitlines()[1], "merged answers as the graft does"


def test_generate_streams_what_it_prints_at_once(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ["generate", trained.out, "--prompt", "The cat sleeps in the", "--prompt", "Velmora exports", "--max-new-tokens", 6]
    whole, streamed = run(*asked, "--no-stream"), run(*asked, "--stream")
    assert streamed.code == 0, streamed.err
    assert streamed.out == whole.out == run(*asked).out and streamed.out.count("\n") == 6

    pieces: list[str] = []
    real = generate._Streamer._show

    def show(streamer: Any, text: str) -> None:
        pieces.append(text)
        real(streamer, text)

    monkeypatch.setattr(generate._Streamer, "_show", show)
    run(*asked[:4], "--max-new-tokens", 6, "--stream")
    assert len(pieces) > 4 and len(set(pieces)) > 2, "it comes piece by piece"
    refused(run(*asked, "--stream", "--json"), "give one of them")


def test_a_stream_holds_back_half_a_character_and_quotes_as_the_whole_does(capsys: Any) -> None:
    class Words:
        eos_token_id = 9
        texts: ClassVar = {1: "caf", 2: "caf\ufffd", 3: 'café "x" ', 4: 'café "x" \n\\'}

        def decode(self, ids: list[int], **options: Any) -> str:
            return self.texts[len(ids)]

    streamer, seen = generate._Streamer(Words()), []
    for token in ([5, 5], [1], [2], [3], [4], [9]):  # the prompt first, eos last
        streamer.put(torch.tensor(token))
        seen.append(capsys.readouterr().out)
    streamer.finish(Words.texts[4])
    assert seen == ["", "caf", "", 'é \\"x\\"', " \\n\\\\", ""] and capsys.readouterr().out == '"\n'


def test_generate_takes_several_grafts_as_packs(trained: Trained, graft: Path) -> None:
    prompt = ["--prompt", "The cat sleeps in the", "--max-new-tokens", 3]
    ran = run("generate", trained.out, graft, *prompt)
    assert ran.code == 0, ran.err
    assert [line.split(":")[0].strip() for line in ran.out.splitlines()] == [
        *("The cat sleeps in the", "out", "graft", "all together", "base")
    ]
    assert run("generate", trained.out, graft, *prompt, "--stream").out == ran.out
    (answer,) = json.loads(run("generate", f"one={trained.out}", f"two={graft}", *prompt, "--json").out)["answers"]
    assert set(answer) == {"prompt", "packs", "together", "base"} and set(answer["packs"]) == {"one", "two"}
    (alone,) = json.loads(run("generate", graft, *prompt, "--json").out)["answers"]
    assert answer["packs"]["two"] == answer["packs"]["one"] == alone["graft"] and answer["base"] == alone["base"]
    refused(run("generate", graft, graft, *prompt), "both named 'graft'", f"another={graft}")
    refused(run("generate", graft, f"a b={graft}", *prompt), "is named 'a b'", f"pack={graft}")
    refused(run("generate", f"base={graft}", graft, *prompt), "named 'base'", "pack=")
    refused(run("generate", f"a.b={graft}", graft, *prompt), "'a.b'", "letters, digits")
    refused(run("generate", graft, graft / "nowhere", *prompt), "nowhere", "no graft here")


def test_export_writes_what_train_merged(trained: Trained, tmp_path: Path) -> None:
    ran = run("export", trained.out, "--output", tmp_path / "m", "--json")
    assert ran.code == 0, ran.err
    report = json.loads(ran.out)
    assert {"max_difference", "flips", "positions", "bytes"} <= set(report)
    assert report["max_difference"] < 1e-4 and report["flips"] == 0
    assert {path.name for path in (tmp_path / "m").iterdir()} == MERGED_FILES
    one, other = load_file(trained.merged / "model.safetensors"), load_file(tmp_path / "m" / "model.safetensors")
    assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def test_inspect_a_graft_counts_what_training_touched(trained: Trained) -> None:
    assert run("inspect", trained.out).code == 0
    report = json.loads(run("inspect", trained.out, "--json").out)
    tensors = load_file(trained.out / "engram.safetensors")
    assert report["vocabulary"] == 320 and report["compressed"] < 320
    assert [(row["layer"], row["order"]) for row in report["layers"]] == [(1, 2), (1, 3), (2, 2), (2, 3)]
    for layer in (1, 2):
        rows = [row for row in report["layers"] if row["layer"] == layer]
        assert sum(row["seen_rows"] for row in rows) == len(tensors[f"layers.{layer}.table.rows"])
        assert sum(row["rows"] for row in rows) == int(tensors["hash.primes"][layer - 1].sum())
        assert all(0 < row["coverage_min"] <= row["coverage_max"] <= 1 and 0 < row["false_positives"] < 1 for row in rows)
    assert json.loads(run("inspect", trained.merged, "--json").out)["layers"] == report["layers"]


@pytest.mark.parametrize(
    "changes", [{}, {"conv": False}, {"bias": True}, {"max_ngram_size": 4, "engram_vocab_size": [53, 61, 67]}]
)
def test_inspect_a_base_says_what_a_graft_will_cost(changes: dict[str, Any], base: Path, tokenizer: Any) -> None:
    options = {**TINY_ENGRAM, **changes}
    settings = [part for k, v in options.items() if k != "layer_ids" for part in ("--set", f"{k}={json.dumps(v)}")]
    ran = run("inspect", base, "--layers", "1,2", *settings, "--json")
    assert ran.code == 0, ran.err
    report = json.loads(ran.out)
    model: Any = tiny_model()
    eg.graft(model, tokenizer, eg.EngramConfig(**options))
    for row, memory in zip(report["layers"], memories(model), strict=True):
        assert row["layer"] == memory.layer_id and row["rows"] == len(memory.table.weight)
        assert row["table_parameters"] == memory.table.weight.numel()
        dense = sum(parameter.numel() for parameter in memory.parameters()) - memory.table.weight.numel()
        assert row["dense_parameters"] == dense
    parameters = sum(p.numel() for memory in memories(model) for p in memory.parameters())
    assert report["parameters"] == parameters and report["bytes"] == 4 * parameters
    assert run("inspect", base, "--layers", "1,2", *settings).code == 0


def test_train_on_a_folder_of_text(base: Path, tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("The river rises in the hills and the cats sleep in the sun. " * 3)
    ran = run(
        *("train", "--base", base, "--data", tmp_path / "notes", "--output", tmp_path / "out", "--layers", "1"),
        *("--steps", 1, "--lora-rank", 0, *SMALL),
    )
    assert ran.code == 0, ran.err
    report = json.loads((tmp_path / "out" / "probes.json").read_text())
    assert all("text" in scores for scores in report["arms"].values())
    ran = run("verify", tmp_path / "out")
    assert ran.code == 0 and "not checked: greedy answers with and without cache: it was trained on text" in ran.out


def test_checkpoints_hold_the_graft_and_not_the_base(base: Path, facts: Path, tmp_path: Path) -> None:
    arguments = train_arguments(base, facts, tmp_path / "out", steps=2)
    assert run(*arguments, "--set", "train.save_steps=1").code == 0
    saved = {path.name for path in (tmp_path / "out" / "checkpoint-1").iterdir()}
    assert {"engram.safetensors", "engram_config.json", "optimizer.safetensors", "trainer_state.json"} <= saved
    assert not {"model.safetensors", "pytorch_model.bin"} & saved


def test_bench_measures_each_part_in_one_run_and_draws_it(base: Path, tmp_path: Path) -> None:
    small = ["--base", base, "--layers", "1,2", "--rounds", "1", "--rows", "10000,20000"]
    ran = run("bench", *small, "--table-dir", tmp_path / "tables", "--mapped-rows", 40000, "--output", tmp_path / "out", "--json")
    report = json.loads(ran.out)
    assert ran.code == 0 and report["rounds"] == 1, ran.err
    for part in ("step", "prefill"):
        row = report[part]
        assert row["base_ms"] > 0 and row["ratio"] == pytest.approx(row["graft_ms"] / row["base_ms"])
    assert 0 < report["hashing"]["us_per_token"] < 10 and report["hashing"]["rows_per_token"] == 32
    sizes = report["training"]["sizes"]
    assert [round(size["rows"], -4) for size in sizes] == [10000, 20000] and all(size["rows_touched"] > 500 for size in sizes)
    steps = [size["step_ms"] for size in sizes]
    assert report["training"]["ratio"] == pytest.approx(max(steps) / min(steps))
    assert report["tiers"]["mapped_bytes"] > 1.5 * report["tiers"]["resident_bytes"]
    for part in ("training", "inference", "decoding"):
        entry = report["tiers"][part]
        assert entry["ratio"] == pytest.approx(entry["mapped"] / entry["resident"])
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"bench.json", "bench.png"}
    assert json.loads((tmp_path / "out" / "bench.json").read_text()) == report
    ran = run("bench", *small)
    assert ran.code == 0 and "graft/base" in ran.out and "slowest/fastest" in ran.out
    refused(run("bench", "--base", base, "--rows", "10,x"), "--rows '10,x'")
    refused(run("bench", "--base", base, "--mapped-rows", "5000"), "with --table-dir")
    refused(run("bench", "--base", base, "--rounds", "0"), "--rounds 0")
