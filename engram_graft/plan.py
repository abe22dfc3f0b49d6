"""Drawing the integers of a memory: multipliers and primes, as `NgramHashMapping` of the Engram demo draws them, or as transformers'
`qwen4_exp` does."""

import numpy as np
from sympy import nextprime

from engram_graft.config import LAYER_SEED_STRIDE, EngramConfig
from engram_graft.hashing import HashPlan
from engram_graft.initial import GAMMA, splitmix64


def plan_hashes(config: EngramConfig, lookup: np.ndarray, ids: int, pad_id: int) -> HashPlan:
    """Draw the multipliers and find the primes of every layer of `config`.

    Args:
        lookup, ids: from `compress.lookup_of`; `ids` bounds the multipliers so that one product stays below 2**63.
        pad_id: token id (not compressed) of the pad.
    """
    half_bound = max(1, (np.iinfo(np.int64).max // ids) // 2)
    multipliers, primes = [], []
    used: set[int] = set()  # one set for all layers and orders: no two heads of a memory share a modulus
    for index in range(len(config.layer_ids)):
        multipliers.append(_draws(config, index, half_bound) * 2 + 1)  # odd, so that a product loses no bit of the id
        of_layer = []
        for base in config.engram_vocab_size:  # of one base throughout, as qwen4_exp's is, the primes are consecutive
            prime = base - 1  # so that a prime base is itself the first candidate
            for _ in range(config.n_head_per_ngram):
                prime = nextprime(prime)
                while prime in used:
                    prime = nextprime(prime)
                used.add(prime)
                of_layer.append(int(prime))
        primes.append(of_layer)
    moduli = np.array(primes, dtype=np.int64)
    offsets = np.concatenate([np.zeros((len(moduli), 1), dtype=np.int64), moduli.cumsum(1)[:, :-1]], 1)
    return HashPlan(np.stack(multipliers), moduli, offsets, lookup, int(lookup[pad_id]), config.resets)


def _draws(config: EngramConfig, index: int, half_bound: int) -> np.ndarray:
    """int64 `[N]` in [0, half_bound), for the memory's layer `index`."""
    if config.addresses == "qwen4_exp":  # by the how manieth memory it is, not by the layer it is in front of
        seed = config.seed + LAYER_SEED_STRIDE * index
        draws = [splitmix64(seed + GAMMA * (n + 1)) % half_bound for n in range(config.max_ngram_size)]
        return np.array(draws, dtype=np.int64)
    generator = np.random.default_rng(config.seed + LAYER_SEED_STRIDE * config.layer_ids[index])
    return generator.integers(0, half_bound, size=config.max_ngram_size, dtype=np.int64)
