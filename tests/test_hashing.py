"""Addresses: the two paths and a big-integer reference agree to the bit, and the integers are drawn as the demo draws them."""

import dataclasses

import numpy as np
import pytest
import torch

from engram_graft.config import EngramConfig
from engram_graft.errors import UserError
from engram_graft.hashing import HashPlan, NgramHash
from engram_graft.plan import plan_hashes
from engram_graft.window import Window

WRAPPING = [
    6148914691236517205,
    -7905747460161236407,
    4611686018427387905,
    -1234567890123456789,
    987654321987654321,
    -43,
]
IDS = [5, 1, 3, 3, 7, 0, 2, 11, 5]


def plan(lookup_size: int = 17, pad: int = 0, **changes: object) -> HashPlan:
    values = {
        "layer_ids": (0, 2),
        "engram_vocab_size": (23, 31),
        "n_head_per_ngram": 2,
        "n_embed_per_ngram": 8,
        **changes,
    }
    return plan_hashes(EngramConfig(**values), np.arange(lookup_size, dtype=np.int64), lookup_size, pad)


def tensor_rows(made: HashPlan, ids: list[int]) -> np.ndarray:
    hashed = NgramHash(made)
    return hashed(hashed.lookup[torch.tensor([ids])], Window(0, len(ids)))[0].numpy()


def wrap(x: int) -> int:
    """`x` as a signed 64-bit integer."""
    return (x + 2**63) % 2**64 - 2**63


def reference(made: HashPlan, ids: list[int], wrapping: bool = True, floored: bool = True) -> tuple[np.ndarray, int, int]:
    """Rows `[T, layers, heads]` in unbounded integers, and how many products wrapped and how many mixes were negative."""
    compressed = [int(made.lookup[i]) for i in ids]
    multipliers, primes, offsets = made.multipliers.tolist(), made.primes.tolist(), made.offsets.tolist()
    heads = len(primes[0]) // (len(multipliers[0]) - 1)
    wrapped = negative = 0
    rows = np.zeros((len(ids), *made.primes.shape), dtype=np.int64)
    for t in range(len(ids)):
        for layer in range(len(multipliers)):
            mix = 0
            for k, multiplier in enumerate(multipliers[layer]):
                product = (compressed[t - k] if t >= k else made.pad) * multiplier
                wrapped += product != wrap(product)
                mix ^= wrap(product) if wrapping else product
                negative += mix < 0
                for j in range((k - 1) * heads, k * heads) if k else ():
                    p = primes[layer][j]
                    remainder = mix % p if floored else abs(mix) % p * (-1 if mix < 0 else 1)
                    rows[t, layer, j] = remainder + offsets[layer][j]
    return rows, wrapped, negative


def wrapping_plan() -> HashPlan:
    made = plan(12, pad=9, layer_ids=(0, 3), max_ngram_size=6, engram_vocab_size=(101, 211, 307, 401, 503))
    return dataclasses.replace(made, multipliers=np.array([WRAPPING, WRAPPING[3:] + WRAPPING[:3]]))


@pytest.mark.parametrize("length", [1, 2, 7, len(IDS), 33])
def test_host_path_tensor_path_and_big_integers_agree_where_products_wrap_and_are_negative(length: int) -> None:
    made, ids = wrapping_plan(), (IDS * 4)[:length]
    rows, wrapped, negative = reference(made, ids)
    assert wrapped and negative, "control: this set does force both"
    assert np.array_equal(made.rows(np.array(ids)), rows)
    assert np.array_equal(made.rows(np.array([[ids, ids[::-1]]]))[0, 0], rows), "leading dimensions"
    assert np.array_equal(tensor_rows(made, ids), rows)
    assert rows.min() >= 0 and (rows < np.array(made.table_rows)[:, None]).all()


def test_control_without_the_wrap_or_with_a_truncated_remainder_the_rows_are_others() -> None:
    made = wrapping_plan()
    rows = made.rows(np.array(IDS))
    assert not np.array_equal(reference(made, IDS, wrapping=False)[0], rows)
    assert not np.array_equal(reference(made, IDS, floored=False)[0], rows)


def test_the_small_pins_hold() -> None:
    made = plan()
    assert made.primes.tolist() == [[23, 29, 31, 37], [41, 43, 47, 53]]
    assert made.offsets.tolist() == [[0, 23, 52, 83], [0, 41, 84, 131]]
    assert made.table_rows == [120, 184]
    assert made.multipliers.tolist() == [
        [345584389140502183, 146373131273213283, 22230238524970471],
        [445957540619575727, 216240924663359715, 132010278175435233],
    ]


def test_two_layers_draw_different_multipliers_from_one_seed_and_the_order_of_layers_does_not_matter() -> None:
    first, second = plan().multipliers
    assert not (first == second).any() and (plan().multipliers % 2 == 1).all()
    assert np.array_equal(plan(layer_ids=(2, 0)).multipliers, [second, first])
    assert not (plan(seed=1).multipliers == plan().multipliers).any()


