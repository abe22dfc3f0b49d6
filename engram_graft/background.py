"""Which n-grams any text has: those that the base itself would write often. Learned from a few facts they would speak everywhere.

How often is not counted in what the base writes but expected from it: at each place of a sample the base says how likely every next
token is, so a few thousand tokens tell rates of a few in a million.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedTokenizerBase

from engram_graft.data import load_data
from engram_graft.encode import spread
from engram_graft.errors import UserError
from engram_graft.grafted import disable_graft, find_graft
from engram_graft.locate import unwrap
from engram_graft.modes import no_learning
from engram_graft.ngrams import Ngrams
from engram_graft.scoring import alone

SAMPLES, LENGTH = 32, 192  # texts that are read, and tokens of each


def background_texts(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, path: str | None = None, seed: int = 0
) -> list[list[int]]:
    """Token ids of pieces of the text file or folder `path`, evenly spread; without one, of what the base of a grafted model writes
    when nothing is asked.

    Such a sample begins with the token that begins texts, or else ends them, is drawn at temperature 1 and stops at eos; it is a
    function of `seed`, base and device, and leaves the random state as it was.

    Raises:
        UserError: `path` cannot be read, or holds no plain text.
    """
    if path is not None:
        if not (documents := load_data(path).texts):
            raise UserError(f"train.background={path}: must be plain text, which this is not")
        whole = [tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] for text in documents]
        pieces = [ids[start : start + LENGTH] for ids in whole for start in range(0, len(ids), LENGTH)]
        return [pieces[n] for n in spread(len(pieces), SAMPLES)]
    base: Any = unwrap(model)
    eos = tokenizer.eos_token_id
    start = next((id for id in (tokenizer.bos_token_id, eos) if id is not None), 0)
    ids = torch.full((SAMPLES, 1), start, device=base.device)
    settings = GenerationConfig(
        do_sample=True, temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=LENGTH, eos_token_id=eos, pad_token_id=eos or 0
    )
    with torch.random.fork_rng(), disable_graft(model, lora=True), no_learning(model), alone(settings, base):
        torch.manual_seed(seed)
        output = base.generate(input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=settings)
    texts = [row[1:] for row in output.tolist()]
    return [row[: row.index(eos)] if eos in row else row for row in texts]


def expected_rates(model: nn.Module, texts: Sequence[Sequence[int]], ngrams: Ngrams) -> list[np.ndarray]:
    """How often the base of a grafted model would write each n-gram where `texts` (token ids) go on: for each order, float64 `[n]`,
    times in a million tokens. Of the last token one spelling counts."""
    lookup = find_graft(model).plan.lookup
    following: dict[tuple[int, ...], list[tuple[int, int]]] = defaultdict(
        list
    )  # after a prefix: which n-gram of its order, last token
    for spellings in ngrams.distinct:
        for n, (prefix, last) in enumerate(zip(lookup[spellings[:, :-1]].tolist(), spellings[:, -1].tolist(), strict=True)):
            following[tuple(prefix)].append((n, last))
    sought = {prefix: np.array(found).T for prefix, found in following.items()}
    rates = [np.zeros(len(spellings)) for spellings in ngrams.distinct]
    tokens = 0
    for text in filter(None, texts):
        likely, ids = _next_tokens(model, text), lookup[np.asarray(text, np.int64)].tolist()
        tokens += len(ids)
        for end in range(1, len(ids) + 1):
            for length in range(1, min(end, len(rates)) + 1):
                if (found := sought.get(tuple(ids[end - length : end]))) is not None:
                    rates[length - 1][found[0]] += likely[end - 1, found[1]]
    return [rate / max(tokens, 1) * 1e6 for rate in rates]


def _next_tokens(model: nn.Module, text: Sequence[int]) -> np.ndarray:
    """Probabilities `[T, V]` of the base for the token after each of `text`."""
    ids = torch.tensor([list(text)], device=unwrap(model).device)
    with disable_graft(model, lora=True), no_learning(model):
        return model(input_ids=ids).logits[0].float().softmax(-1).cpu().numpy()
