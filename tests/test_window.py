"""Looking back k tokens of the same document, against a slow reference that walks column by column."""

import random

import pytest
import torch
from torch import Tensor

from engram_graft.window import Window

FILL = -7


def walk(valid: list[bool], segment: list[int], column: int, distance: int) -> int | None:
    """The column `distance` valid tokens before `column` in its document; None before the document's start."""
    while distance:
        column -= 1
        if column < 0 or segment[column] != segment[column + 1]:
            return None
        distance -= valid[column]
    return column


def check(past: int, length: int, valid: Tensor | None, segment: Tensor | None, batch: int = 3) -> int:
    """Compare `back` and `whole` with the reference at every valid column; how many looks back found a token."""
    total, found = past + length, 0
    window = Window(past, length, valid, segment)
    x = torch.arange(batch * total).reshape(batch, total) + 100
    wide = torch.stack([x, -x], -1)[:, :, None].double()  # [B, past + T, 1, 2]
    masks = [[True] * total] * batch if valid is None else valid.tolist()
    documents = [[0] * total] * batch if segment is None else segment.tolist()
    for distance in (*range(total + 3), 1):  # 1 again: a window remembers what it found
        got = window.back(x, distance, torch.tensor(FILL))
        got_wide = window.back(wide, distance, 0.5)
        assert got.shape == (batch, length) and got_wide.shape == (batch, length, 1, 2) and got.dtype == x.dtype
        for b in range(batch):
            for t in range(length):
                if masks[b][past + t]:
                    column = walk(masks[b], documents[b], past + t, distance)
                    found += column is not None
                    assert got[b, t] == (FILL if column is None else x[b, column]), (b, t, distance)
                    expected = torch.full((1, 2), 0.5) if column is None else wide[b, column]
                    assert torch.equal(got_wide[b, t], expected.double()), (b, t, distance)
    for orders in (1, 2, 4):
        whole = window.whole(orders, torch.device("cpu"))
        assert (whole is None) == (valid is None and segment is None and past >= orders)
        if whole is None:
            continue
        assert whole.dtype == torch.bool and whole.shape[1:] == (length, orders) and whole.shape[0] in (1, batch)
        for b in range(batch):
            for t in range(length):
                if masks[b][past + t]:
                    expected_whole = [walk(masks[b], documents[b], past + t, n) is not None for n in range(1, orders + 1)]
                    assert whole.expand(batch, -1, -1)[b, t].tolist() == expected_whole, (b, t, orders)
    return found


SHAPES = [(0, 1), (0, 2), (0, 7), (1, 1), (2, 1), (5, 3), (3, 6)]


@pytest.mark.parametrize(("past", "length"), SHAPES)
def test_one_unpadded_document_looks_back_by_columns(past: int, length: int) -> None:
    assert check(past, length, None, None) > 0


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("past", "length"), SHAPES)
def test_padding_anywhere_is_skipped(past: int, length: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    check(past, length, torch.rand(3, past + length, generator=generator) < 0.6, None)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("past", "length"), SHAPES)
def test_documents_of_a_packed_block_do_not_see_each_other(past: int, length: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    breaks = torch.rand(3, past + length, generator=generator) < 0.3
    check(past, length, None, breaks.cumsum(1))
    check(past, length, torch.rand(breaks.shape, generator=generator) < 0.7, breaks.cumsum(1))


def test_segment_numbers_need_only_differ_between_neighbours() -> None:
    check(0, 6, None, torch.tensor([[0, 0, 1, 0, 0, 1]]), batch=1)


@pytest.mark.parametrize(("past", "length"), SHAPES)
def test_an_all_true_mask_or_a_single_segment_is_the_same_as_none(past: int, length: int) -> None:
    shape = (2, past + length)
    x = torch.randn(*shape, 2, generator=torch.Generator().manual_seed(0))
    plain = Window(past, length)
    ways = [
        Window(past, length, valid=torch.ones(shape, dtype=torch.bool)),
        Window(past, length, segment=torch.zeros(shape, dtype=torch.long)),
    ]
    for distance in range(past + length + 3):
        for window in ways:
            assert torch.equal(window.back(x, distance, 0.0), plain.back(x, distance, 0.0)), distance


def test_a_window_with_past_is_the_end_of_the_whole() -> None:
    rng = random.Random(0)
    valid = torch.tensor([[rng.random() < 0.7 for _ in range(12)] for _ in range(3)])
    x = torch.arange(36).reshape(3, 12)
    for past in range(12):
        for mask in (None, valid):
            for distance in range(1, 14):
                whole, part = (Window(p, 12 - p, mask).back(x, distance, FILL)[:, past - p :] for p in (0, past))
                at = slice(None) if mask is None else mask[:, past:]
                assert torch.equal(whole[at], part[at]), (past, distance)


def test_back_passes_gradients_to_the_token_it_read() -> None:
    for mask in (None, torch.tensor([[False, True, True, False, True]])):
        x = torch.randn(1, 5, requires_grad=True)
        Window(0, 5, mask).back(x, 1, 0.0)[0, 4].backward()
        assert x.grad[0].tolist() == ([0, 0, 0, 1, 0] if mask is None else [0, 0, 1, 0, 0])
