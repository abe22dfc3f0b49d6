"""Tokenizer compression: token ids that spell the same word, but for case, accents and spacing, share one compressed id.

Source: Engram paper, section 2.2, and `CompressedTokenizer` of its demo.
"""

import dataclasses
import hashlib
from functools import cached_property

import numpy as np
from tokenizers import Regex, normalizers
from transformers import PreTrainedTokenizerBase

_SPACE = "\ue000"  # keeps a token that is one space from being stripped to nothing


@dataclasses.dataclass(frozen=True)
class TokenMap:
    """The surjective map V -> V' and what it was made from.

    Args:
        lookup: int64 `[V]`, the compressed id of every token id.
        size: V', the number of compressed ids.
        keys: the text that each token id was reduced to; two ids with equal keys share a compressed id.
    """

    lookup: np.ndarray
    size: int
    keys: tuple[str, ...]

    @cached_property
    def fingerprint(self) -> str:
        """sha256 of the keys in id order: two vocabularies whose ids would be hashed otherwise differ in it."""
        return hashlib.sha256("\x00".join(self.keys).encode("utf-8", "surrogatepass")).hexdigest()


def compress(tokenizer: PreTrainedTokenizerBase) -> TokenMap:
    """The compression of `tokenizer`, over all `len(tokenizer)` ids, added tokens included.

    Compressed ids are dense and in order of first appearance, so that the map depends on nothing but the vocabulary.
    """
    normalizer = normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex(r"^ $"), _SPACE),
            normalizers.Strip(),
            normalizers.Replace(_SPACE, " "),
        ]
    )
    keys: list[str] = []
    first: dict[str, int] = {}
    lookup = np.empty(len(tokenizer), dtype=np.int64)
    for token_id in range(len(tokenizer)):
        text = str(tokenizer.decode([token_id], skip_special_tokens=False))
        if "\ufffd" in text:  # part of a multi-byte character: only the raw token tells it from its neighbours
            key = str(tokenizer.convert_ids_to_tokens(token_id))
        else:
            key = normalizer.normalize_str(text) or text
        keys.append(key)
        lookup[token_id] = first.setdefault(key, len(first))
    return TokenMap(lookup, len(first), tuple(keys))


def lookup_of(addresses: str, token_map: TokenMap, embedding_rows: int) -> tuple[np.ndarray, int]:
    """The look-up of a memory, int64 `[max(V, embedding_rows)]`, and the number of ids that bounds its multipliers."""
    if addresses == "qwen4_exp":  # ids as they are
        return np.arange(max(len(token_map.lookup), embedding_rows), dtype=np.int64), embedding_rows
    return extend_lookup(token_map, embedding_rows), token_map.size


def extend_lookup(token_map: TokenMap, embedding_rows: int) -> np.ndarray:
    """int64 `[max(V, embedding_rows)]`: the look-up for every id the model can be fed.

    A model's embedding often has more rows than the tokenizer has ids (Qwen3: 151,936 and 151,669). The rest get compressed ids
    of their own behind V'; they are not counted in V', which bounds the multipliers.
    """
    extra = max(0, embedding_rows - len(token_map.lookup))
    return np.concatenate([token_map.lookup, token_map.size + np.arange(extra, dtype=np.int64)])
