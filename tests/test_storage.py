"""Tables in files: the same bits as in memory, refused when they cannot be whole, shared by nobody."""

import copy
import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TINY_ENGRAM, tiny_model
from test_train import FACTS, recipe

import engram_graft as eg
from engram_graft.errors import UserError
from engram_graft.files import memory_tensors
from engram_graft.grafted import memories
from engram_graft.mapped import Mapped
from engram_graft.read_ahead import _reader, in_background
from engram_graft.storage import Resident

CONFIG = {**TINY_ENGRAM, "seen_filter": True}
CPU = torch.device("cpu")


def trained(tokenizer: Any, table_dir: Path | None, output: Path | None = None, **changes: Any) -> Any:
    model = eg.graft(tiny_model(), tokenizer, eg.EngramConfig(**CONFIG), table_dir)
    eg.train(model, tokenizer, recipe(output, max_steps=6, **changes), FACTS)
    return model


@pytest.fixture
def no_room(monkeypatch: Any) -> None:
    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)


def test_training_and_inference_are_bit_equal_to_tables_in_memory(tokenizer: Any, tmp_path: Path, ids: torch.Tensor) -> None:
    resident, mapped = trained(tokenizer, None), trained(tokenizer, tmp_path)
    one, two = memory_tensors(resident), memory_tensors(mapped)
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
    assert torch.equal(resident(ids).logits, mapped(ids).logits)
    written = {path.name for path in tmp_path.iterdir()}
    assert {"layer1.bin", "layer2.bin"} < written and any("exp_avg_sq" in name for name in written), "control: it was in files"
    assert [type(memory.table.storage) for memory in memories(mapped)] == [Mapped, Mapped]


def test_a_saved_graft_loads_into_files_and_a_second_load_uses_them_again(
    tokenizer: Any, tmp_path: Path, ids: torch.Tensor
) -> None:
    expected = trained(tokenizer, None, tmp_path / "graft")(ids).logits
    tables, files = tmp_path / "tables", []
    for _ in range(3):
        model, _ = eg.load_graft(tmp_path / "graft", tiny_model(), tokenizer, table_dir=tables)
        assert torch.equal(model(ids).logits, expected)
        files.append(inodes(tables))
        with torch.no_grad():  # what a reader does to its rows stays its own, of the first load too
            memories(model)[0].table.weight.fill_(7.0)
        del model
    assert len(files[0]) == 2 and files[0] == files[1] == files[2]
    eg.load_graft(tmp_path / "graft", tiny_model(), tokenizer, trainable=True, table_dir=tables)
    assert not (tables / "tables.json").exists(), "files that training may change are not taken for the graft's again"
    model, _ = eg.load_graft(tmp_path / "graft", tiny_model(), tokenizer, table_dir=tables)
    assert torch.equal(model(ids).logits, expected) and inodes(tables) != files[0], "control: filled anew"


def test_training_twice_begins_twice_with_no_moments(tokenizer: Any, tmp_path: Path) -> None:
    ends = []
    for table_dir in (None, tmp_path):
        model = trained(tokenizer, table_dir)
        eg.train(model, tokenizer, recipe(max_steps=3), FACTS)
        ends.append(memory_tensors(model))
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def inodes(tables: Path) -> dict[str, tuple[int, int]]:
    """Which files these are: one that is made anew has another number or time."""
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in tables.glob("*.bin")}


def test_two_readers_share_the_files(tokenizer: Any, tmp_path: Path, ids: torch.Tensor) -> None:
    expected = trained(tokenizer, None, tmp_path / "graft")(ids).logits
    readers = [eg.load_graft(tmp_path / "graft", tiny_model(), tokenizer, table_dir=tmp_path / "tables")[0] for _ in range(2)]
    assert all(torch.equal(reader(ids).logits, expected) for reader in readers)
    with pytest.raises(UserError, match="in use by another run"):
        eg.load_graft(tmp_path / "graft", tiny_model(), tokenizer, trainable=True, table_dir=tmp_path / "tables")


