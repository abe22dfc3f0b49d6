"""Tokenizer compression: which ids share a compressed id, which must not, and how another tokenizer is told apart."""

import copy
import json
import re
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from engram_graft.compress import compress, extend_lookup


def words(*vocabulary: str) -> PreTrainedTokenizerFast:
    """A tokenizer with exactly these tokens, in this order."""
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({w: i for i, w in enumerate(vocabulary)}, vocabulary[0]))
    )


def byte_level(texts: list[str], size: int) -> PreTrainedTokenizerFast:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False))
    return PreTrainedTokenizerFast(tokenizer_object=bpe)


def edited(tokenizer: PreTrainedTokenizerFast, swap: tuple[str, str]) -> PreTrainedTokenizerFast:
    """`tokenizer` with the ids of two tokens exchanged in its json."""
    spec = json.loads(tokenizer.backend_tokenizer.to_str())
    vocabulary = spec["model"]["vocab"]
    a, b = swap
    vocabulary[a], vocabulary[b] = vocabulary[b], vocabulary[a]
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(spec)))


def slow_key(tokenizer: Any, token_id: int) -> str:
    """The key in Python's own unicode."""
    text = tokenizer.decode([token_id], skip_special_tokens=False)
    if "\ufffd" in text:
        return str(tokenizer.convert_ids_to_tokens(token_id))
    folded = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
    folded = "".join(c for c in folded if unicodedata.category(c) != "Mn").lower()
    folded = re.sub(r"[ \t\r\n]+", " ", folded)
    return folded if folded == " " else folded.strip() or text


def test_case_accent_and_space_variants_share_a_compressed_id_and_other_words_do_not() -> None:
    variants = ["Café", "café", "CAFE", " cafe", "cafe ", "\u00a0cafe", "cafe\u0301", "\uff43\uff41\uff46\uff45"]
    others = ["caff", "cafés", "ca fe", "cafe.", "c"]
    token_map = compress(words("<pad>", *variants, *others))
    assert token_map.lookup[1 : len(variants) + 1].tolist() == [1] * len(variants)
    assert token_map.lookup[len(variants) + 1 :].tolist() == [2, 3, 4, 5, 6]


def test_white_space_shares_one_id_and_a_lone_accent_keeps_its_raw_text() -> None:
    token_map = compress(words("<pad>", " ", "\n", "\t\t", " \r\n ", "\u0301", "\u0302", "a\n\nb", "A b"))
    assert token_map.lookup.tolist() == [0, 1, 1, 1, 1, 2, 3, 4, 4]
    assert token_map.keys[1] == " " and token_map.keys[5] == "\u0301" and token_map.keys[7] == "a b"


def test_every_key_is_the_one_pythons_unicode_gives(tokenizer: Any) -> None:
    other = byte_level(["Café CAFÉ café ÉCOLE école naïve \ufb01ne \u00bd \u2167\n\n\tx"] * 5, 340)
    for made in (tokenizer, other):
        assert list(compress(made).keys) == [slow_key(made, i) for i in range(len(made))]


def test_ids_are_dense_in_first_seen_order_and_follow_the_keys(tokenizer: Any) -> None:
    token_map = compress(tokenizer)
    assert token_map.lookup.dtype == np.int64 and token_map.size < len(tokenizer)
    assert list(dict.fromkeys(token_map.lookup.tolist())) == list(range(token_map.size))
    first: dict[str, int] = {}
    assert token_map.lookup.tolist() == [first.setdefault(key, len(first)) for key in token_map.keys]


def test_a_byte_level_vocabulary_joins_case_and_space_but_no_two_parts_of_a_character(tokenizer: Any) -> None:
    token_map = compress(tokenizer)

    def of(token: str) -> int:
        return int(token_map.lookup[tokenizer.convert_tokens_to_ids(token)])

    spaced = next(token for token in tokenizer.get_vocab() if re.fullmatch("Ġ[a-z]", token))
    assert of(spaced) == of(spaced[1]) == of(spaced[1].upper()) and of("Ċ") == of("Ġ") == of("ĉ")
    assert of("a") == of("A") != of("b") == of("B")
    parts = [i for i in range(len(tokenizer)) if "\ufffd" in tokenizer.decode([i])]
    assert len(parts) >= 100 and len(set(token_map.lookup[parts].tolist())) == len(parts)
    assert (np.bincount(token_map.lookup)[token_map.lookup[parts]] == 1).all(), "nor with anything else"


