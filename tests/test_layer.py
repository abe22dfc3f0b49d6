"""One memory alone: exact zeros at the start, what the seen filter lets through, dtypes, n-grams that begin before the text."""

import math
from typing import Any

import pytest
import torch
from conftest import keep_seen
from torch import Tensor

from engram_graft.config import EngramConfig
from engram_graft.fresh import fresh_layer
from engram_graft.layer import Engram
from engram_graft.optim import EngramAdamW
from engram_graft.window import Window

WIDTH, ROWS, LENGTH = 12, 80, 9
PLAIN = {"layer_ids": (1,), "engram_vocab_size": (17, 19), "n_embed_per_ngram": 8, "n_head_per_ngram": 2}
PLAIN |= {"seen_filter": False, "whole_ngrams": False}
BRANCHES = [
    "key_norm",
    "key_proj.weight",
    "query_norm",
    "short_conv.norm",
    "short_conv.weight",
    "table.weight",
    "value_proj.weight",
]


def make(random: bool = True, seen: bool = True, **changes: Any) -> Engram:
    """A memory in eval mode; `random`: every parameter is, every row's too, and unless `seen` is False they count as looked up."""
    config = EngramConfig(**{**PLAIN, **changes})
    engram = fresh_layer(config, 0, ROWS, WIDTH, torch.device("cpu")).eval()
    generator = torch.Generator().manual_seed(1)
    if random:
        engram.table.touch(torch.arange(ROWS))
    for parameter in engram.parameters() if random else ():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
    if not seen:
        keep_seen(engram)
    return engram


def draw(engram: Engram, batch: int = 2) -> tuple[Tensor, Tensor]:
    """Hidden states, and rows of which no two are equal within a batch row."""
    generator = torch.Generator().manual_seed(2)
    shape = (batch, LENGTH, WIDTH) if engram.config.hc_mult == 1 else (batch, LENGTH, engram.config.hc_mult, WIDTH)
    rows = torch.stack([torch.randperm(ROWS, generator=generator)[: LENGTH * 4].reshape(LENGTH, 4) for _ in range(batch)])
    return torch.randn(shape, generator=generator), rows


def add(engram: Engram, hidden: Tensor, rows: Tensor, **window: Tensor) -> Tensor:
    return engram(hidden, rows, Window(0, hidden.shape[1], **window))[0]


@torch.no_grad()
def values(engram: Engram) -> dict[str, Tensor]:
    """What a memory computes with: its dense parameters, and every row as it is read."""
    dense = {name: parameter for name, parameter in engram.named_parameters() if name != "table.weight"}
    return {**dense, "table": engram.table.read(torch.arange(ROWS))}


def step(engram: Engram, hidden: Tensor, rows: Tensor) -> Tensor:
    """One optimizer step at 1e-3 (table 5e-3) towards a random target; the output after it."""
    dense = [p for n, p in engram.named_parameters() if n != "table.weight"]
    groups = [{"params": dense}, {"params": [engram.table.weight], "table": True, "lr": 5e-3, "weight_decay": 0.0}]
    optimizer = EngramAdamW(groups, lr=1e-3)
    target = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(3))
    (add(engram.train(), hidden, rows) - target).square().sum().backward()
    optimizer.step()
    return add(engram.eval(), hidden, rows).detach()


@pytest.mark.parametrize("hc_mult", [1, 4])
@pytest.mark.parametrize("changes", [{}, {"bias": True}, {"conv": False}, {"zero_init": "table"}, {"dtype": "bfloat16"}], ids=str)
def test_a_fresh_memory_adds_exactly_zero_and_depends_on_the_seed_alone(changes: dict[str, Any], hc_mult: int) -> None:
    engram = make(random=False, hc_mult=hc_mult, **changes)
    hidden, rows = draw(engram)
    for mode in (True, False):
        assert torch.equal(add(engram.train(mode), hidden, rows), torch.zeros_like(hidden))
    torch.manual_seed(99)
    again, other = (
        make(random=False, hc_mult=hc_mult, **changes),
        make(random=False, hc_mult=hc_mult, seed=1, **changes),
    )
    assert 0 < engram.table.count_seen() < ROWS and not again.table.count_seen(), "an order of look-ups is no part of it"
    one, same, differs = (values(memory) for memory in (engram, again, other))
    assert one.keys() == same.keys() and all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["key_proj.weight"], differs["key_proj.weight"])
    assert torch.equal(one["table"], differs["table"]) == (engram.config.zero_init == "table")
    seen = engram.table.seen_rows()
    assert torch.equal(engram.table.weight[seen], again.table.initial(seen))


