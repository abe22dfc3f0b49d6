"""`transformers serve` on a merged directory: a real server process on loopback, asked over HTTP, answers what the model itself does."""

import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TINY_ENGRAM, randomize, tiny_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import engram_graft as eg

MISSING = [name for name in ("fastapi", "uvicorn", "openai") if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"{', '.join(MISSING)} not installed: pip install 'transformers[serving]'")
MESSAGES = [{"role": "user", "content": "The river rises"}]
TOKENS = 16


@contextmanager
def serving(directory: Path, log: Path, *options: str) -> Iterator[str]:
    """`transformers serve` on a free port; gives its address, and always ends it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "transformers.cli.transformers", "serve", str(directory)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--device", "cpu", *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with log.open("wb") as output:
        server = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
    try:
        deadline = time.monotonic() + 120
        while True:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
                    assert json.load(answer) == {"status": "ok"}
                break
            except (urllib.error.URLError, ConnectionError):
                assert server.poll() is None and time.monotonic() < deadline, log.read_text()
                time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


@pytest.fixture(scope="module")
def merged(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    """A merged directory with a chat template, whose memory speaks up."""
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    model = tiny_model()
    eg.graft(model, tokenizer, eg.EngramConfig(**TINY_ENGRAM))
    randomize(model, scale=2.0)
    folder = tmp_path_factory.mktemp("served") / "merged"
    eg.export_merged(model, tokenizer, folder)
    tokenizer.chat_template = None
    return folder


@pytest.fixture(scope="module")
def server(merged: Path) -> Iterator[str]:
    with serving(merged, merged.parent / "log", "--trust-remote-code") as address:
        yield address


def own_answer(directory: Path, trust: bool) -> str:
    """What `generate` gives, greedily."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=trust)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    asked = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        ids = model.generate(**asked, max_new_tokens=TOKENS, do_sample=False)  # type: ignore[operator]
    return str(tokenizer.decode(ids[0, asked["input_ids"].shape[1] :], skip_special_tokens=True))


def ask(address: str, directory: Path, **more: Any) -> list[dict[str, Any]]:
    """The answer, or every chunk of it when streamed."""
    body = {"model": str(directory), "messages": MESSAGES, "max_tokens": TOKENS, "temperature": 0, **more}
    request = urllib.request.Request(
        f"{address}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        if not more.get("stream"):
            return [json.load(answer)]
        assert answer.headers["Content-Type"].startswith("text/event-stream")
        lines = [line.decode().removeprefix("data: ").strip() for line in answer if line.startswith(b"data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def test_a_merged_directory_is_served_with_its_memory(server: str, merged: Path) -> None:
    with urllib.request.urlopen(f"{server}/v1/models", timeout=10) as answer:
        assert [model["id"] for model in json.load(answer)["data"]] == [str(merged)]
    (reply,) = ask(server, merged)
    text = reply["choices"][0]["message"]["content"]
    assert text == own_answer(merged, trust=True)
    assert text != own_answer(merged, trust=False), "control: the base alone says something else"
    assert reply["usage"]["completion_tokens"] <= TOKENS


def test_the_streamed_answer_is_the_same_in_pieces(server: str, merged: Path) -> None:
    chunks = ask(server, merged, stream=True)
    pieces = [choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"]]
    assert "".join(pieces) == own_answer(merged, trust=True)
    assert len([piece for piece in pieces if piece]) > 1, "it comes in pieces"


def test_the_openai_client_gets_it_too(server: str, merged: Path) -> None:
    from openai import OpenAI

    client: Any = OpenAI(base_url=f"{server}/v1", api_key="none")
    asked = {"model": str(merged), "messages": MESSAGES, "max_tokens": TOKENS, "temperature": 0}
    assert client.chat.completions.create(**asked).choices[0].message.content == own_answer(merged, trust=True)
    streamed = client.chat.completions.create(**asked, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == own_answer(merged, trust=True)


def test_two_conversations_at_once_do_not_mix(server: str, merged: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    other = [{"role": "user", "content": "To make bread, mix"}]
    asked = [MESSAGES, other] * 3
    alone = [ask(server, merged, messages=messages)[0]["choices"][0]["message"]["content"] for messages in (MESSAGES, other)]
    with ThreadPoolExecutor(6) as pool:
        replies = list(pool.map(lambda messages: ask(server, merged, messages=messages)[0], asked))
    assert [reply["choices"][0]["message"]["content"] for reply in replies] == alone * 3 and alone[0] != alone[1]


@pytest.mark.parametrize("damaged", [False, True])
def test_without_the_flag_or_with_a_damaged_file_it_is_not_served_as_the_base(
    damaged: bool, merged: Path, tmp_path: Path
) -> None:
    """Either way transformers goes on to look for a class of the architecture's name, and would have served the base if it had one."""
    directory = Path(shutil.copytree(merged, tmp_path / "merged"))
    if damaged:
        weights = bytearray((directory / "model.safetensors").read_bytes())
        weights[-3] ^= 1
        (directory / "model.safetensors").write_bytes(weights)
    options = ["--trust-remote-code"] if damaged else []
    ends = pytest.raises(AssertionError, match="transformers has no attribute .?EngramLlamaForCausalLM")
    with ends, serving(directory, tmp_path / "log", *options):
        pass


def test_the_base_alone_is_written_for_other_servers(merged: Path, tmp_path: Path) -> None:
    """As docs/serving.md does it."""
    model: Any = AutoModelForCausalLM.from_pretrained(merged)
    for name in ("auto_map", "engram_graft"):
        delattr(model.config, name)
    model.save_pretrained(tmp_path / "plain")
    AutoTokenizer.from_pretrained(merged).save_pretrained(tmp_path / "plain")
    assert set(load_file(tmp_path / "plain" / "model.safetensors")) == set(tiny_model().state_dict())
    assert not {"auto_map", "engram_graft"} & json.loads((tmp_path / "plain" / "config.json").read_text()).keys()
    assert own_answer(tmp_path / "plain", trust=False) == own_answer(merged, trust=False)