def test_a_loaded_graft_takes_other_rows_and_its_files_keep_theirs(tokenizer: Any, tmp_path: Path, ids: torch.Tensor) -> None:
    expected = trained(tokenizer, None, tmp_path / "graft")(ids).logits
    other = trained(tokenizer, None, seed=5)
    for _ in range(2):
        model, _ = eg.load_graft(tmp_path / "graft", tiny_model(), tokenizer, table_dir=tmp_path / "tables")
        assert torch.equal(model(ids).logits, expected)
        model.load_state_dict(other.state_dict())
        assert torch.equal(model(ids).logits, other(ids).logits) and not torch.equal(other(ids).logits, expected)
        del model


def test_files_that_are_only_read_cannot_be_trained_and_the_error_says_how(tokenizer: Any, tmp_path: Path) -> None:
    trained(tokenizer, None, tmp_path / "graft")
    model, _ = eg.load_graft(tmp_path / "graft", tiny_model(), tokenizer, table_dir=tmp_path / "tables")
    with pytest.raises(UserError, match="load it with trainable=True"):
        eg.train(model, tokenizer, recipe(max_steps=1), FACTS)
    del model
    model, _ = eg.load_graft(tmp_path / "graft", tiny_model(), tokenizer, trainable=True, table_dir=tmp_path / "more")
    resident, _ = eg.load_graft(tmp_path / "graft", tiny_model(), tokenizer, trainable=True)
    for subject in (model, resident):
        eg.train(subject, tokenizer, recipe(max_steps=3), FACTS)
    one, two = memory_tensors(model), memory_tensors(resident)
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_a_second_run_in_a_used_directory_finds_nothing_of_the_first(tokenizer: Any, tmp_path: Path) -> None:
    wide = {**CONFIG, "engram_vocab_size": (5003, 5009)}
    ends = []
    for _ in range(2):
        model = eg.graft(tiny_model(), tokenizer, eg.EngramConfig(**wide), tmp_path)
        eg.train(model, tokenizer, recipe(max_steps=6, batch_size=1), FACTS)
        ends.append({name: tensor.clone() for name, tensor in memory_tensors(model).items()})
        del model
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_files_of_another_graft_are_filled_anew(tokenizer: Any, tmp_path: Path, ids: torch.Tensor) -> None:
    seen = []
    for seed in (0, 1):
        graft = tmp_path / f"graft{seed}"
        expected = trained(tokenizer, None, graft, seed=seed)(ids).logits
        model, _ = eg.load_graft(graft, tiny_model(), tokenizer, table_dir=tmp_path / "tables")
        assert torch.equal(model(ids).logits, expected)
        seen.append(inodes(tmp_path / "tables"))
        del model
    assert seen[0] != seen[1]


def test_read_only_files_serve_inference(tokenizer: Any, tmp_path: Path, ids: torch.Tensor) -> None:
    expected = trained(tokenizer, None, tmp_path / "graft")(ids).logits
    eg.load_graft(tmp_path / "graft", tiny_model(), tokenizer, table_dir=tmp_path / "tables")
    for path in (tmp_path / "tables").iterdir():
        path.chmod(0o444)
    model, _ = eg.load_graft(tmp_path / "graft", tiny_model(), tokenizer, table_dir=tmp_path / "tables")
    assert torch.equal(model(ids).logits, expected)


def test_a_truncated_file_is_refused_with_both_sizes(tokenizer: Any, tmp_path: Path) -> None:
    trained(tokenizer, None, tmp_path / "graft")
    eg.load_graft(tmp_path / "graft", tiny_model(), tokenizer, table_dir=tmp_path / "tables")
    os.truncate(tmp_path / "tables" / "layer1.bin", 100)
    with pytest.raises(UserError, match=r"layer1.bin: 100 bytes, the table has \d,\d+"):
        eg.load_graft(tmp_path / "graft", tiny_model(), tokenizer, table_dir=tmp_path / "tables")


