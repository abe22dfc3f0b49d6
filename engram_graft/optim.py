"""One optimizer for the whole graft: AdamW for projections and adapters, lazy row-wise Adam for tables; and a clip for both.

Lazy: a row that a step did not look up does not move, not even by momentum, and has no moments until its first look-up, so cost and
memory follow the rows touched. Dense Adam would keep moving a row touched once for a hundred steps. (torch's `SparseAdam` keeps
moments for the whole table and counts steps for the table rather than the row.)
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from engram_graft.sharding import sharded, sharded_as, whole
from engram_graft.storage import Resident

_ROWS = {"rows": torch.int64, "row_step": torch.int32, "exp_avg": torch.float32, "exp_avg_sq": torch.float32}


class EngramAdamW(torch.optim.AdamW):
    """AdamW whose groups with `table=True` hold tables with sparse gradients.

    State of a table: for the `touched` rows, in order of first touch, `rows` int64 and `row_step` int32 `[n]` and the moments
    `exp_avg` and `exp_avg_sq` float32 `[n, head_dim]`, which grow by doubling; and `position` int32 `[rows]`, where a row's lie, plus 1
    (0: never touched). `state_dict` leaves `position` out: its size follows the rows touched.

    Args:
        storage: where the state of tables lives; in memory by default.

    Raises:
        ValueError: a table group asks for weight decay, which would move rows that were never looked up.
    """

    def __init__(self, params: Any, *args: Any, storage: Resident | None = None, **kwargs: Any):
        self.storage = storage or Resident()
        self._names: dict[int, str] = {}  # of the tables' files, by the parameter's id
        super().__init__(params, *args, **kwargs)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        param_group.setdefault("table", False)
        decay = param_group.get("weight_decay", self.defaults["weight_decay"])
        if param_group["table"] and decay != 0:
            raise ValueError(f"weight_decay={decay} on a table: rows must only move when looked up, use 0")
        super().add_param_group(param_group)
        for parameter in param_group["params"]:  # a list by now
            self._names[id(parameter)] = f"optimizer{len(self._names)}"

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
        if not self.state.get(table):
            self._begin(table)
        state = self.state[table]
        state["step"] += 1
        at = self._positions(table, rows)
        beta1, beta2 = group["betas"]
        step = state["row_step"][at] + 1
        mean = state["exp_avg"][at].lerp_(values, 1 - beta1)
        square = state["exp_avg_sq"][at].mul_(beta2).addcmul_(values, values, value=1 - beta2)
        state["row_step"][at], state["exp_avg"][at], state["exp_avg_sq"][at] = step, mean, square
        t = step[:, None].double()
        mean = mean / (1 - beta1**t).float()
        square = square / (1 - beta2**t).float()
        table[rows] = (table[rows].float() - group["lr"] * mean / (square.sqrt() + group["eps"])).to(table.dtype)

    def _begin(self, table: nn.Parameter) -> None:
        """The state of a table of which no row was touched."""
        state: dict[str, Any] = {
            "step": torch.tensor(0.0),
            "touched": 0,
        }  # torch's bookkeeping wants a step; rows count in row_step
        state["position"] = self.storage.zeros(self._name(table, "position"), table.shape[:1], torch.int32, table.device)
        for key, dtype in _ROWS.items():
            shape = (0, table.shape[1]) if dtype is torch.float32 else (0,)
            state[key] = torch.zeros(shape, dtype=dtype, device=table.device)
        self.state[table] = state  # whole, for `prefetch` reads it from another thread

    def _positions(self, table: nn.Parameter, rows: Tensor) -> Tensor:
        """Where the moments of `rows` lie; rows touched for the first time get a place at the end."""
        state = self.state[table]
        fresh = rows[state["position"][rows] == 0]
        start, end = state["touched"], state["touched"] + len(fresh)
        if len(state["rows"]) < end:
            for key in _ROWS:
                state[key] = self.storage.grown(self._name(table, key), state[key], max(end, 2 * len(state[key])))
        state["rows"][start:end] = fresh
        state["position"][fresh] = torch.arange(start + 1, end + 1, dtype=torch.int32, device=rows.device)
        state["touched"] = end
        return state["position"][rows].long() - 1

    def _name(self, table: nn.Parameter, key: str) -> str:
        return f"{self._names[id(table)]}.{key}"

    def state_dict(self) -> dict[str, Any]:
        """As torch's; a table's state is `rows`, `row_step`, `exp_avg` and `exp_avg_sq` of the rows touched."""
        packed = super().state_dict()
        state = {}
        for index, entry in packed["state"].items():
            state[index] = entry
            if "position" in entry:
                state[index] = {"step": entry["step"], **{key: entry[key][: entry["touched"]] for key in _ROWS}}
        return {**packed, "state": state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, except that a table's state keeps its dtypes: torch would cast step counts and float32 moments to the table's."""
        super().load_state_dict(state_dict)
        saved = [index for group in state_dict["param_groups"] for index in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for index, parameter in zip(saved, parameters, strict=True):
            entry = state_dict["state"].get(index, {})
            if "rows" not in entry:
                for key, value in self.state.get(parameter, {}).items():
                    if torch.is_tensor(value) and value.shape == parameter.shape:  # saved whole
                        self.state[parameter][key] = sharded_as(parameter, value)
                continue
            self._begin(parameter)
            self._positions(parameter, entry["rows"].to(parameter.device))
            for key in _ROWS:
                self.state[parameter][key][: len(entry["rows"])] = entry[key]
            self.state[parameter]["step"] = entry["step"].clone()

    def prefetch(self, table: nn.Parameter, rows: Tensor) -> None:
        """Ask for the state of `rows` to be read, so that it is in memory when the step comes; waits for their positions."""
        state = self.state.get(table)
        if state:
            self.storage.prefetch(self._name(table, "position"), rows, state["position"].itemsize)
            at = state["position"][rows].long() - 1
            at = at[at >= 0]
            for key in _ROWS if len(at) else ():
                self.storage.prefetch(self._name(table, key), at, state[key][0].nbytes)


def clip_grad_norm(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Scale all gradients so that their joint 2-norm is at most `max_norm`, in place; sparse ones are clipped row by row.

    torch's own clip raises on sparse gradients. Sparse gradients are coalesced first: the norm of repeated rows is not the norm of
    their sum, and scaling a coalesced copy would change nothing. Of gradients that FSDP2 shards the norm is that of all shards.

    Returns:
        The norm before clipping.
    """
    values: list[Tensor] = []
    norms: list[Tensor] = []  # of whole gradients
    parts: list[Tensor] = []  # of sharded ones
    for parameter in parameters:
        if parameter.grad is None:
            continue
        if parameter.grad.is_sparse:
            parameter.grad = parameter.grad.coalesce()
        gradient: Any = parameter.grad._values() if parameter.grad.is_sparse else parameter.grad
        (parts if sharded(gradient) else norms).append(torch.linalg.vector_norm(gradient, dtype=torch.float32))
        values.append(gradient.to_local() if sharded(gradient) else gradient)
    if not values:
        return torch.tensor(0.0)
    if parts:  # stacked, so that processes talk once
        norms.append(whole(torch.linalg.vector_norm(torch.stack(parts))))
    total = torch.linalg.vector_norm(torch.stack([norm.to(values[0].device) for norm in norms]))
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for value in values:
        value.mul_(scale.to(value.device, value.dtype))
    return total