@pytest.mark.parametrize("zero_init", ["value", "table"])
def test_after_one_step_the_addend_is_small_because_the_conv_starts_at_zero(zero_init: str) -> None:
    engram, trap = make(random=False, zero_init=zero_init), make(random=False, zero_init=zero_init)
    hidden, rows = draw(engram)
    trap.short_conv.weight.data.uniform_(-0.5, 0.5, generator=torch.Generator().manual_seed(0))  # torch's own start for 4 taps
    assert torch.equal(add(trap, hidden, rows), torch.zeros_like(hidden)), "the trap is an identity too, until the first step"
    small, large = (step(memory, hidden, rows).square().mean().sqrt() for memory in (engram, trap))
    assert 0 < small < 0.03 and large > 10 * small, (small, large)


@pytest.mark.parametrize(("zero_init", "moving"), [("value", "value_proj.weight"), ("table", "table.weight")])
def test_at_step_zero_only_the_zero_factor_has_a_gradient(zero_init: str, moving: str) -> None:
    engram = make(random=False, zero_init=zero_init).train()
    hidden, rows = draw(engram)
    for branches in ([moving], BRANCHES):
        (add(engram, hidden, rows) - 1).square().sum().backward()
        gradients = {n: p.grad.to_dense() if p.grad.is_sparse else p.grad for n, p in engram.named_parameters()}
        assert sorted(n for n, g in gradients.items() if g.count_nonzero()) == branches
        engram.zero_grad()
        for name in ("value_proj.weight", "table.weight", "short_conv.weight"):
            engram.get_parameter(name).data += 0.1  # control: nothing zero any more, and every branch has one


def test_an_unseen_ngram_contributes_exactly_zero_at_inference() -> None:
    engram = make(seen_filter=True, seen=False)
    hidden, rows = draw(engram)
    assert torch.equal(add(engram, hidden, rows), torch.zeros_like(hidden)), "nothing seen, nothing added"
    engram.table.touch(rows[0, 2])  # both orders
    engram.table.touch(rows[0, 4, :2])  # the 2-gram
    engram.table.touch(rows[0, 6, 1:3])  # one head of each: no n-gram
    known = torch.zeros(LENGTH, 2, dtype=torch.bool)
    known[2], known[4, 0] = True, True
    embeddings, active = engram.table(rows[:1])
    assert torch.equal(active[0], known)
    expected = engram.table.weight[rows[0]] * known.repeat_interleave(2, 1)[..., None]
    assert torch.equal(embeddings[0], expected.flatten(1)) and embeddings[0, 2].all()
    engram.short_conv = None  # it would carry a known position's value onwards
    out = add(engram, hidden[:1], rows[:1])[0]
    assert out[[2, 4]].all() and not out[[0, 1, 3, 5, 6, 7, 8]].any()


@pytest.mark.parametrize(
    ("train", "grad", "filters"), [(True, True, False), (True, False, True), (False, True, True), (False, False, True)]
)
def test_the_filter_is_off_and_rows_are_marked_only_while_learning(train: bool, grad: bool, filters: bool) -> None:
    engram, unfiltered = make(seen_filter=True, seen=False).train(train), make(seen=False).train(train)
    hidden, rows = draw(engram)
    engram.table.touch(rows[1, 3])
    everything = torch.arange(ROWS)
    before = engram.table.is_seen(everything)
    assert before.sum() == 4
    with torch.set_grad_enabled(grad):
        out, expected = add(engram, hidden, rows), add(unfiltered, hidden, rows)
    assert torch.equal(out, expected) != filters
    assert torch.equal(engram.table.is_seen(everything), before if filters else before.index_fill(0, rows.flatten(), True))
    if not filters:  # what learning marked is what inference lets through
        assert torch.equal(add(engram.eval(), hidden, rows), expected)


