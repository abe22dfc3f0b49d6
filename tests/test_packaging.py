"""The wheel holds every module and the probes' text and nothing else; the public names are the documented ten."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import engram_graft

ROOT = Path(__file__).parents[1]
PACKAGES = {"engram_graft": "engram_graft", "engram_graft.cli": "cli", "engram_graft.probes": "probes"}
PUBLIC = [
    *("EngramConfig", "graft", "ungraft", "disable_graft", "trainable_parameters"),
    *("verify_identity", "train", "save_graft", "load_graft", "export_merged", "use_packs", "remove_pack", "push_to_hub"),
]


def modules() -> list[str]:
    """Every module of the source tree by the name it is installed under."""
    names = []
    for package, folder in PACKAGES.items():
        for path in sorted((ROOT / folder).glob("*.py")):
            names.append(package if path.stem == "__init__" else f"{package}.{path.stem}")
    return names


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of the source so that the tree is not littered."""
    source = tmp_path_factory.mktemp("source") / "tree"
    left_out = (".*", "runs", "build", "dist", "tests", "*.egg-info", "__pycache__", "typings")
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(*left_out))
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        str(source / "out"),
        ".",
    ]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = (source / "out").glob("engram_graft-*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("installed")
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", str(target), str(wheel)]
    done = subprocess.run(command, cwd=target, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return target


def python(installed: Path, *arguments: str) -> str:
    """What a fresh interpreter that finds the installed wheel first prints; it must succeed."""
    environment = {**os.environ, "PYTHONPATH": str(installed), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=installed.anchor, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_case_28_every_module_imports_from_the_wheel(installed: Path) -> None:
    names = modules()
    assert len(names) > 30 and {
        "engram_graft.cli.__main__",
        "engram_graft.probes.suite",
        "engram_graft.trainer",
    } <= set(names)
    code = f"from importlib import import_module as i\nfor name in {names}: print(name, i(name).__file__)"
    for line in python(installed, "-c", code).splitlines():
        name, _, file = line.partition(" ")
        assert Path(file).is_relative_to(installed), f"{name} is imported from {file}"
        names.remove(name)
    assert names == []


def test_case_28_the_neutral_text_is_in_the_wheel(installed: Path) -> None:
    read = "files('engram_graft.probes').joinpath('neutral.txt').read_text('utf-8')"
    code = f"from importlib.resources import files; print({read}, end='')"
    assert python(installed, "-c", code) == (ROOT / "probes" / "neutral.txt").read_text(encoding="utf-8")


def test_case_28_the_command_runs_from_the_wheel(installed: Path) -> None:
    assert "Examples:" in python(installed, "-m", "engram_graft.cli", "--help")
    assert "engram_graft.cli:main" in next(installed.glob("engram_graft-*.dist-info/entry_points.txt")).read_text()


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert tops == {"engram_graft", next(top for top in tops if top.endswith(".dist-info"))}, "no top-level cli or probes"
    package = {name for name in names if name.startswith("engram_graft/")}
    expected = {f"{name.replace('.', '/')}{'/__init__' if name in PACKAGES else ''}.py" for name in modules()}
    pages = {f"engram_graft/probes/{name}.html.jinja" for name in ("page", "report", "compare")}
    assert package == expected | pages | {"engram_graft/py.typed", "engram_graft/probes/neutral.txt"}


def test_the_wheel_says_what_it_needs_and_carries_readme_and_licence(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    metadata = archive.read(next(name for name in archive.namelist() if name.endswith("/METADATA"))).decode()
    for needed in ("torch", "transformers", "peft", "safetensors", "typer", "PyYAML"):
        assert f"Requires-Dist: {needed}" in metadata
    assert f"Version: {engram_graft.__version__}\n" in metadata
    assert "# " in metadata.partition("\n\n")[2], "the readme is the description"
    assert any(name.endswith("/licenses/LICENSE") for name in archive.namelist())


# -- the public names


def test_the_public_names_are_the_thirteen_documented_ones() -> None:
    assert len(PUBLIC) == 13 and sorted(engram_graft.__all__) == sorted(PUBLIC)
    assert dir(engram_graft) == sorted(engram_graft.__all__)
    for name in PUBLIC:
        value = getattr(engram_graft, name)
        assert callable(value) and value.__module__.startswith("engram_graft.") and value.__doc__


def test_a_public_name_stays_a_function_whatever_was_imported_before() -> None:
    lines = [
        "import sys, types",
        "import engram_graft",
        "assert not {'torch', 'transformers'} & set(sys.modules), 'import engram_graft is quick'",
        *(f"import {name}" for name in modules() if name != "engram_graft.cli.__main__"),
        f"from engram_graft import {', '.join(PUBLIC)}",
        f"print([type(value) is types.FunctionType for value in ({', '.join(PUBLIC[1:])})])",
        "print(isinstance(EngramConfig, type))",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, env=environment, timeout=300)
    assert done.stdout.split("\n")[:2] == [str([True] * 12), "True"], done.stdout + done.stderr


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(AttributeError, match="no attribute 'engraft'; it offers EngramConfig, disable_graft"):
        _ = engram_graft.engraft
    assert not hasattr(engram_graft, "graph")
