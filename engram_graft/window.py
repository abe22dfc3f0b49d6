"""Which earlier token a position sees: "k back" counted in valid tokens of the same document.

The hash and the convolution both look a fixed number of tokens back. In a batch with padding, a packed block or a cached decode
the k-th token back is not the k-th column to the left. This one class knows; everything else asks it.
"""

import torch
from torch import Tensor


class Window:
    """The last `length` columns of `past + length` columns, and how to look back from them.

    Args:
        past: columns that came before, from the cache.
        length: T, columns of this call.
        valid: bool `[B, past + T]`, False at padding; None when there is none.
        segment: int `[B, past + T]`, constant within a document, different for neighbours; None when there is one document.
    """

    def __init__(self, past: int, length: int, valid: Tensor | None = None, segment: Tensor | None = None):
        self.past, self.length, self.valid = past, length, valid
        # counted anew, so that two documents with one number are still two
        self.segment = None if segment is None else segment.diff(dim=1, prepend=segment[:, :1]).ne(0).cumsum(1)
        self._columns: dict[int, Tensor] = {}

    def back(self, x: Tensor, distance: int, fill: Tensor | float) -> Tensor:
        """`x` seen from the last T columns, `distance` valid tokens back; `fill` where the document had not begun.

        Args:
            x: `[B, past + T, ...]`.

        Returns:
            `[B, T, ...]`. At padding columns the result is unspecified for distance > 0: callers zero them.
        """
        if distance == 0:
            return x[:, self.past :]
        if self.valid is None and self.segment is None:
            missing = min(max(distance - self.past, 0), self.length)
            start = self.past - distance
            seen = x[:, max(start, 0) : max(start + self.length, 0)]
            if missing == 0:
                return seen
            head = torch.as_tensor(fill, dtype=x.dtype, device=x.device).expand(x.shape[0], missing, *x.shape[2:])
            return torch.cat([head, seen], 1)
        columns = self._columns_back(distance, x.shape[:2], x.device)  # (B, T), past + T means "none"
        outside = torch.as_tensor(fill, dtype=x.dtype, device=x.device).expand(x.shape[0], 1, *x.shape[2:])
        columns = columns.reshape(*columns.shape, *[1] * (x.ndim - 2)).expand(-1, -1, *x.shape[2:])
        return torch.cat([x, outside], 1).gather(1, columns)

    def whole(self, orders: int, device: torch.device) -> Tensor | None:
        """bool `[B or 1, T, orders]`: n-grams of order 2, 3, ... that begin inside the document; None when all of them do."""
        if self.valid is None and self.segment is None:
            if self.past >= orders:
                return None
            reach = torch.arange(self.past, self.past + self.length, device=device)
            return (reach[:, None] >= torch.arange(1, orders + 1, device=device))[None]
        known = self.valid if self.valid is not None else self.segment
        assert known is not None
        ones = torch.ones_like(known, dtype=torch.bool)
        return torch.stack([self.back(ones, n, False) for n in range(1, orders + 1)], -1).to(device)

    def _columns_back(self, distance: int, shape: torch.Size, device: torch.device) -> Tensor:
        if distance in self._columns:
            return self._columns[distance].to(device)
        batch, total = shape
        valid = self.valid if self.valid is not None else torch.ones(batch, total, dtype=torch.bool, device=device)
        # rank: 1 for the first valid token of a row, 2 for the second; column_of[rank] finds it again, 0 means "none"
        rank = valid.cumsum(1) * valid
        column_of = torch.full((batch, total + 1), total, dtype=torch.long, device=valid.device)
        column_of.scatter_(1, rank, torch.arange(total, device=valid.device).expand(batch, -1).contiguous())
        column_of[:, 0] = total
        columns = column_of.gather(1, (rank[:, self.past :] - distance).clamp_min(0))
        if self.segment is not None:
            segment = torch.cat([self.segment, torch.full_like(self.segment[:, :1], -1)], 1)  # no document has number -1
            same = segment.gather(1, columns) == self.segment[:, self.past :]
            columns = torch.where(same, columns, total)
        self._columns[distance] = columns
        return columns.to(device)