def test_only_allowed_ngrams_are_marked_seen_and_get_a_gradient() -> None:
    engram = make(whole_ngrams=True, seen_filter=True, seen=False).train()
    hidden, rows = draw(engram, batch=1)
    valid = torch.ones(1, LENGTH, dtype=torch.bool)
    valid[0, [0, 7]] = False  # a left pad and a hole: the text is 1..6, 8
    out = add(engram, hidden, rows, valid=valid)
    out.square().sum().backward()
    marked = [rows[0, 2, :2], *rows[0, 3:7], rows[0, 8]]
    expected = torch.zeros(ROWS, dtype=torch.bool).index_fill(0, torch.cat(marked), True)
    assert torch.equal(engram.table.is_seen(torch.arange(ROWS)), expected)
    touched = torch.zeros(ROWS, dtype=torch.bool).index_fill(0, engram.table.weight.grad.coalesce().indices()[0], True)
    assert torch.equal(touched, expected), "a row that is not learned gets no gradient, not even a zero"
    assert torch.equal(add(engram.eval(), hidden, rows, valid=valid), out), "and inference reads what learning read"


def test_a_text_without_any_whole_ngram_can_be_learned_from_and_moves_nothing() -> None:
    engram = make(whole_ngrams=True, seen_filter=True, seen=False)
    before = engram.table.weight.detach().clone()
    hidden, rows = draw(engram)
    out = step(engram, hidden[:, :1], rows[:, :1])
    assert not out.any() and not engram.table.count_seen() and torch.equal(engram.table.weight, before)


def test_padding_adds_exactly_zero_and_its_rows_do_not_matter() -> None:
    engram = make(bias=True)
    hidden, rows = draw(engram, batch=1)
    valid = torch.ones(1, LENGTH, dtype=torch.bool)
    valid[0, :3] = False
    out = add(engram, hidden, rows, valid=valid)
    assert not out[0, :3].any() and (out[0, 3:] - add(engram, hidden[:, 3:], rows[:, 3:])[0]).abs().max() < 1e-5
    other = torch.where(valid[..., None], rows, (rows + 1) % ROWS)
    assert torch.equal(add(engram, hidden, other, valid=valid), out)


@pytest.mark.parametrize("conv", [True, False])
def test_a_bias_does_not_speak_where_nothing_is_known(conv: bool) -> None:
    engram = make(bias=True, seen_filter=True, conv=conv, seen=False)
    hidden, rows = draw(engram, batch=1)
    assert torch.equal(add(engram, hidden, rows), torch.zeros_like(hidden))
    engram.table.touch(rows[0, 5])
    out = add(engram, hidden, rows)[0]
    assert out[5].all() and not out[:5].any() and not out[6:8].any()
    assert bool(out[8].any()) == conv, "three on, the second tap of the conv hears position 5"
    zeros = make(bias=True, conv=conv)
    zeros.table.weight.data.zero_()
    assert add(zeros, hidden, rows).all(), "control: this bias does speak where rows are read"


def test_whole_ngrams_position_zero_adds_exactly_zero_and_position_one_only_its_2gram() -> None:
    engram = make(whole_ngrams=True, bias=True)
    hidden, rows = draw(engram, batch=1)
    out = add(engram, hidden, rows)[0]
    assert not out[0].any() and out[1:].all() and make(bias=True)(hidden, rows, Window(0, LENGTH))[0].all()
    two, three = slice(0, 2), slice(2, 4)
    for position, order, matters in (
        (0, two, False),
        (0, three, False),
        (1, three, False),
        (1, two, True),
        (2, three, True),
    ):
        other = make(whole_ngrams=True, bias=True)
        other.table.weight.data[rows[0, position, order]] += 1
        assert torch.equal(add(other, hidden, rows)[0], out) != matters, (position, order)
    assert torch.equal(add(engram.train(), hidden, rows)[0], out), "learning is no exception"
    engram.eval()
    filtered = make(whole_ngrams=True, bias=True, seen_filter=True)
    assert filtered.table.count_seen() == ROWS
    assert torch.equal(add(filtered, hidden, rows)[0], out), "that training saw its rows does not make an n-gram whole"
    packed = torch.tensor([[0] * 4 + [1] * 5])
    split = add(engram, hidden, rows, segment=packed)[0]
    assert not split[4].any() and torch.equal(split[:4], out[:4]) and split[5].any()


