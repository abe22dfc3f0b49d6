"""Drawing the integers of a memory: multipliers and primes, as `NgramHashMapping` of the Engram demo draws them."""

import numpy as np
from sympy import nextprime

from engram_graft.config import LAYER_SEED_STRIDE, EngramConfig
from engram_graft.hashing import HashPlan


def plan_hashes(config: EngramConfig, lookup: np.ndarray, compressed_size: int, pad_id: int) -> HashPlan:
    """Draw the multipliers and find the primes of every layer of `config`.

    Args:
        lookup: int64 `[V]` from `extend_lookup`.
        compressed_size: V'; bounds the multipliers so that one product stays below 2**63.
        pad_id: token id (not compressed) of the pad.
    """
    half_bound = max(1, (np.iinfo(np.int64).max // compressed_size) // 2)
    multipliers, primes = [], []
    used: set[int] = set()  # one set for all layers and orders: no two heads of a memory share a modulus
    for layer_id in config.layer_ids:
        generator = np.random.default_rng(config.seed + LAYER_SEED_STRIDE * layer_id)
        draws = generator.integers(0, half_bound, size=config.max_ngram_size, dtype=np.int64)
        multipliers.append(draws * 2 + 1)  # odd, so that a product loses no bit of the id
        of_layer = []
        for base in config.engram_vocab_size:
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
    return HashPlan(np.stack(multipliers), moduli, offsets, lookup, int(lookup[pad_id]))