def test_ids_beyond_the_tokenizers_are_not_counted_in_the_multiplier_bound() -> None:
    config = EngramConfig(layer_ids=(0, 2), engram_vocab_size=(23, 31))
    multipliers = [plan_hashes(config, np.arange(size), 17, 0).multipliers for size in (17, 40)]
    assert np.array_equal(*multipliers) and multipliers[0].max() <= (2**63 - 1) // 17
    assert not np.array_equal(plan_hashes(config, np.arange(40), 40, 0).multipliers, multipliers[0]), "control"


def test_the_prime_search_starts_at_base_minus_one_with_one_seen_set_over_all_layers_and_orders() -> None:
    assert plan(engram_vocab_size=(23, 23)).primes.tolist() == [[23, 29, 31, 37], [41, 43, 47, 53]]
    assert plan(engram_vocab_size=(2, 24)).primes.tolist() == [[2, 3, 29, 31], [5, 7, 37, 41]]
    assert plan(engram_vocab_size=(31, 23)).primes.tolist() == [[31, 37, 23, 29], [41, 43, 47, 53]]
    assert plan(engram_vocab_size=(22, 30), n_head_per_ngram=1).primes.tolist() == [[23, 31], [29, 37]]


def test_orders_start_at_two_a_one_gram_is_a_config_error() -> None:
    with pytest.raises(UserError, match="orders start at 2"):
        EngramConfig(max_ngram_size=1, engram_vocab_size=())


def test_case_3_the_current_token_enters_the_hash_and_the_newest_takes_multiplier_zero() -> None:
    made = plan(engram_vocab_size=(100_003, 100_003))
    other = IDS.copy()
    other[4] = 8
    for rows, changed in (
        (made.rows(np.array(IDS)), made.rows(np.array(other))),
        (tensor_rows(made, IDS), tensor_rows(made, other)),
    ):
        differ = (rows != changed).reshape(len(IDS), 2, 2, 2)  # T, layer, order, head
        assert not differ[:4].any(), "the past does not see it"
        assert differ[4:6].all(), "its own 2-gram and 3-gram do, and those of the next token"
        assert not differ[6, :, 0].any() and differ[6, :, 1].all(), "two later only the 3-gram"
        assert not differ[7:].any()
    oldest_first = made.rows(np.array([7]))[0] - made.offsets  # the pad is 0 here: one product is left
    assert np.array_equal(oldest_first, np.mod(7 * made.multipliers[:, :1], made.primes))


def test_positions_before_the_start_read_the_compressed_pad() -> None:
    made = dataclasses.replace(plan(17, pad=5), lookup=np.roll(np.arange(17), 3), pad=4)
    token_of_pad = made.lookup.tolist().index(4)
    prefixed = [token_of_pad, token_of_pad, *IDS]
    assert np.array_equal(made.rows(np.array(prefixed))[2:], made.rows(np.array(IDS)))
    assert np.array_equal(tensor_rows(made, prefixed)[2:], tensor_rows(made, IDS))
    assert not np.array_equal(dataclasses.replace(made, pad=3).rows(np.array(IDS)), made.rows(np.array(IDS))), "control"
    shifted = plan_hashes(EngramConfig(layer_ids=(0, 2), engram_vocab_size=(23, 31)), np.roll(np.arange(17), 3), 17, pad_id=5)
    assert shifted.pad == 2, "the plan's pad is compressed"


@pytest.mark.parametrize("size", [1, 2, 5])
def test_a_left_to_right_window_with_past_equals_the_whole(size: int) -> None:
    made = wrapping_plan()
    hashed, ids = NgramHash(made), (IDS * 4)[:33]
    whole, compressed = tensor_rows(made, ids), torch.tensor([ids])
    for past in range(0, 33, size):
        length = min(size, 33 - past)
        part = hashed(compressed[:, : past + length], Window(past, length))
        assert np.array_equal(part[0].numpy(), whole[past : past + length]), past


def test_left_padding_and_packing_give_the_rows_of_the_texts_alone() -> None:
    made = wrapping_plan()
    hashed, alone = NgramHash(made), torch.from_numpy(wrapping_plan().rows(np.array(IDS)))
    padded = hashed(torch.tensor([[3, 1, 4, *IDS]]), Window(0, 12, valid=torch.tensor([[False] * 3 + [True] * 9])))
    packed = hashed(torch.tensor([[3, 1, 4, *IDS]]), Window(0, 12, segment=torch.tensor([[0] * 3 + [1] * 9])))
    assert torch.equal(padded[0, 3:], alone) and torch.equal(packed[0, 3:], alone)
    assert not torch.equal(hashed(torch.tensor([[3, 1, 4, *IDS]]), Window(0, 12))[0, 3:], alone), "control"


