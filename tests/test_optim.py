"""The one optimizer: rows move only when looked up, each as under an Adam of its own; the clip takes sparse and dense at once."""

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engram_graft.optim import EngramAdamW, clip_grad_norm

ROWS, DIM = 40, 3
LOOKED_UP = [
    [1, 5, 5, 7],
    [7, 2, 1],
    [9, 9, 9],
    [1, 30, 2, 31, 32],
    [5, 7],
    [39, 0, 1],
]  # a step each; repeats within a step


class Toy(nn.Module):
    """A table and a dense layer, seeded."""

    def __init__(self, dtype: torch.dtype = torch.float32, rows: int = ROWS):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.table = nn.Parameter(torch.randn(rows, DIM, generator=generator).to(dtype))
        self.dense = nn.Parameter(torch.randn(DIM, 4, generator=generator))

    def backward(self, rows: list[int], seed: int, sparse: bool = True) -> None:
        coefficients = torch.randn(len(rows), 4, generator=torch.Generator().manual_seed(seed))
        (
            F.embedding(torch.tensor(rows, dtype=torch.long), self.table, sparse=sparse).float() @ self.dense * coefficients
        ).sum().backward()

    def optimizer(self, **options: Any) -> EngramAdamW:
        return EngramAdamW(
            [
                {"params": [self.dense]},
                {"params": [self.table], "table": True, "weight_decay": 0.0, "lr": 0.05, **options},
            ]
        )


def run(toy: Toy, optimizer: torch.optim.Optimizer, steps: range, sparse: bool = True) -> None:
    for at in steps:
        optimizer.zero_grad()
        toy.backward(LOOKED_UP[at], at, sparse)
        optimizer.step()


def test_case_29_the_clip_shrinks_sparse_and_dense_gradients_to_the_joint_norm() -> None:
    toy = Toy()
    toy.backward([1, 5, 5, 7, 5], 0)
    assert not toy.table.grad.is_coalesced() and toy.table.grad._nnz() == 5, "control: row 5 comes three times"
    table, dense = toy.table.grad.to_dense(), toy.dense.grad.clone()
    expected = (table.square().sum() + dense.square().sum()).sqrt()
    repeated = (toy.table.grad._values().square().sum() + dense.square().sum()).sqrt()
    assert (repeated - expected).abs() > 1e-2, "control: the norm of repeated rows is another"
    before = clip_grad_norm([toy.table, toy.dense, nn.Parameter(torch.ones(2))], 1e-4)
    assert torch.isclose(before, expected, rtol=1e-6)
    scale = 1e-4 / (expected + 1e-6)
    assert toy.table.grad.is_sparse and torch.allclose(toy.table.grad.to_dense(), table * scale, rtol=1e-5, atol=0)
    assert torch.allclose(toy.dense.grad, dense * scale, rtol=1e-5, atol=0)
    assert torch.isclose(clip_grad_norm([toy.dense, toy.table], 1e-4), torch.tensor(1e-4), rtol=1e-3), "and so it is now 1e-4"


def test_a_clip_above_the_norm_changes_no_bit_and_no_gradients_have_norm_zero() -> None:
    toy = Toy()
    assert clip_grad_norm(toy.parameters(), 1.0) == 0
    toy.backward(LOOKED_UP[0], 0)
    table, dense = toy.table.grad.to_dense(), toy.dense.grad.clone()
    assert 1 < clip_grad_norm(iter(toy.parameters()), 1e3) < 1e3
    assert torch.equal(toy.table.grad.to_dense(), table) and torch.equal(toy.dense.grad, dense)


def test_control_torchs_own_clip_raises_on_these_gradients() -> None:
    toy = Toy()
    toy.backward(LOOKED_UP[0], 0)
    with pytest.raises(NotImplementedError, match=r"(?i)sparse"):
        nn.utils.clip_grad_norm_(toy.parameters(), 1e-4)


