"""N-grams that training leaves out. Never looked up, they are never known, and the seen filter keeps them silent at inference too.

Two kinds are better not learned. Those that run over the edge of a fact's subject ("Velmora is") belong to one fact in one wording: what is
learned there is not found in another, while the n-grams inside the subject and inside the wording serve every combination. And those
that are frequent in any text ("of the") would speak where no fact is asked for.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

SILENT = "silent_ngrams"  # column of a dataset and key of a batch: bool [T, orders]
Gram = tuple[int, ...]  # compressed ids
Span = tuple[int, int]  # a first token, and the one after the last


@dataclasses.dataclass(frozen=True)
class Silence:
    """What training leaves out. Args: lookup: compresses token ids; orders: 2 to `orders + 1`; grams: those left out everywhere."""

    lookup: np.ndarray
    orders: int
    grams: frozenset[Gram] = frozenset()

    def marks(self, input_ids: Sequence[int], subject: Span | None = None) -> list[list[bool]]:
        """bool `[T][orders]`: which n-grams that end at each token of a text are left out; with a `subject`, also those that hold
        tokens both of it and of what is around it."""
        ids = self.lookup[np.asarray(input_ids, dtype=np.int64)].tolist()
        return [
            [self._left_out(ids, end, order, subject) for order in range(2, self.orders + 2)] for end in range(1, len(ids) + 1)
        ]

    def _left_out(self, ids: list[int], end: int, order: int, subject: Span | None) -> bool:
        start = max(end - order, 0)
        if subject is not None and 0 < min(end, subject[1]) - max(start, subject[0]) < end - start:
            return True
        return tuple(ids[start:end]) in self.grams
