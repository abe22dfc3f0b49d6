"""Rows that cost what training touches: their initial values, the marks, and that memory nobody wrote is read by nobody."""

import copy
import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TINY_ENGRAM, keep_seen, tiny_model
from safetensors.torch import load_file
from torch import Tensor, nn

import engram_graft as eg
from engram_graft import table as table_module
from engram_graft.config import EngramConfig
from engram_graft.errors import UserError
from engram_graft.files import TENSOR_FILE, memory_tensors
from engram_graft.fresh import fresh_layer
from engram_graft.grafted import find_graft, memories
from engram_graft.optim import EngramAdamW
from engram_graft.storage import Resident
from engram_graft.table import EngramTable
from engram_graft.window import Window

DIM, ROWS = 4, 101  # no multiple of 8
WORD = 2**64

# what initial values were when files of format 2 were first written: (seed, row) to its channels
PINNED = {
    (0, 0): [1.0707972049713135, 0.5395479798316956, 1.0429939031600952, 1.5642266273498535],
    (0, 1): [-0.0946686714887619, 1.4012125730514526, -0.915156900882721, 1.4498947858810425],
    (7, 123456): [-1.0358844995498657, 0.682079553604126, -0.8351827263832092, 0.242327481508255],
    (2**40 + 3, 9999999): [-0.7556843161582947, -1.0499712228775024, -0.47011899948120117, 0.6260501146316528],
}