def test_case_30_rows_not_looked_up_in_a_step_stay_bitwise_equal() -> None:
    toy = Toy()
    optimizer = toy.optimizer()
    for at, rows in enumerate(LOOKED_UP):
        before = toy.table.detach().clone()
        run(toy, optimizer, range(at, at + 1))
        still = torch.ones(ROWS, dtype=torch.bool).index_fill(0, torch.tensor(rows), False)
        assert torch.equal(toy.table[still], before[still]) and (toy.table[~still] != before[~still]).all()


def test_case_30_control_dense_adam_moves_them_by_momentum_and_by_decay() -> None:
    for decay, moves in ((0.0, [5]), (0.1, [5, 20])):  # 5: looked up in step 0 and not in step 1; 20: never
        toy = Toy()
        optimizer = torch.optim.AdamW(toy.parameters(), lr=0.05, weight_decay=decay)
        run(toy, optimizer, range(1), sparse=False)
        before = toy.table.detach().clone()
        run(toy, optimizer, range(1, 2), sparse=False)
        assert [row for row in (5, 20) if not torch.equal(toy.table[row], before[row])] == moves


@pytest.mark.parametrize("options", [{}, {"betas": (0.5, 0.7)}, {"eps": 1e-2}], ids=str)
def test_a_row_moves_as_under_torchs_adam_over_the_steps_it_was_looked_up_in(options: dict[str, Any]) -> None:
    toy = Toy()
    optimizer = toy.optimizer(**options)
    alone = {row: nn.Parameter(toy.table[row].detach().clone()) for row in range(ROWS)}
    own = {row: torch.optim.Adam([parameter], lr=0.05, **options) for row, parameter in alone.items()}
    for at, rows in enumerate(LOOKED_UP):
        optimizer.zero_grad()
        toy.backward(rows, at)
        gradient = toy.table.grad.to_dense()
        optimizer.step()
        for row in set(rows):
            alone[row].grad = gradient[row]
            own[row].step()
        assert torch.allclose(toy.table, torch.stack(list(alone.values())), rtol=0, atol=1e-6), at


def test_dense_groups_move_exactly_as_under_torchs_adamw() -> None:
    toy = Toy()
    other = nn.Parameter(toy.dense.detach().clone())
    theirs = torch.optim.AdamW([other])
    optimizer = toy.optimizer()
    for at, rows in enumerate(LOOKED_UP):
        optimizer.zero_grad()
        toy.backward(rows, at)
        other.grad = toy.dense.grad.clone()
        optimizer.step()
        theirs.step()
        assert torch.equal(toy.dense, other)


@pytest.mark.parametrize("rate", [0.5, 1e-3])
def test_the_tables_rate_is_its_own(rate: float) -> None:
    toy = Toy()
    table, dense = toy.table.detach().clone(), toy.dense.detach().clone()
    run(toy, toy.optimizer(lr=rate), range(1))
    first = (toy.table - table)[[1, 5, 7]].abs()  # Adam's first step is as long as its rate
    assert torch.allclose(first, torch.tensor(rate), rtol=1e-3, atol=1e-6)
    assert torch.allclose((toy.dense - dense * (1 - 1e-5)).abs(), torch.tensor(1e-3), rtol=1e-2)


@pytest.mark.parametrize("decay", [{"weight_decay": 0.01}, {}], ids=["given", "the default"])
def test_weight_decay_on_a_table_is_refused_with_its_value(decay: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"weight_decay=0\.01 on a table"):
        EngramAdamW([{"params": [Toy().table], "table": True, **decay}])
    EngramAdamW([{"params": [Toy().table], "table": True, "weight_decay": 0.0}])