@pytest.mark.parametrize("text", ["{", "[]", '{"source": 1}', ""])
def test_files_with_a_broken_stamp_are_filled_anew(text: str, tokenizer: Any, tmp_path: Path, ids: torch.Tensor) -> None:
    expected = trained(tokenizer, None, tmp_path / "graft")(ids).logits
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / "tables.json").write_text(text)
    model, _ = eg.load_graft(tmp_path / "graft", tiny_model(), tokenizer, table_dir=tmp_path / "tables")
    assert torch.equal(model(ids).logits, expected)


def test_a_full_disk_is_an_error_up_front_that_leaves_no_file_and_no_graft(tokenizer: Any, tmp_path: Path, no_room: None) -> None:
    model = tiny_model()
    with pytest.raises(UserError, match=r"layer1.bin: No space left on device; .* MB are needed, .* MB are free"):
        eg.graft(model, tokenizer, eg.EngramConfig(**CONFIG), tmp_path)
    assert not list(tmp_path.glob("*.bin")) and not any("engram" in name for name in model.state_dict())


def test_a_table_whose_second_file_does_not_fit_leaves_no_first(tmp_path: Path, monkeypatch: Any) -> None:
    storage = Mapped(tmp_path)
    storage.empty("layer1", (4, 2), torch.float32, CPU)
    monkeypatch.setattr(os, "posix_fallocate", lambda *args: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left")))
    with pytest.raises(UserError, match="layer2.bin"):
        storage.empty("layer2", (4, 2), torch.float32, CPU)
    assert not list(tmp_path.glob("*.bin"))


def test_a_disk_that_fills_up_while_training_leaves_the_last_checkpoint_whole(
    tokenizer: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    model = eg.graft(tiny_model(), tokenizer, eg.EngramConfig(**CONFIG), tmp_path / "tables")
    allocate, calls = os.posix_fallocate, []

    def fills_up(handle: int, start: int, size: int) -> None:
        if (tmp_path / "run" / "checkpoint-2").is_dir():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        calls.append(size)
        allocate(handle, start, size)

    monkeypatch.setattr(os, "posix_fallocate", fills_up)
    with pytest.raises(UserError, match="No space left"):
        eg.train(model, tokenizer, recipe(tmp_path / "run", max_steps=20, batch_size=1, save_steps=2), FACTS)
    assert calls and not list((tmp_path / "run").glob(".writing*"))
    monkeypatch.undo()
    loaded, _ = eg.load_graft(tmp_path / "run" / "checkpoint-2", tiny_model(), tokenizer)
    assert memories(loaded)[0].table.count_seen()


def test_one_run_at_a_time_uses_a_directory(tmp_path: Path) -> None:
    first = Mapped(tmp_path)
    with pytest.raises(UserError, match="in use by another run"):
        Mapped(tmp_path)
    del first
    Mapped(tmp_path)


def test_a_directory_that_cannot_be_made_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="table directory"):
        Mapped(tmp_path / "file")


def test_a_copy_of_a_mapped_model_is_its_own_and_leaves_no_file(tokenizer: Any, tmp_path: Path, ids: torch.Tensor) -> None:
    model = trained(tokenizer, tmp_path)
    before, expected = sorted(path.name for path in tmp_path.iterdir()), model(ids).logits
    twin = copy.deepcopy(model)
    with torch.no_grad():
        memories(twin)[0].table.weight.zero_()
    assert torch.equal(model(ids).logits, expected) and sorted(path.name for path in tmp_path.iterdir()) == before


def test_a_mapped_table_stays_in_its_dtype_and_says_so(tokenizer: Any, tmp_path: Path) -> None:
    model = eg.graft(tiny_model(), tokenizer, eg.EngramConfig(**CONFIG), tmp_path)
    with pytest.raises(UserError, match="a table in files stays torch.float32"):
        model.to(torch.bfloat16)


def test_a_table_too_large_for_memory_is_a_user_error_that_names_the_way_out(tokenizer: Any) -> None:
    with pytest.raises(UserError, match=r"GB do not fit in the memory of cpu; .*--table-tier mmap"):
        eg.graft(tiny_model(), tokenizer, eg.EngramConfig(**{**CONFIG, "engram_vocab_size": (10**10, 10**10)}))


def test_zeros_in_memory_cost_nothing_until_written() -> None:
    def held() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = held()
    array = Resident().zeros("position", (10_000_000,), torch.int32, CPU)
    array[[5, 9_999_999]] = 1
    assert held() - before < 5e6 and int(array[:1000].sum() + array[-1000:].sum()) == 2
    array.fill_(1)  # control; memory of torch's own would be what an earlier test gave back
    assert held() - before > 30e6


def test_rows_are_read_ahead_and_an_error_there_is_not_silent(
    tokenizer: Any, tmp_path: Path, ids: torch.Tensor, caplog: Any
) -> None:
    model = trained(tokenizer, tmp_path)
    table = memories(model)[0].table
    asked: list[torch.Tensor] = []
    table.prefetch = asked.append  # type: ignore[method-assign, assignment]
    model(ids)
    assert len(asked) == 1 and asked[0].shape == (2, 24, 4)

    def broken(rows: torch.Tensor) -> None:
        raise OSError("the disk is gone")

    in_background(broken, torch.tensor([1]))
    _reader(os.getpid()).shutdown(wait=True)
    _reader.cache_clear()
    assert "the disk is gone" in caplog.text


def test_the_sizes_in_the_stamp_are_those_of_the_files(tokenizer: Any, tmp_path: Path) -> None:
    trained(tokenizer, None, tmp_path / "graft")
    eg.load_graft(tmp_path / "graft", tiny_model(), tokenizer, table_dir=tmp_path / "tables")
    stamp = json.loads((tmp_path / "tables" / "tables.json").read_text())
    assert stamp["sizes"] == {path.stem: path.stat().st_size for path in (tmp_path / "tables").glob("*.bin")}


def test_read_ahead_asks_for_the_pages_of_exactly_these_items(tmp_path: Path, monkeypatch: Any) -> None:
    storage = Mapped(tmp_path)
    storage.empty("rows", (4000, 3), torch.float32, CPU)  # 12 bytes: some rows lie across two pages
    asked: list[tuple[int, int, int]] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda file, start, size, advice: asked.append((start, size, advice)))
    storage.prefetch("rows", torch.tensor([0, 1, 341, 3000, 3000]), 12)
    page = os.sysconf("SC_PAGE_SIZE")
    expected = sorted({byte // page for row in (0, 1, 341, 3000) for byte in (row * 12, row * 12 + 11)})
    assert asked == [(at * page, page, os.POSIX_FADV_WILLNEED) for at in expected]
    assert len(expected) > 2, "control: row 341 lies across two pages"


def test_training_reads_the_next_batchs_rows_and_their_moments_ahead(tokenizer: Any, tmp_path: Path, monkeypatch: Any) -> None:
    asked: list[tuple[str, set[int]]] = []
    monkeypatch.setattr(Mapped, "prefetch", lambda self, name, index, size: asked.append((name, set(index.tolist()))))
    monkeypatch.setattr("engram_graft.table.in_background", lambda work, *args: work(*args))
    monkeypatch.setattr("engram_graft.prefetch.in_background", lambda work, *args: work(*args))
    model = trained(tokenizer, tmp_path)
    rows = set(memories(model)[0].table.seen_rows().tolist())
    assert rows <= set.union(*(index for name, index in asked if name == "layer1")), "every row was asked for"
    assert {name.partition(".")[2] for name, _ in asked} == {"", "position", "rows", "row_step", "exp_avg", "exp_avg_sq"}
    asked.clear()
    trained(tokenizer, None)
    assert not asked, "control: tables in memory are not read ahead"