class Filled(Resident):
    """Memory that holds one value wherever nobody wrote another."""

    def __init__(self, value: float):
        self.value = value

    def empty(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.full(shape, self.value, dtype=dtype, device=device)

    def scratch(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        return self.empty("", shape, dtype, device)


def make(rows: int = ROWS, seed: int | None = 5, fill: float = math.nan, **changes: Any) -> EngramTable:
    """A table in train mode of which nothing was looked up, with `fill` in its memory."""
    options = {"dtype": torch.float32, "seen_filter": False, "n_head": 2, "head_dim": DIM, **changes}
    return EngramTable(rows, device=torch.device("cpu"), seed=seed, storage=Filled(fill), **options)


def poison(module: nn.Module, value: float = math.nan) -> None:
    """Write `value` wherever no row was looked up."""
    with torch.no_grad():
        for table in module.modules():
            if isinstance(table, EngramTable):
                table.weight[~table.is_seen(torch.arange(len(table.weight)))] = value


def clones(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in state.items()}


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# -- initial values


def splitmix(word: int) -> int:
    """The finalizer of SplitMix64."""
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 % WORD
    word = (word ^ word >> 27) * 0x94D049BB133111EB % WORD
    return word ^ word >> 31


def single(number: float) -> float:
    """The float32 next to it."""
    return struct.unpack("f", struct.pack("f", number))[0]


def slowly(seed: int, row: int, dim: int = DIM) -> list[float]:
    """The initial values of a row in Python's own numbers: channel c of the table is the c-th output of a SplitMix64 that starts where
    another one, at the seed, puts it; its four 16-bit words are summed, centred and scaled to a standard deviation of 1."""
    start, gamma = splitmix((seed + 0x9E3779B97F4A7C15) % WORD), 0x9E3779B97F4A7C15
    scale = single(1 / math.sqrt(4 * (65536**2 - 1) / 12))
    words = [splitmix((start + channel * gamma) % WORD) for channel in range(row * dim, (row + 1) * dim)]
    return [single((sum(word >> shift & 65535 for shift in (0, 16, 32, 48)) - 2 * 65535) * scale) for word in words]


@pytest.mark.parametrize(("seed", "row"), PINNED)
def test_initial_values_are_the_pinned_ones_and_those_of_plain_integers(seed: int, row: int) -> None:
    table = make(rows=1, seed=seed)  # they do not depend on the number of rows either
    assert table.initial(torch.tensor(row)).tolist() == slowly(seed, row) == PINNED[seed, row]
    assert slowly(seed + 1, row) != PINNED[seed, row] != slowly(seed, row + 1), "control"


@pytest.mark.parametrize("seed", [0, 1, 10_007, -1, 2**63 - 1, 2**63, 2**64 + 5])
@pytest.mark.parametrize("dim", [1, 3, 40])
def test_initial_values_of_any_seed_row_and_width_are_those_of_plain_integers(seed: int, dim: int) -> None:
    rows = [0, 1, 7, 2**31 - 1, 2**31, 10**11]
    found = make(rows=1, seed=seed, head_dim=dim).initial(torch.tensor(rows))
    assert found.tolist() == [slowly(seed, row, dim) for row in rows]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_initial_values_do_not_depend_on_the_order_or_the_batch_in_which_rows_are_touched(dtype: torch.dtype) -> None:
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(0))
    one, other, third = (make(dtype=dtype) for _ in range(3))
    one.touch(torch.arange(ROWS))
    torch.manual_seed(99)  # whatever the global generator says
    for part in order.split(7):
        other.touch(part.view(1, -1, 1))
    for row in order.flip(0):
        third.touch(row)
    rounded = torch.tensor([slowly(5, row) for row in range(ROWS)]).to(dtype)
    for table in (one, other, third):
        assert torch.equal(table.weight, rounded) and table.weight.dtype == dtype
    assert not torch.equal(make(seed=6).initial(order), one.initial(order).float()), "control"


def test_touching_again_leaves_what_was_learned() -> None:
    table = make()
    table.touch(torch.tensor([3, 4]))
    with torch.no_grad():
        table.weight[3] = 9.0
    table.touch(torch.tensor([2, 3, 4]))
    assert (table.weight[3] == 9).all() and torch.equal(table.weight[[2, 4]], table.initial(torch.tensor([2, 4])))


def test_initial_values_have_mean_0_deviation_1_and_the_tails_of_four_uniforms() -> None:
    values = make(head_dim=8).initial(torch.arange(25_000)).double()
    count = values.numel()
    assert abs(float(values.mean())) < 4 / math.sqrt(count) and abs(float(values.std()) - 1) < 0.01
    assert (values.mean(0).abs() < 4 / math.sqrt(25_000)).all() and ((values.std(0) - 1).abs() < 0.03).all(), "of each channel"
    # P(sum of four uniforms < x) is x**4 / 24 for x <= 1; a deviation is 1 / sqrt(3)
    for bound in (2.0, 2.5, 3.0):
        expected = 2 * (2 - bound / math.sqrt(3)) ** 4 / 24 * count
        assert abs(int((values.abs() > bound).sum()) - expected) < 5 * math.sqrt(expected), bound
    assert 3 < values.abs().max() <= 2 * math.sqrt(3)
    assert abs(float((values**3).mean())) < 0.05 and abs(float((values**4).mean()) - 2.7) < 0.05
    assert len(values.unique(dim=0)) == len(values)


def test_initial_values_of_channels_and_of_neighbouring_rows_have_nothing_to_do_with_each_other() -> None:
    values = make(head_dim=8).initial(torch.arange(25_000)).double()
    beside = torch.corrcoef(torch.cat([values[:-1], values[1:]], 1).T) - torch.eye(16)
    assert beside.abs().max() < 5 / math.sqrt(25_000)
    doubled = torch.corrcoef(torch.cat([values, values + 0.05 * values.roll(1, 1)], 1).T) - torch.eye(16)
    assert doubled.abs().max() > 5 / math.sqrt(25_000), "control"


def test_two_layers_and_two_seeds_start_with_other_rows_and_zero_init_table_with_zeros() -> None:
    def start(index: int, **changes: Any) -> Tensor:
        options = {"layer_ids": (1, 2), "engram_vocab_size": (17, 19), "n_embed_per_ngram": 8, "n_head_per_ngram": 2, **changes}
        engram = fresh_layer(EngramConfig(**options), index, ROWS, 12, torch.device("cpu"))
        return engram.table.read(torch.arange(ROWS)).detach()

    first, *others = start(0), start(1), start(0, seed=1), start(1, seed=1)
    assert torch.equal(start(0), first)
    for other in others:
        assert not torch.isin(other, first).all(1).any(), "not one row of the other"
    assert not start(0, zero_init="table").any() and not start(1, zero_init="table", seed=1).any()


# -- which rows were looked up


def test_touch_marks_each_row_alone_with_duplicates_shared_bytes_and_the_last_row() -> None:
    for rows in (
        [0],
        [7],
        [8],
        [5, 5, 5],
        [0, 1, 2, 3, 4, 5, 6, 7],
        [15, 8, 15, 9, 8],
        [ROWS - 1],
        [ROWS - 1, 96, 0, ROWS - 1],
        [],
    ):
        table = make()
        table.touch(torch.tensor(rows, dtype=torch.int64))
        table.touch(torch.tensor(rows[::2], dtype=torch.int64))
        assert table.seen_rows().tolist() == sorted(set(rows)) and table.count_seen() == len(set(rows))
        marks = table.is_seen(torch.arange(ROWS))
        assert marks.nonzero()[:, 0].tolist() == sorted(set(rows))
        assert torch.equal(table.weight.isfinite().all(1), marks) and torch.equal(table.weight.isfinite().any(1), marks)


@pytest.mark.parametrize("rows", [1, 7, 8, 9, 64, ROWS])
def test_a_bit_a_row_is_kept_and_every_row_can_be_marked(rows: int) -> None:
    table = make(rows=rows)
    assert table.seen.dtype == torch.uint8 and len(table.seen) == math.ceil(rows / 8)
    for n, row in enumerate(torch.randperm(rows, generator=torch.Generator().manual_seed(1))):
        assert not table.is_seen(row)
        table.touch(row)
        assert table.is_seen(row) and table.count_seen() == n + 1
    assert table.seen_rows().tolist() == list(range(rows)) and table.seen_rows().dtype == torch.int64


def test_marks_of_random_touches_are_those_of_a_set() -> None:
    generator, table, expected = torch.Generator().manual_seed(2), make(rows=1003), set()
    for _ in range(30):
        rows = torch.randint(0, 1003, (2, 3, 4), generator=generator)
        table.touch(rows)
        expected |= set(rows.flatten().tolist())
        assert table.seen_rows().tolist() == sorted(expected)
    assert 300 < len(expected) < 1003


def test_is_seen_answers_in_the_shape_it_is_asked_in() -> None:
    table = make()
    table.touch(torch.tensor([3, 50]))
    for shape in ((), (4,), (2, 2), (1, 2, 3, 4), (0,), (2, 0, 3)):
        rows = torch.randint(0, ROWS, shape, generator=torch.Generator().manual_seed(3))
        found = table.is_seen(rows)
        assert found.shape == rows.shape and found.dtype == torch.bool and torch.equal(found, (rows == 3) | (rows == 50))
    assert table.is_seen(torch.tensor([[3, 4], [50, 51]])).tolist() == [[True, False], [True, False]]


@pytest.mark.parametrize(
    ("train", "grad", "recording", "marks"),
    [(True, True, True, True), (True, True, False, False), (True, False, True, False), (False, True, True, False)],
)
def test_a_look_up_is_marked_only_while_learning_and_recording_and_reads_the_same(
    train: bool, grad: bool, recording: bool, marks: bool
) -> None:
    table, rows = make().train(train), torch.tensor([[[1, 2, 3, 3]]])
    table.recording = recording
    with torch.set_grad_enabled(grad):
        embeddings, active = table(rows)
    assert active is None and torch.equal(embeddings, table.initial(rows).flatten(-2))
    assert table.seen_rows().tolist() == ([1, 2, 3] if marks else [])
    assert bool(table.weight.isfinite().any()) == marks, "and nothing is written either"


# -- load_rows


def loadable(*rows: int) -> tuple[Tensor, Tensor]:
    return torch.tensor(rows, dtype=torch.int64), torch.arange(len(rows) * DIM).view(-1, DIM).float()


def test_load_rows_replaces_what_was_looked_up_before() -> None:
    table = make()
    table.touch(torch.arange(0, 60, 7))
    rows, values = loadable(0, 8, 14, ROWS - 1)
    table.load_rows(rows, values)
    found = table.saved_rows()
    assert torch.equal(found[0], rows) and torch.equal(found[1], values) and torch.equal(table.seen_rows(), rows)
    others = torch.tensor([row for row in range(ROWS) if row not in rows.tolist()])
    assert torch.equal(table.eval().read(others), table.initial(others)), "what is not among them is as it was at the start"
    table.load_rows(*loadable())
    assert table.count_seen() == 0 and torch.equal(table.read(rows), table.initial(rows))


@pytest.mark.parametrize(
    ("rows", "values", "says"),
    [
        (torch.tensor([3, 2]), torch.zeros(2, DIM), f"row ids must increase from 0 to at most {ROWS - 1}"),
        (torch.tensor([1, 2, 2, 5]), torch.zeros(4, DIM), f"row ids must increase from 0 to at most {ROWS - 1}"),
        (torch.tensor([-1, 2]), torch.zeros(2, DIM), f"row ids must increase from 0 to at most {ROWS - 1}"),
        (torch.tensor([0, ROWS]), torch.zeros(2, DIM), f"row ids must increase from 0 to at most {ROWS - 1}"),
        (torch.tensor([0, 2**40, 5]), torch.zeros(3, DIM), f"row ids must increase from 0 to at most {ROWS - 1}"),
        (torch.tensor([1, 2]), torch.zeros(3, DIM), rf"int64 \[2\] with .*; the table takes int64 \[n\] and .* \[n, {DIM}\]"),
        (torch.tensor([1, 2]), torch.zeros(2, DIM + 1), rf"\[2, {DIM + 1}\]; the table takes int64 \[n\] and .* \[n, {DIM}\]"),
        (torch.tensor([1, 2]), torch.zeros(2 * DIM), rf"the table takes int64 \[n\] and .* \[n, {DIM}\]"),
        (torch.tensor([[1, 2]]), torch.zeros(2, DIM), r"int64 \[1, 2\] .*; the table takes int64 \[n\]"),
        (torch.tensor(1), torch.zeros(1, DIM), r"the table takes int64 \[n\]"),
        (torch.tensor([1, 2], dtype=torch.int32), torch.zeros(2, DIM), r"int32 .*; the table takes int64"),
        (torch.tensor([1.0, 2.0]), torch.zeros(2, DIM), r"rows are torch.float32 .*; the table takes int64"),
        (torch.tensor([1, 2]), torch.zeros(2, DIM).double(), r"values torch.float64 .*; the table takes .* torch.float32 "),
        (torch.tensor([1, 2]), torch.zeros(2, DIM).bfloat16(), r"values torch.bfloat16 .*; the table takes .* torch.float32 "),
    ],
)
def test_load_rows_refuses_what_does_not_fit_says_what_would_and_changes_nothing(rows: Tensor, values: Tensor, says: str) -> None:
    table = make(fill=0.0)
    table.touch(torch.tensor([4, 9]))
    before = table.weight.detach().clone(), table.seen.clone()
    with pytest.raises(UserError, match=says):
        table.load_rows(rows, values)
    assert torch.equal(table.weight, before[0]) and torch.equal(table.seen, before[1])
    table.load_rows(*loadable(3, 4, 5))  # control: there is nothing wrong with the table


@pytest.mark.parametrize("fault", [None, *range(9)])
def test_rows_are_loaded_saved_and_copied_in_pieces_and_a_fault_between_two_is_found(
    fault: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_module, "CHUNK", 4)
    table = make()
    rows, values = loadable(0, 3, 8, 9, 15, 16, 40, 70, 71, ROWS - 1)
    if fault is not None:
        rows[fault] = rows[fault + 1]
        with pytest.raises(UserError, match="must increase"):
            table.load_rows(rows, values)
        return
    table.load_rows(rows, values)
    for which in (table, copy.deepcopy(table)):
        assert torch.equal(which.saved_rows()[0], rows) and torch.equal(which.saved_rows()[1], values)


# -- memory that nobody wrote is read by nobody


def everything(table: EngramTable) -> dict[str, Tensor]:
    """What a table answers and does in each of its ways; some of the rows asked for were looked up, some were not."""
    table.touch(torch.tensor([0, 1, 2, 3, 8, 9, 20]))
    with torch.no_grad():
        table.weight[[0, 8]] = 2.0
    rows = torch.tensor([[[0, 1, 2, 3], [0, 30, 2, 3], [8, 9, 31, 32], [40, 41, 42, ROWS - 1]]])
    found: dict[str, Tensor] = {}
    table.eval()
    for seen_filter in (True, False):
        for allowed in (None, torch.tensor([[[True, True], [True, False], [False, True], [True, True]]])):
            for grad in (True, False):
                table.seen_filter = seen_filter
                with torch.set_grad_enabled(grad):
                    found[f"eval {seen_filter} {allowed is None} {grad}"] = table(rows, allowed)[0].detach()
    (table(rows)[0] ** 2).sum().backward()
    found["eval gradient"] = table.weight.grad.to_dense()
    table.weight.grad = None
    table.train()
    table.recording = False
    (table(rows)[0] ** 2).sum().backward()
    found["unrecorded"], found["unrecorded gradient"] = table(rows)[0].detach(), table.weight.grad.to_dense()
    table.weight.grad, table.recording = None, True
    found |= {f"before {name}": tensor for name, tensor in table.state_dict().items()}
    twin, half = copy.deepcopy(table), copy.deepcopy(table).to(torch.bfloat16)
    for name, other in (("twin", twin), ("half", half), ("table", table)):
        optimizer = EngramAdamW([{"params": [other.weight], "table": True, "lr": 0.1, "weight_decay": 0.0}])
        for allowed in (torch.ones(1, 4, 2, dtype=torch.bool).index_fill(1, torch.tensor([1]), False), None):
            out = other(rows, allowed)[0]
            (out.float() ** 2).sum().backward()
            found[f"{name} learning {allowed is None}"] = out.detach()
            found[f"{name} gradient {allowed is None}"] = other.weight.grad.to_dense()
            optimizer.step()
            optimizer.zero_grad()
        found |= {f"{name} {key}": tensor for key, tensor in other.state_dict().items()}
        found[f"{name} read"] = other.eval().read(torch.arange(ROWS)).detach()
    return found


def test_what_lies_in_memory_nobody_wrote_changes_no_bit_of_anything() -> None:
    clean, poisoned = everything(make(fill=0.0)), everything(make(fill=math.nan))
    for name, tensor in poisoned.items():
        assert tensor.isfinite().all(), name
    assert clean.keys() == poisoned.keys() and len(clean) > 25
    assert [name for name in clean if not torch.equal(clean[name], poisoned[name])] == []
    broken = make(fill=math.nan)
    broken._mark(torch.tensor([30]))  # control: a mark without a value is found out
    assert any(not tensor.isfinite().all() for tensor in everything(broken).values())


def some_seen(tokenizer: Any, ids: Tensor, **changes: Any) -> Any:
    """A grafted model whose dense parameters are random and that has looked up the rows of half of each text."""
    model: Any = eg.graft(tiny_model(), tokenizer, eg.EngramConfig(**{**TINY_ENGRAM, "engram_vocab_size": (211, 223), **changes}))
    generator, rows = torch.Generator().manual_seed(1), rows_of(model, ids[:, :12])
    with torch.no_grad():
        for memory in memories(model):
            memory.table.touch(rows[:, :, memory.index])
            for name, parameter in memory.named_parameters():
                if name != "table.weight":
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
    return model


def rows_of(model: nn.Module, ids: Tensor) -> Tensor:
    """int64 rows [B, T, layers, orders*heads] of unpadded texts."""
    graft = find_graft(model)
    return graft(graft.lookup[ids], Window(0, ids.shape[1]))


@pytest.mark.parametrize("seen_filter", [True, False])
def test_a_model_with_poisoned_memory_computes_saves_copies_casts_loads_and_trains_as_one_without(
    seen_filter: bool, tokenizer: Any, ids: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def results(value: float) -> dict[str, Tensor]:
        for method in ("empty", "scratch"):
            monkeypatch.setattr(Resident, method, getattr(Filled, method))
        monkeypatch.setattr(Resident, "value", value, raising=False)
        model = some_seen(tokenizer, ids, seen_filter=seen_filter)
        poison(model, value)
        found: dict[str, Tensor] = {}
        logits: Callable[[Any], Tensor] = lambda model: model(input_ids=ids).logits.detach()  # noqa: E731
        with torch.no_grad():
            found["eval"] = logits(model)
        twin = copy.deepcopy(model)
        found["twin"] = logits(twin)
        for memory in memories(twin.train()):
            memory.table.recording = False
        found["unrecorded"] = logits(twin)
        assert equal(memory_tensors(twin), memory_tensors(model))
        half = copy.deepcopy(model).to(torch.bfloat16)
        found["half"] = logits(half)
        found |= {f"half {name}": tensor for name, tensor in memory_tensors(half).items()}
        directory = tmp_path / f"graft {value}"
        eg.save_graft(model, directory)
        found |= {f"file {name}": tensor for name, tensor in load_file(directory / TENSOR_FILE).items()}
        loaded, _ = eg.load_graft(directory, base=tiny_model(), tokenizer=tokenizer)
        found["loaded"] = logits(loaded)
        assert torch.equal(found["loaded"], found["eval"]) and torch.equal(found["twin"], found["eval"])
        model.train()(input_ids=ids, labels=ids).loss.backward()
        found |= {f"gradient {n}": p.grad.to_dense() for n, p in model.named_parameters() if p.grad is not None}
        found |= {f"learned {name}": tensor.clone() for name, tensor in memory_tensors(model).items()}
        return found

    clean, poisoned = results(0.0), results(math.nan)
    assert [name for name, tensor in poisoned.items() if not tensor.isfinite().all()] == []
    assert clean.keys() == poisoned.keys()
    assert [name for name in clean if not torch.equal(clean[name], poisoned[name])] == []
    assert len(clean["learned layers.1.table.rows"]) > len(clean["file layers.1.table.rows"]) > 0, (
        "control: learning read new rows"
    )
    broken = some_seen(tokenizer, ids, seen_filter=seen_filter)
    with torch.no_grad():
        memories(broken)[0].table.weight[rows_of(broken, ids)[0, 5, 0, 0]] = math.nan
        assert not broken(input_ids=ids).logits.isfinite().all(), "control: a row that was looked up is read"


# -- state dicts and files


def test_a_state_dict_holds_the_rows_looked_up_alone_and_they_are_all_of_it() -> None:
    table = make()
    assert table.state_dict()["rows"].shape == (0,) and table.state_dict()["values"].shape == (0, DIM)
    table.touch(torch.tensor([50, 3, 3, ROWS - 1]))
    state = table.state_dict()
    assert list(state) == ["rows", "values"] and state["rows"].tolist() == [3, 50, ROWS - 1]
    assert torch.equal(state["values"], table.weight[[3, 50, ROWS - 1]])
    other = make()
    other.touch(torch.tensor([ROWS - 1]))
    other.touch(torch.tensor([50, 3]))
    assert equal(other.state_dict(), state), "whatever order they came in"
    with torch.no_grad():
        table.weight[3] = 9.0
    assert equal(other.state_dict(), state), "and it is a copy"
    assert {name for name, _ in table.named_parameters()} == {"weight"}, "to an optimizer a table is one parameter"


def test_load_state_dict_gives_back_rows_and_values_and_misses_a_key() -> None:
    table, other = make(), make(seed=6)
    table.touch(torch.arange(0, 70, 3))
    with torch.no_grad():
        table.weight[[0, 3]] = 4.0
    other.touch(torch.arange(50, 90))
    result = other.load_state_dict(table.state_dict(), strict=True)
    assert not result.missing_keys and not result.unexpected_keys and equal(other.state_dict(), table.state_dict())
    for key in ("rows", "values"):
        state = {name: tensor for name, tensor in table.state_dict().items() if name != key}
        with pytest.raises(RuntimeError, match=f'Missing key.*"{key}"'):
            other.load_state_dict(state)
        assert other.load_state_dict(state, strict=False).missing_keys == [key]
        assert equal(other.state_dict(), table.state_dict()), "half of it is not taken"
    with pytest.raises(RuntimeError, match=f"must increase from 0 to at most {ROWS - 1}"):
        other.load_state_dict({"rows": torch.tensor([2, 1]), "values": torch.zeros(2, DIM)})
    with pytest.raises(RuntimeError, match="the table takes int64"):
        other.load_state_dict({"rows": torch.tensor([1, 2]), "values": torch.zeros(2, DIM + 1)})


def test_load_state_dict_names_a_key_that_is_no_part_of_the_table() -> None:
    """What an older version called `weight` must not be passed over in silence."""
    table = make()
    table.touch(torch.tensor([1]))
    with pytest.raises(RuntimeError, match='Unexpected key.*"weight"'):
        table.load_state_dict({**table.state_dict(), "weight": torch.zeros(ROWS, DIM)})


def test_load_state_dict_of_a_model_round_trips_and_names_the_tables_key(tokenizer: Any, ids: Tensor) -> None:
    model, other = some_seen(tokenizer, ids), some_seen(tokenizer, ids.flip(1))
    assert not equal(clones(model.state_dict()), clones(other.state_dict())), "control"
    other.load_state_dict(model.state_dict(), strict=True)
    assert equal(model.state_dict(), other.state_dict())
    assert torch.equal(model(input_ids=ids).logits, other(input_ids=ids).logits)
    key = "model.layers.1.engram.table.rows"
    with pytest.raises(RuntimeError, match=f'Missing key.*"{key}"'):
        other.load_state_dict({name: tensor for name, tensor in model.state_dict().items() if name != key})


@pytest.mark.parametrize("seen_filter", [True, False])
def test_a_table_of_ten_million_rows_is_saved_by_its_fifty_and_comes_back_bit_for_bit(
    seen_filter: bool, tokenizer: Any, ids: Tensor, tmp_path: Path
) -> None:
    changes = {"layer_ids": (1,), "engram_vocab_size": (2_500_000, 2_600_000), "seen_filter": seen_filter}
    model = some_seen(tokenizer, ids, **changes)
    memory = memories(model)[0]
    assert len(memory.table.weight) > 10**7
    looked_up = rows_of(model, ids)[0, :, 0]
    keep_seen(memory)
    memory.table.touch(torch.cat([looked_up[2:14].flatten(), looked_up[14, :2]]))  # 12 positions' n-grams and a 2-gram
    with torch.no_grad():
        seen = memory.table.seen_rows()
        memory.table.weight[seen] += torch.randn(50, memory.table.weight.shape[1], generator=torch.Generator().manual_seed(2))
        assert not torch.equal(model(input_ids=ids).logits, tiny_model()(input_ids=ids).logits), "control: it speaks"
    sizes = {}
    for count in (50, 25):
        keep_seen(memory, seen[:count])
        eg.save_graft(model, tmp_path / str(count))
        sizes[count] = sum(path.stat().st_size for path in (tmp_path / str(count)).iterdir())
        tensors = load_file(tmp_path / str(count) / TENSOR_FILE)
        assert torch.equal(tensors["layers.1.table.rows"], seen[:count])
        assert torch.equal(tensors["layers.1.table.values"], memory.table.weight[seen[:count]])
        loaded, _ = eg.load_graft(tmp_path / str(count), base=tiny_model(), tokenizer=tokenizer)
        assert equal(memory_tensors(loaded), memory_tensors(model))
        with torch.no_grad():
            assert torch.equal(model(input_ids=ids).logits, loaded(input_ids=ids).logits)
    assert sizes[50] < 100_000 and 25 * (8 + 8 * 4) - 20 <= sizes[50] - sizes[25] <= 25 * (8 + 8 * 4) + 100


# -- copies and casts


def train(table: EngramTable, rows: Tensor, steps: int = 3) -> list[Tensor]:
    optimizer = EngramAdamW([{"params": [table.weight], "table": True, "lr": 0.1, "weight_decay": 0.0}])
    losses = []
    for _ in range(steps):
        loss = (table.train()(rows)[0].float() - 1).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def test_a_deepcopy_keeps_rows_settings_and_hooks_and_shares_nothing() -> None:
    table = make(seen_filter=True)
    rows = torch.tensor([[[0, 1, 60, ROWS - 1]]])
    train(table, rows, steps=1)
    table.weight.requires_grad_(False)
    table.recording, calls = False, []
    table.register_forward_hook(lambda module, args, output: calls.append(module))
    before, memory = clones(table.state_dict()), table.weight.detach().clone()
    twin = copy.deepcopy(table)
    assert equal(twin.state_dict(), before) and torch.equal(twin.seen, table.seen)
    assert not twin.weight.requires_grad and isinstance(twin.weight, nn.Parameter) and twin.training
    for name in ("n_head", "seen_filter", "seed", "name", "recording", "redirect"):
        assert getattr(twin, name) == getattr(table, name)
    assert type(twin) is EngramTable and torch.equal(twin.eval().read(torch.arange(ROWS)), table.eval().read(torch.arange(ROWS)))
    twin(rows)
    assert calls == [twin], "the hook is called, with the copy"

    twin.weight.requires_grad_(True)
    twin.recording = True
    train(twin, torch.tensor([[[0, 1, 5, 9]]]))
    assert twin.count_seen() == 6 and not torch.equal(twin.weight[0], table.weight[0]), "control: it did learn"
    assert equal(table.state_dict(), before) and torch.equal(table.weight.nan_to_num(), memory.nan_to_num())
    assert not table.weight.requires_grad and table.weight.grad is None
    again = copy.deepcopy(twin)
    assert again.weight.requires_grad
    with torch.no_grad():
        twin.weight[0] = 7.0
        twin.touch(torch.tensor([33]))
    assert not again.is_seen(torch.tensor(33)) and not (again.weight[0] == 7).any(), "nor the other way round"


def test_training_a_deepcopy_of_a_model_leaves_the_model_bit_equal(tokenizer: Any, ids: Tensor) -> None:
    model = some_seen(tokenizer, ids, seen_filter=True)
    before, logits = clones(model.state_dict()), model(input_ids=ids).logits
    twin = copy.deepcopy(model)
    assert equal(twin.state_dict(), before) and torch.equal(twin(input_ids=ids).logits, logits)
    tables = [memory.table for memory in memories(twin)]
    assert [p.requires_grad for p in twin.parameters()] == [p.requires_grad for p in model.parameters()]
    optimizer = EngramAdamW([{"params": [table.weight for table in tables], "table": True, "lr": 0.1, "weight_decay": 0.0}])
    twin.train()(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    twin.eval()
    assert equal(model.state_dict(), before) and torch.equal(model(input_ids=ids).logits, logits)
    assert not torch.equal(twin(input_ids=ids).logits, logits)
    assert all(t.count_seen() > m.table.count_seen() > 0 for t, m in zip(tables, memories(model), strict=True))


def test_a_cast_takes_what_was_looked_up_rounds_it_once_and_training_goes_on() -> None:
    table, rows = make(), torch.tensor([[[0, 1, 60, ROWS - 1]]])
    train(table, rows, steps=2)
    before, weight = clones(table.state_dict()), table.weight
    poison(table, 3.0)  # what a cast of everything would take along
    assert table.to(torch.bfloat16) is table and table.weight is weight, "optimizers hold the parameter"
    assert table.weight.dtype == torch.bfloat16 and table.seen.dtype == torch.uint8
    assert torch.equal(table.state_dict()["rows"], before["rows"])
    assert torch.equal(table.state_dict()["values"], before["values"].bfloat16())
    assert not torch.equal(table.state_dict()["values"].float(), before["values"]), "control: rounding shows"
    unseen = torch.tensor([row for row in range(ROWS) if row not in rows.flatten().tolist()])
    assert table.weight[unseen].isnan().all(), "nothing was written where nothing was looked up"
    assert torch.equal(table.eval().read(unseen), torch.tensor([slowly(5, row) for row in unseen.tolist()]).bfloat16())
    losses = train(table, torch.tensor([[[0, 1, 2, 3]]]), steps=20)
    assert losses[-1] < 0.2 * losses[0] and table.seen_rows().tolist() == [0, 1, 2, 3, 60, ROWS - 1]
    assert table.saved_rows()[1].isfinite().all()


def test_a_cast_takes_the_gradient_along_and_a_cast_to_what_it_is_moves_nothing() -> None:
    table, rows = make(), torch.tensor([[[0, 1, 60, ROWS - 1]]])
    table(rows)[0].sum().backward()
    assert table.float().weight.grad.dtype == torch.float32 and table.count_seen() == 4
    at = table.weight.data_ptr()
    assert table.to(torch.float32).to("cpu").weight.data_ptr() == at
    table.bfloat16()
    assert table.weight.grad.dtype == torch.bfloat16 and table.weight.grad.coalesce().indices()[0].tolist() == [
        0,
        1,
        60,
        ROWS - 1,
    ]
    table.float()
    assert table.weight.dtype == torch.float32 and table.weight.grad.dtype == torch.float32


def test_a_model_in_bfloat16_reads_the_rounded_rows_and_trains_on(tokenizer: Any, ids: Tensor) -> None:
    model = some_seen(tokenizer, ids)
    before = clones(memory_tensors(model))
    model.to(torch.bfloat16)
    after = memory_tensors(model)
    for layer in (1, 2):
        assert torch.equal(after[f"layers.{layer}.table.rows"], before[f"layers.{layer}.table.rows"])
        assert torch.equal(after[f"layers.{layer}.table.values"], before[f"layers.{layer}.table.values"].bfloat16())
    tables = [memory.table for memory in memories(model)]
    optimizer = EngramAdamW([{"params": [table.weight for table in tables], "table": True, "lr": 0.1, "weight_decay": 0.0}])
    model.train()
    losses = []
    for _ in range(10):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] and all(len(before[f"layers.{n}.table.rows"]) < tables[n - 1].count_seen() for n in (1, 2))
    assert all(tensor.isfinite().all() for tensor in memory_tensors(model).values())