def test_the_integers_are_state_and_are_read_back_not_drawn_again() -> None:
    made = wrapping_plan()
    other = NgramHash(plan(12, layer_ids=(0, 3), max_ngram_size=6, engram_vocab_size=(101, 211, 307, 401, 503), seed=9))
    other.load_state_dict(NgramHash(made).state_dict())
    for name, value in vars(other.plan).items():
        assert np.array_equal(value, getattr(made, name)) and getattr(value, "dtype", np.int64) == np.int64, name
    assert np.array_equal(other.plan.rows(np.array(IDS)), made.rows(np.array(IDS)))


def test_the_pins_of_qwen4_exp_and_of_deepseek_v41_hold() -> None:
    """Origin: their released configs (248,320 ids; 99,092 compressed ids) and tables."""
    qwen = EngramConfig(layer_ids=(1, 4), engram_vocab_size=(20_000_000,) * 2, addresses="qwen4_exp", seed=1234)
    made = plan_hashes(qwen, np.arange(248_320), 248_320, 0)
    assert made.multipliers[0].tolist() == [23703573157769, 20109073645365, 8052911324071]
    first, second = made.primes.tolist()
    assert first[:3] == [20000003, 20000023, 20000033] and first[-1] == 20000171 and second[0] == 20000213
    assert made.resets and made.pad == 0
    deepseek = EngramConfig(layer_ids=(1, 14), max_ngram_size=4, engram_vocab_size=(16_000_000,) * 3)
    made = plan_hashes(deepseek, np.arange(99_092), 99_092, 2)
    assert made.multipliers.tolist() == [
        [76632096046245, 4839876093313, 35959672319349, 73987337458391],
        [67716810739261, 51510806800915, 30921347202721, 82619226485591],
    ]
    assert made.table_rows == [384_006_168, 384_016_682] and not made.resets


def resetting_plan(pad: int = 3) -> HashPlan:
    """Of 5-grams, so that several ends of text fit into one; its wrapping multipliers tell every token from every other."""
    made = plan(12, pad, max_ngram_size=5, engram_vocab_size=(211,) * 4, addresses="qwen4_exp")
    return dataclasses.replace(made, multipliers=np.array([WRAPPING[:5], WRAPPING[1:]]))


def texts(ids: list[int], end: int) -> list[list[int]]:
    """The ids cut behind each end of text."""
    found: list[list[int]] = [[]]
    for token in ids:
        found[-1].append(token)
        if token == end:
            found.append([])
    return [text for text in found if text]


@pytest.mark.parametrize("ids", [IDS, [3, *IDS, 3, 3, 1, 3], [3], [5, 3], [3, 3, 3, 3, 3, 3, 3], [1, 2, 4, 5, 6, 7]])
def test_an_end_of_text_is_its_own_texts_last_token_and_nothing_reaches_over_it(ids: list[int]) -> None:
    made = resetting_plan()
    alone = np.concatenate([dataclasses.replace(made, resets=False).rows(np.array(text)) for text in texts(ids, 3)])
    assert np.array_equal(made.rows(np.array(ids)), alone)
    assert np.array_equal(made.rows(np.array([[ids, ids]]))[0, 1], alone)
    assert np.array_equal(tensor_rows(made, ids), alone)
    reaching = dataclasses.replace(made, resets=False).rows(np.array(ids))
    assert np.array_equal(reaching, alone) == (len(texts(ids, 3)) == 1 or set(ids) == {3}), "control"


@pytest.mark.parametrize("size", [1, 2, 5])
def test_an_end_of_text_holds_in_a_cached_decode_in_chunks_under_padding_and_in_packed_rows(size: int) -> None:
    made, ids = resetting_plan(), [3, 5, 1, 3, 7, 0, 3, 3, 2, 11, 5, 3, 1, 2]
    hashed, whole, length = NgramHash(made), torch.from_numpy(made.rows(np.array(ids))), len(ids)
    compressed = torch.tensor([ids])
    for past in range(0, length, size):
        now = min(size, length - past)
        assert torch.equal(hashed(compressed[:, : past + now], Window(past, now))[0], whole[past : past + now]), past
    before = [3, 1, 4, 8]
    row = torch.tensor([[*before, *ids]])
    valid = torch.tensor([[False] * 4 + [True] * length])
    segment = torch.tensor([[0] * 4 + [1] * length])
    for window in (Window(0, 4 + length, valid=valid), Window(0, 4 + length, segment=segment)):
        assert torch.equal(hashed(row, window)[0, 4:], whole)
    for past in range(4, 4 + length, size):
        now = min(size, 4 + length - past)
        part = hashed(row[:, : past + now], Window(past, now, valid=valid[:, : past + now]))
        assert torch.equal(part[0], whole[past - 4 : past - 4 + now]), past
    assert hashed.plan.resets and np.array_equal(hashed.plan.rows(np.array(ids)), whole.numpy())
