"""One optimizer for the whole graft: AdamW for projections and adapters, lazy row-wise Adam for tables; and a clip for both.

Lazy: a row that a step did not look up does not move, not even by momentum, and has no moments until its first look-up, so cost and
memory follow the rows touched. Dense Adam would keep moving a row touched once for a hundred steps. (torch's `SparseAdam` keeps
moments for the whole table and counts steps for the table rather than the row.)
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn


class EngramAdamW(torch.optim.AdamW):
    """AdamW whose groups with `table=True` hold tables with sparse gradients.

    State of a table: `position` int32 `[rows]` (-1: never touched), and for the touched rows, in order of first touch, the moments
    `exp_avg` and `exp_avg_sq` float32 `[n, head_dim]` and `row_step` int64 `[n]`; all but `position` grow by doubling.

    Raises:
        ValueError: a table group asks for weight decay, which would move rows that were never looked up.
    """

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        param_group.setdefault("table", False)
        decay = param_group.get("weight_decay", self.defaults["weight_decay"])
        if param_group["table"] and decay != 0:
            raise ValueError(f"weight_decay={decay} on a table: rows must only move when looked up, use 0")
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = self.param_groups
        # AdamW's own step, without the wrapper that would run this optimizer's step hooks a second time
        dense_step: Any = torch.optim.AdamW.step
        dense_step = dense_step.__wrapped__ if getattr(dense_step, "hooked", False) else dense_step
        try:  # it sees only the dense groups
            self.param_groups = [group for group in groups if not group["table"]]
            dense_step(self)
        finally:
            self.param_groups = groups
        for group in groups:
            for table in group["params"] if group["table"] else ():
                if table.grad is not None:
                    self._step_rows(table, group)
        return loss

    def _step_rows(self, table: nn.Parameter, group: dict[str, Any]) -> None:
        assert table.grad is not None
        gradient = table.grad.coalesce()
        rows, values = gradient.indices()[0], gradient.values().float()
        state = self.state[table]
        if not state:
            state["step"] = torch.tensor(0.0)  # torch's own bookkeeping wants one; rows count theirs in row_step
            state["position"] = torch.full(table.shape[:1], -1, dtype=torch.int32, device=table.device)
            state["touched"] = 0
            state["row_step"] = torch.zeros(0, dtype=torch.int64, device=table.device)
            state["exp_avg"] = torch.zeros(0, table.shape[1], device=table.device)
            state["exp_avg_sq"] = torch.zeros(0, table.shape[1], device=table.device)
        state["step"] += 1
        at = _positions(state, rows)
        beta1, beta2 = group["betas"]
        step = state["row_step"][at] + 1
        mean = state["exp_avg"][at].lerp_(values, 1 - beta1)
        square = state["exp_avg_sq"][at].mul_(beta2).addcmul_(values, values, value=1 - beta2)
        state["row_step"][at], state["exp_avg"][at], state["exp_avg_sq"][at] = step, mean, square
        t = step[:, None].double()
        mean = mean / (1 - beta1**t).float()
        square = square / (1 - beta2**t).float()
        table[rows] = (table[rows].float() - group["lr"] * mean / (square.sqrt() + group["eps"])).to(table.dtype)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, except that state keeps its dtype: torch would cast step counts and float32 moments to the table's."""
        super().load_state_dict(state_dict)
        saved = [index for group in state_dict["param_groups"] for index in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for index, parameter in zip(saved, parameters, strict=True):
            for key, value in state_dict["state"].get(index, {}).items():
                if isinstance(value, Tensor) and key != "step":
                    self.state[parameter][key] = value.to(parameter.device, copy=True)


def _positions(state: dict[str, Any], rows: Tensor) -> Tensor:
    """Where the moments of `rows` lie; rows touched for the first time get a place at the end."""
    fresh = rows[state["position"][rows] < 0]
    start = state["touched"]
    state["touched"] = start + len(fresh)
    state["position"][fresh] = torch.arange(start, state["touched"], dtype=torch.int32, device=rows.device)
    for key in ("row_step", "exp_avg", "exp_avg_sq"):
        have = state[key]
        if len(have) < state["touched"]:
            state[key] = have.new_zeros(max(state["touched"], 2 * len(have)), *have.shape[1:])
            state[key][: len(have)] = have
    return state["position"][rows].long()


def clip_grad_norm(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Scale all gradients so that their joint 2-norm is at most `max_norm`, in place; sparse ones are clipped row by row.

    torch's own clip raises on sparse gradients. Sparse gradients are coalesced first: the norm of repeated rows is not the norm of
    their sum, and scaling a coalesced copy would change nothing.

    Returns:
        The norm before clipping.
    """
    values = []
    for parameter in parameters:
        if parameter.grad is None:
            continue
        if parameter.grad.is_sparse:
            parameter.grad = parameter.grad.coalesce()
        values.append(parameter.grad._values() if parameter.grad.is_sparse else parameter.grad)
    if not values:
        return torch.tensor(0.0)
    norms = [torch.linalg.vector_norm(value, dtype=torch.float32).to(values[0].device) for value in values]
    total = torch.linalg.vector_norm(torch.stack(norms))
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for value in values:
        value.mul_(scale.to(value.device, value.dtype))
    return total