def test_special_and_added_tokens_are_covered(tokenizer: Any) -> None:
    token_map = compress(tokenizer)
    assert len(token_map.lookup) == len(token_map.keys) == len(tokenizer) > tokenizer.vocab_size
    named = [tokenizer.convert_tokens_to_ids(token) for token in ("<pad>", "<eos>", "<|added|>")]
    assert [token_map.keys[i] for i in named] == ["<pad>", "<eos>", "<|added|>"] and named[2] == len(tokenizer) - 1
    more = copy.deepcopy(tokenizer)
    more.add_tokens([" THE", "<|more|>"])
    longer = compress(more)
    assert np.array_equal(longer.lookup[:-2], token_map.lookup), "added tokens come last and change nothing before them"
    assert longer.size == token_map.size + 2 - (" the" in token_map.keys or "the" in token_map.keys)


def test_rows_beyond_the_tokenizer_get_fresh_ids_behind_the_compressed_size(tokenizer: Any) -> None:
    token_map = compress(tokenizer)
    extended = extend_lookup(token_map, len(tokenizer) + 8)
    assert extended.dtype == np.int64 and np.array_equal(extended[:-8], token_map.lookup)
    assert extended[-8:].tolist() == list(range(token_map.size, token_map.size + 8))
    for rows in (len(tokenizer), len(tokenizer) - 5):
        assert np.array_equal(extend_lookup(token_map, rows), token_map.lookup)


def test_the_fingerprint_is_that_of_the_vocabulary_and_survives_saving(tokenizer: Any, tmp_path: Path) -> None:
    tokenizer.save_pretrained(tmp_path)
    again = compress(PreTrainedTokenizerFast.from_pretrained(tmp_path))
    assert again.fingerprint == compress(tokenizer).fingerprint and re.fullmatch("[0-9a-f]{64}", again.fingerprint)
    assert np.array_equal(again.lookup, compress(tokenizer).lookup)


@pytest.mark.parametrize("swap", [("1", "2"), ("a", "b"), ("Ã", "Â")])
def test_the_fingerprint_differs_where_size_and_collisions_are_the_same_but_strings_are_not(
    tokenizer: Any, swap: tuple[str, str]
) -> None:
    same = edited(tokenizer, ("1", "1"))
    other = edited(tokenizer, swap)
    assert compress(same).fingerprint == compress(tokenizer).fingerprint, "control: editing alone changes nothing"
    assert len(other) == len(tokenizer) and compress(other).size == compress(tokenizer).size
    if swap != ("a", "b"):  # "A" and "B" stay where they are, so here the collisions move too
        assert np.array_equal(compress(other).lookup, compress(tokenizer).lookup)
    assert compress(other).fingerprint != compress(tokenizer).fingerprint


def test_the_fingerprint_differs_for_other_words_other_training_text_and_one_token_more(tokenizer: Any) -> None:
    one, two = (compress(words(*vocabulary)) for vocabulary in (("<pad>", "The", "the", "cat"), ("<pad>", "Any", "any", "dog")))
    assert np.array_equal(one.lookup, two.lookup) and one.fingerprint != two.fingerprint
    trained = [compress(byte_level([text] * 3, 270)) for text in ("abcabcabcd xyz", "mnomnomnop xyz")]
    assert len(trained[0].lookup) == len(trained[1].lookup) and trained[0].fingerprint != trained[1].fingerprint
    more = copy.deepcopy(tokenizer)
    more.add_tokens(["<|more|>"])
    assert compress(more).fingerprint != compress(tokenizer).fingerprint


def test_the_fingerprint_keeps_token_boundaries() -> None:
    assert compress(words("a", "bc")).fingerprint != compress(words("ab", "c")).fingerprint