def test_the_state_follows_the_rows_touched_and_not_the_table() -> None:
    toy = Toy(rows=20_000)
    optimizer = toy.optimizer()
    touched: set[int] = set()
    for at in range(12):
        rows = list(range(3 * at, 3 * at + 5))
        touched |= set(rows)
        optimizer.zero_grad()
        toy.backward(rows, at)
        optimizer.step()
        state = optimizer.state[toy.table]
        assert state["touched"] == len(touched) == int((state["position"] > 0).sum())
        for key in ("exp_avg", "exp_avg_sq", "row_step"):
            assert len(touched) <= len(state[key]) < 2 * len(touched)
    assert state["position"].dtype == torch.int32 and len(state["position"]) == 20_000
    steps = state["row_step"][state["position"][sorted(touched)].long() - 1].tolist()
    saved = optimizer.state_dict()["state"][1]
    assert sorted(saved["rows"].tolist()) == sorted(touched) and all(
        len(saved[key]) == len(touched) for key in saved if key != "step"
    )
    assert steps == [1 + (row % 3 < 2 and 2 < row < 36) for row in sorted(touched)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_three_steps_a_reload_and_three_more_equal_six_to_the_bit(dtype: torch.dtype) -> None:
    whole = Toy(dtype)
    run(whole, whole.optimizer(), range(6))
    first = Toy(dtype)
    optimizer = first.optimizer()
    run(first, optimizer, range(3))
    file = io.BytesIO()
    torch.save([first.state_dict(), optimizer.state_dict()], file)
    file.seek(0)
    weights, saved = torch.load(file)
    second = Toy(dtype)
    second.load_state_dict(weights)
    again = second.optimizer(lr=9.0)
    again.load_state_dict(saved)
    state = again.state[second.table]
    dtypes = {key: value.dtype for key, value in state.items() if isinstance(value, Tensor)}
    kinds = {
        "exp_avg": torch.float32,
        "exp_avg_sq": torch.float32,
        "position": torch.int32,
        "row_step": torch.int32,
        "rows": torch.int64,
    }
    assert {key: dtypes[key] for key in kinds} == kinds and state["touched"] == 5
    kept = copy.deepcopy(saved)
    run(second, again, range(3, 6))
    assert torch.equal(second.table, whole.table) and torch.equal(second.dense, whole.dense)
    assert all(torch.equal(saved["state"][1][key], kept["state"][1][key]) for key in kinds if key != "position")
    assert saved["state"][1].keys() == {"step", "rows", "row_step", "exp_avg", "exp_avg_sq"}, "the loaded state is a copy"
    forgetful = second.optimizer()
    run(first, forgetful, range(3, 6))
    assert not torch.equal(first.table, whole.table), "control: without the state the steps are others"


def test_a_scheduler_sets_the_rate_of_both_groups() -> None:
    toy = Toy()
    optimizer = toy.optimizer()
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    for at in range(4):
        assert [group["lr"] for group in optimizer.param_groups] == [1e-3 * 0.5**at, 0.05 * 0.5**at]
        before = toy.table.detach().clone()
        optimizer.zero_grad()
        toy.backward([at, 20 + at], at)  # rows of their own: each makes its first step, which is as long as the rate
        optimizer.step()
        scheduler.step()
        moved = (toy.table - before)[[at, 20 + at]].abs()
        assert torch.allclose(moved, torch.tensor(0.05 * 0.5**at), rtol=1e-3, atol=1e-6)


def test_a_closure_can_clear_the_gradients_of_tables_too() -> None:
    results = []
    for closed in (False, True):
        toy = Toy()
        optimizer = toy.optimizer()
        for at in range(3):

            def closure(toy: Toy = toy, optimizer: EngramAdamW = optimizer, at: int = at) -> float:
                optimizer.zero_grad()
                toy.backward(LOOKED_UP[at], at)
                return 7.0

            if closed:
                assert optimizer.step(closure) == 7.0
            else:
                closure()
                optimizer.step()
        results.append(toy.table.detach())
    assert torch.equal(*results)


def test_a_step_hook_runs_once_a_step() -> None:
    torch.optim.AdamW([nn.Parameter(torch.ones(1))])  # torch wraps a class's step when it first makes one
    toy = Toy()
    optimizer, calls = toy.optimizer(), []
    optimizer.register_step_post_hook(lambda *_: calls.append(len(optimizer.param_groups)))
    run(toy, optimizer, range(2))
    assert calls == [2, 2]


def test_a_step_without_gradients_or_without_look_ups_moves_nothing() -> None:
    toy = Toy()
    before = toy.table.detach().clone()
    optimizer = toy.optimizer()
    optimizer.step()
    toy.backward([], 0)
    optimizer.step()
    assert toy.table.grad._nnz() == 0 and torch.equal(toy.table, before)
