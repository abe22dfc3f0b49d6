"""The memory's table: one row a head and hash value, which of them training has looked up, and the look-up itself."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class EngramTable(nn.Module):
    """Rows of all heads of one layer, concatenated; gradients are sparse, so a step costs what it touches.

    An n-gram is *seen* when the rows of all heads of its order were looked up in training: the heads are a Bloom filter whose
    false positives are occupancy**heads. With `seen_filter` an unseen n-gram reads exact zeros at inference.

    Args:
        rows: rows in total.
        head_dim: channels of a row.
        n_head: heads an order has.
        seen_filter: filter at inference (never while learning).
    """

    seen: Tensor

    def __init__(self, rows: int, head_dim: int, n_head: int, seen_filter: bool, dtype: torch.dtype, device: torch.device):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, head_dim, dtype=dtype, device=device))
        self.register_buffer("seen", torch.zeros(rows, dtype=torch.bool, device=device))
        self.n_head = n_head
        self.seen_filter = seen_filter
        # int64 [rows]: the row read in place of each; set by the "shuffled" probe only
        self.redirect: Tensor | None = None

    @property
    def learning(self) -> bool:
        """Whether this call is part of training: a module in train mode that only generates (no gradients) is not."""
        return self.training and torch.is_grad_enabled()

    def forward(self, rows: Tensor, allowed: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Look up `rows` `[B, T, orders*heads]`.

        Args:
            allowed: bool `[B or 1, T, orders]`, the n-grams that may be looked up and learned at all; None: every one.

        Returns:
            The embeddings `[B, T, orders*heads*head_dim]`, order-major, exact zeros where an n-gram does not contribute, and which
            ones contribute, bool `[B, T, orders]` (None: every one).
        """
        read = rows if self.redirect is None else self.redirect[rows]
        if self.learning and allowed is not None:
            # only these rows: what is not learned gets no gradient, not even a zero
            of_heads = allowed.repeat_interleave(self.n_head, -1).expand_as(rows)
            self.seen[rows[of_heads]] = True
            learned = F.embedding(read[of_heads], self.weight, sparse=True)
            embeddings = learned.new_zeros(*rows.shape, self.weight.shape[1]).index_put((of_heads,), learned)
            return embeddings.flatten(-2), allowed
        active = allowed
        if self.learning:
            self.seen[rows] = True
        elif self.seen_filter:
            active = self.known(rows) if allowed is None else self.known(rows) & allowed
        embeddings = F.embedding(read, self.weight, sparse=True)
        if active is not None:
            embeddings = embeddings.masked_fill(~active.repeat_interleave(self.n_head, -1)[..., None], 0)
        return embeddings.flatten(-2), active

    def known(self, rows: Tensor) -> Tensor:
        """bool `[B, T, orders]`: the n-grams whose rows `[B, T, orders*heads]` were all looked up in training."""
        return self.seen[rows].unflatten(-1, (-1, self.n_head)).all(-1)
