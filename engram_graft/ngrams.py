"""N-grams of the training data by how often they occur: what is frequent, and how many look-ups a row gets. On the host, in numpy."""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from engram_graft.hashing import HashPlan

CHUNK = 2**16  # n-grams whose rows are computed at a time


@dataclasses.dataclass(frozen=True)
class Ngrams:
    """The n-grams of some texts; n-grams are of compressed ids, order 2 first.

    An n-gram is *hot* when it is one of the most frequent that together make half of the look-ups of its order: in the order of
    their frequency, those of one frequency together, cut where the share is closest to a half. Where all are equally frequent none
    is hot.

    Args:
        hot: bool `[tokens, orders]`, text after text: whether the n-gram that ends at a token is hot.
        starts: int64 `[texts + 1]`, where each text begins in `hot`.
        distinct: for each order, int64 `[n, order]`: token ids of the distinct n-grams, one spelling each.
        counts: for each order, int64 `[n]`: how often each occurs.
    """

    hot: np.ndarray
    starts: np.ndarray
    distinct: list[np.ndarray]
    counts: list[np.ndarray]

    def of(self, texts: Sequence[int]) -> np.ndarray:
        """`hot` of some of the texts, one after the other."""
        return np.concatenate([self.hot[self.starts[n] : self.starts[n + 1]] for n in texts])

    def rows(self, plan: HashPlan, layer: int) -> Iterator[np.ndarray]:
        """For each order, int64 `[n, heads]`: the rows of its distinct n-grams in the table of the memory number `layer`."""
        heads = plan.primes.shape[1] // len(self.distinct)
        for n, spellings in enumerate(self.distinct):
            of_order = slice(n * heads, (n + 1) * heads)
            pieces = [spellings[start : start + CHUNK] for start in range(0, len(spellings), CHUNK)]
            found = [plan.rows(piece)[:, -1, layer, of_order] for piece in pieces]
            yield np.concatenate([np.empty((0, heads), np.int64), *found])


def count_ngrams(
    texts: Sequence[Sequence[int]], plan: HashPlan, whole: bool, counted: Sequence[np.ndarray] | None = None
) -> Ngrams:
    """Count the n-grams of `texts` (token ids), each text on its own.

    Args:
        whole: count only n-grams that lie inside a text; otherwise also those that begin in the pads before it.
        counted: for each text, bool `[T, orders]`: the n-grams to count; None: all.
    """
    orders = plan.multipliers.shape[1] - 1
    pad = int(np.flatnonzero(plan.lookup == plan.pad)[0])
    lengths = [len(text) for text in texts]
    stream = np.concatenate([np.array([*[pad] * orders, *text], np.int64) for text in texts])
    place = np.concatenate([np.arange(-orders, length) for length in lengths])  # of a token in its text
    ids = plan.lookup[stream]
    number = ids  # of the n-gram that ends at each token
    hot, distinct, counts = [], [], []
    chosen = None if counted is None else np.concatenate([np.pad(of_text, ((orders, 0), (0, 0))) for of_text in counted])
    for order in range(2, orders + 2):
        # an n-gram is the one before it, a token shorter, and one token more
        _, number = np.unique(np.roll(number, 1) * (int(ids.max()) + 1) + ids, return_inverse=True)
        taken = place >= (order - 1 if whole else 0)
        at = np.flatnonzero(taken if chosen is None else taken & chosen[:, order - 2])
        count = np.bincount(number[at], minlength=int(number.max()) + 1)
        frequent = np.zeros(len(stream), dtype=bool)
        frequent[at] = _hot(count)[number[at]]
        hot.append(frequent[place >= 0])
        last = np.zeros_like(count)
        last[number[at]] = at
        last, count = last[count > 0], count[count > 0]
        distinct.append(stream[last[:, None] + np.arange(1 - order, 1)])
        counts.append(count)
    return Ngrams(np.stack(hot, -1), np.concatenate([[0], np.cumsum(lengths)]), distinct, counts)


def _hot(counts: np.ndarray) -> np.ndarray:
    """bool, of the shape of `counts`: see `Ngrams`."""
    frequencies, inverse, number = np.unique(counts, return_inverse=True, return_counts=True)
    lookups = frequencies * number
    share = np.append(lookups[::-1].cumsum()[::-1], 0) / max(lookups.sum(), 1)  # of those at least as frequent; of none
    fewest = np.abs(share - 0.5)[::-1].argmin()
    return inverse >= len(frequencies) - fewest