def test_the_gate_is_the_formula_and_sigmoid_differs() -> None:
    signed, plain = make(), make(gate="sigmoid")
    hidden, rows = draw(signed)
    embeddings = signed.table(rows)[0]
    rms = [x / (x.square().mean(-1, keepdim=True) + 2**-23).sqrt() for x in (embeddings @ signed.key_proj.weight.T, hidden)]
    score = (rms[0] * signed.key_norm * rms[1] * signed.query_norm).sum(-1) / math.sqrt(WIDTH)
    for engram, expected in ((plain, score.sigmoid()), (signed, (score.sign() * score.abs().sqrt()).sigmoid())):
        assert (engram.gate(embeddings, hidden[:, :, None])[:, :, 0, 0] - expected).abs().max() < 1e-5
    assert (add(signed, hidden, rows) - add(plain, hidden, rows)).abs().max() > 1e-3


@pytest.mark.parametrize("memory", ["float32", "bfloat16"])
@pytest.mark.parametrize("hidden_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_memory_computes_in_its_own_dtype_and_answers_in_that_of_hidden(hidden_dtype: torch.dtype, memory: str) -> None:
    engram = make(dtype=memory)
    hidden, rows = draw(engram)
    hidden = hidden.to(hidden_dtype)
    out = add(engram, hidden, rows)
    assert out.dtype == hidden_dtype and engram.value_proj.weight.dtype == getattr(torch, memory)
    assert torch.equal(out, add(engram, hidden.to(getattr(torch, memory)), rows).to(hidden_dtype)) and out.any()


def test_autocast_changes_no_bit_of_output_or_gradient() -> None:
    results = []
    for enabled in (False, True):
        engram = make().train()
        hidden, rows = draw(engram)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            out = add(engram, hidden, rows)
            assert (torch.mm(hidden[0], hidden[0].T).dtype == torch.bfloat16) == enabled, "control: autocast is on"
        out.square().sum().backward()
        results.append([out.detach(), *(p.grad.to_dense() if p.grad.is_sparse else p.grad for p in engram.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("size", [1, 2, 5])
def test_the_conv_in_chunks_equals_the_whole_to_the_bit(size: int) -> None:
    engram = make(hc_mult=4)
    normed = torch.randn(2, 17, 4, WIDTH, generator=torch.Generator().manual_seed(5))
    whole = engram.short_conv(normed, Window(0, 17))
    for past in range(0, 17, size):
        length = min(size, 17 - past)
        part = engram.short_conv(normed[:, : past + length], Window(past, length))
        assert torch.equal(part, whole[:, past : past + length])


def test_a_call_without_a_known_ngram_skips_the_projections_and_adds_the_same_exact_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    from engram_graft import layer
    from engram_graft.config import EngramConfig
    from engram_graft.window import Window

    config = EngramConfig(layer_ids=(0,), engram_vocab_size=(11, 11), n_embed_per_ngram=4, n_head_per_ngram=2)
    memory = fresh_layer(config, 0, 60, 8, torch.device("cpu")).eval()
    torch.nn.init.normal_(memory.value_proj.weight)
    torch.nn.init.normal_(memory.short_conv.weight)
    hidden, rows, past = torch.randn(1, 3, 8), torch.randint(60, (1, 3, 4)), torch.randn(1, 9, 1, 8)
    window = Window(9, 3)
    with torch.no_grad():
        quick = memory(hidden, rows, window, past)
        monkeypatch.setattr(layer, "_silent", lambda active: False)
        slow = memory(hidden, rows, window, past)
    assert torch.equal(quick[0], slow[0]) and torch.equal(quick[1], slow[1]) and quick[0].abs().max() > 0


def test_a_call_with_one_known_ngram_is_not_taken_for_silent() -> None:
    from engram_graft.config import EngramConfig
    from engram_graft.window import Window

    memory = fresh_layer(
        EngramConfig(layer_ids=(0,), engram_vocab_size=(11, 11), n_embed_per_ngram=4, n_head_per_ngram=2),
        0,
        60,
        8,
        torch.device("cpu"),
    )
    torch.nn.init.normal_(memory.eval().value_proj.weight)
    rows = torch.arange(12).view(1, 3, 4)
    memory.table.touch(rows[0, 2, :2])  # the 2-gram of the last position
    with torch.no_grad():
        out = memory(torch.randn(1, 3, 8), rows, Window(9, 3), torch.zeros(1, 9, 1, 8))[0]
    assert not out[0, :2].any() and out[0, 2].any()
