"""Results appear whole or not at all, and nobody's files are lost to a run that fails."""

from pathlib import Path

import pytest

from engram_graft.errors import UserError
from engram_graft.output import all_or_nothing, new_directory


class Stop(Exception):
    pass


def tree(directory: Path) -> dict[str, bytes | None]:
    """Every path below `directory` with its contents; None for a folder."""
    return {str(p.relative_to(directory)): p.read_bytes() if p.is_file() else None for p in directory.rglob("*")}


# -- new_directory


@pytest.mark.parametrize("exists", [False, True])
def test_new_directory_makes_one_or_takes_an_empty_one(exists: bool, tmp_path: Path) -> None:
    target = tmp_path / "a" / "out"
    if exists:
        target.mkdir(parents=True)
    with new_directory(target) as directory:
        (directory / "file").write_text("x")
    assert tree(target) == {"file": b"x"}


@pytest.mark.parametrize("name", ["file", ".hidden", "folder/"])
def test_new_directory_refuses_one_that_is_not_empty_and_leaves_it_alone(name: str, tmp_path: Path) -> None:
    if name.endswith("/"):
        (tmp_path / name).mkdir()
    else:
        (tmp_path / name).write_text("mine")
    before = tree(tmp_path)
    with pytest.raises(UserError, match="exists and is not empty; choose another"), new_directory(tmp_path):
        raise AssertionError("the block must not run")
    assert tree(tmp_path) == before


def test_new_directory_refuses_a_file_and_a_place_below_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UserError, match="exists and is not empty"), new_directory(tmp_path / "file"):
        raise AssertionError
    with (
        pytest.raises(UserError, match=r"cannot be made \(Not a directory\)"),
        new_directory(tmp_path / "file" / "out"),
    ):
        raise AssertionError
    assert tree(tmp_path) == {"file": b"mine"}


@pytest.mark.parametrize("error", [Stop, KeyboardInterrupt, SystemExit])
def test_new_directory_is_gone_when_the_block_fails(error: type[BaseException], tmp_path: Path) -> None:
    with pytest.raises(error), new_directory(tmp_path / "out") as directory:
        (directory / "sub").mkdir()
        (directory / "sub" / "half").write_text("x")
        raise error
    assert tree(tmp_path) == {}


def test_new_directory_is_empty_again_when_it_was_there_before(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(Stop), new_directory(tmp_path / "out") as directory:
        (directory / "half").write_text("x")
        raise Stop
    assert tree(tmp_path) == {"out": None}


def test_new_directory_stays_when_it_holds_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(Stop), new_directory(tmp_path / "out") as directory:
        (directory / "checkpoint-4").mkdir()
        (directory / "checkpoint-4" / "state").write_text("x")
        raise Stop
    assert tree(tmp_path) == {"out": None, "out/checkpoint-4": None, "out/checkpoint-4/state": b"x"}


def test_new_directory_through_a_link_gives_the_blocks_own_error_and_keeps_the_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "disk")
    with pytest.raises(Stop), new_directory(tmp_path / "out") as directory:
        (directory / "half").write_text("x")
        raise Stop
    assert tree(tmp_path / "disk") == {} and (tmp_path / "out").is_symlink()


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), Exception("No space left on device (os error 28)")])
def test_new_directory_says_in_one_line_that_the_disk_is_full(error: Exception, tmp_path: Path) -> None:
    with (
        pytest.raises(UserError, match="cannot be written .No space left on device.$"),
        new_directory(tmp_path / "out") as directory,
    ):
        (directory / "half").write_text("x")
        raise error
    assert not (tmp_path / "out").exists()


def test_new_directory_refuses_a_name_that_cannot_be_one(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be a directory .File name too long"), new_directory(tmp_path / ("x" * 300)):
        raise AssertionError


# -- all_or_nothing


def test_all_or_nothing_moves_files_and_folders_and_keeps_others(tmp_path: Path) -> None:
    (tmp_path / "old").write_text("stays")
    (tmp_path / "new").write_text("replaced")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "gone").write_text("replaced")
    with all_or_nothing(tmp_path) as scratch:
        (scratch / "new").write_text("new")
        (scratch / "folder").mkdir()
        (scratch / "folder" / "inner").write_text("new")
        assert (tmp_path / "new").read_text() == "replaced", "nothing moves before the end"
    assert tree(tmp_path) == {"old": b"stays", "new": b"new", "folder": None, "folder/inner": b"new"}


@pytest.mark.parametrize("error", [Stop, KeyboardInterrupt])
def test_all_or_nothing_leaves_old_files_whole_when_the_block_fails(error: type[BaseException], tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("old")
    with pytest.raises(error), all_or_nothing(tmp_path) as scratch:
        (scratch / "kept").write_text("half of the ne")
        (scratch / "more").write_text("x")
        raise error
    assert tree(tmp_path) == {"kept": b"old"}


def test_all_or_nothing_leaves_no_file_in_a_new_directory_when_the_block_fails(tmp_path: Path) -> None:
    with pytest.raises(Stop), all_or_nothing(tmp_path / "a" / "out") as scratch:
        (scratch / "half").write_text("x")
        raise Stop
    assert not any(path.is_file() for path in tmp_path.rglob("*"))


def test_all_or_nothing_refuses_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for place in (tmp_path / "file", tmp_path / "file" / "out"):
        with pytest.raises(UserError, match="cannot be"), all_or_nothing(place):
            raise AssertionError
    assert tree(tmp_path) == {"file": b"mine"}
