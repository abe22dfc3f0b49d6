"""The control `knn_lm`: no training at all; the next token is looked up among the nearest states of the training data.

p = share * p_knn + (1 - share) * p_LM; p_knn weighs the nearest entries by softmax(-squared distance / temperature). An entry is the
input of the output embeddings at a position whose next token is trained, and that token.
Source: Khandelwal et al., Generalization through Memorization (arXiv 1911.00172), whose key is the input of the last feed-forward layer.
"""

import contextlib
import dataclasses
import importlib.util
import math
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from engram_graft.data import Data
from engram_graft.encode import IGNORED, encode_facts
from engram_graft.errors import UserError
from engram_graft.examples import training_examples
from engram_graft.locate import unwrap
from engram_graft.modes import no_learning
from engram_graft.recipe import TrainOptions

NEIGHBOURS = 16
QUERIES = 256  # that are compared with all entries at a time
HELD_OUT = 10  # of texts and chats every so manieth example is left out to tune on
SHARES = (0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95)
TEMPERATURES = (0.01, 0.03, 0.1, 0.3, 1.0)  # in mean squared distances to a neighbour
PUBLISHED = (0.25, 1.0)  # share and temperature of the paper, where there is nothing to tune on


@dataclasses.dataclass(frozen=True, eq=False)
class Datastore:
    """States and the tokens that follow them. Args: keys: float32 `[n, D]`; tokens: int64 `[n]`."""

    keys: Tensor
    tokens: Tensor

    def nearest(self, queries: Tensor) -> tuple[Tensor, Tensor]:
        """Squared distances, float32 `[q, k]`, and tokens, int64 `[q, k]`, of the entries nearest to `queries` `[q, D]`."""
        distances, tokens = [], []
        for part in queries.float().split(QUERIES):
            found = self._search(part)
            # anew and directly: what selects them subtracts large numbers
            distances.append((self.keys[found] - part[:, None]).square().sum(-1))
            tokens.append(self.tokens[found])
        return torch.cat(distances), torch.cat(tokens)

    def _search(self, queries: Tensor) -> Tensor:
        """int64 `[q, k]`: the nearest entries, all of them compared."""
        k = min(NEIGHBOURS, len(self.keys))
        if self._index is not None:
            return torch.from_numpy(self._index.search(np.ascontiguousarray(queries.numpy()), k)[1])
        return (self._norms - 2 * queries @ self.keys.T).topk(k, largest=False).indices

    @cached_property
    def _norms(self) -> Tensor:
        return self.keys.square().sum(1)

    @cached_property
    def _index(self) -> Any:
        """faiss' exact index, where the package is installed and the states are on the CPU; else None."""
        if self.keys.device.type != "cpu" or importlib.util.find_spec("faiss") is None:
            return None
        import faiss

        index = faiss.IndexFlatL2(self.keys.shape[1])
        index.add(self.keys.numpy())
        return index


@contextlib.contextmanager
def _states(model: nn.Module) -> Iterator[list[Tensor]]:
    """Gathers what each call gives the output embeddings, `[B, T, D]`: the model may scale or cap what comes out of them."""
    gathered: list[Tensor] = []
    handle = unwrap(model).get_output_embeddings().register_forward_pre_hook(lambda _, args: gathered.append(args[0].detach()))
    try:
        yield gathered
    finally:
        handle.remove()


def read_examples(model: nn.Module, examples: Dataset) -> tuple[Datastore, Tensor]:
    """Every trained position of `examples` as an entry, and the model's own log-probability, float32 `[n]`, of its token.

    Raises:
        UserError: the model does not call its output embeddings as a module.
    """
    device = unwrap(model).device
    keys, tokens, likely = [], [], []
    with _states(model) as states:
        for example in examples:
            labels = torch.tensor(example["labels"][1:], device=device)
            at = (labels != IGNORED).nonzero()[:, 0]
            with no_learning(model):
                logits = model(input_ids=torch.tensor([example["input_ids"]], device=device)).logits[0, at]
            if len(states) != 1:
                raise UserError(
                    f"{type(unwrap(model)).__name__}: its output embeddings ran {len(states)} times in a call, knn_lm needs the one "
                    "state they are given: leave knn_lm out of --controls"
                )
            keys.append(states.pop()[0, at].float())
            tokens.append(labels[at])
            likely.append(logits.float().log_softmax(-1).gather(1, labels[at, None])[:, 0])
    return Datastore(torch.cat(keys), torch.cat(tokens)), torch.cat(likely)


@contextlib.contextmanager
def interpolated(model: nn.Module, store: Datastore, share: float, temperature: float) -> Iterator[None]:
    """Every call of `model` gives the logits of the mixture inside the `with`; its softmax normaliser stays the model's."""

    def mix(module: nn.Module, args: Any, output: Any) -> Any:
        logits = output.logits.float()
        distances, tokens = store.nearest(states.pop().flatten(0, -2))
        weights = (-distances / temperature).softmax(-1)
        looked_up = torch.zeros_like(logits).flatten(0, -2).scatter_add_(1, tokens, weights).view_as(logits)
        known = looked_up.log() + logits.logsumexp(-1, keepdim=True) + _log(share)
        output.logits = torch.logaddexp(logits + _log(1 - share), known).to(output.logits.dtype)
        return output

    with _states(model) as states:
        handle = unwrap(model).register_forward_hook(mix)
        try:
            yield
        finally:
            handle.remove()


def tune(store: Datastore, asked: Datastore, likely: Tensor) -> tuple[float, float]:
    """Share and temperature with the least cross-entropy on the entries `asked`, whose tokens the model finds `likely`."""
    distances, tokens = store.nearest(asked.keys)
    right = tokens == asked.tokens[:, None]
    scale = max(float(distances.mean()), 1e-9)
    losses = {}
    for temperature in (scale * factor for factor in TEMPERATURES):
        found = ((-distances / temperature).softmax(-1) * right).sum(-1).log()
        for share in SHARES:
            losses[share, temperature] = -float(torch.logaddexp(likely + _log(1 - share), found + _log(share)).mean())
    return min(losses, key=losses.__getitem__)


def make_store(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, data: Data, options: TrainOptions
) -> tuple[Datastore, float, float, str]:
    """All that was trained as a datastore, the share and temperature to use it with, and what these were tuned on."""
    kept, asked, tuned_on = _parts(data, tokenizer, options)
    store, _ = read_examples(model, kept)
    if not len(asked):
        return (store, *PUBLISHED, tuned_on)
    held_out, likely = read_examples(model, asked)
    share, temperature = tune(store, held_out, likely)
    whole = Datastore(torch.cat([store.keys, held_out.keys]), torch.cat([store.tokens, held_out.tokens]))
    return whole, share, temperature, tuned_on


def _parts(data: Data, tokenizer: PreTrainedTokenizerBase, options: TrainOptions) -> tuple[Dataset, Dataset, str]:
    """The trained examples in two: those that tuning looks up in, and those that it asks about."""
    if data.facts:
        facts = [fact for fact in data.facts if fact.split == "train"]
        several = [fact for fact in facts if len(fact.prompts) > 1]
        parts = (
            [dataclasses.replace(fact, prompts=fact.prompts[:-1] or fact.prompts) for fact in facts],
            [dataclasses.replace(fact, prompts=fact.prompts[-1:]) for fact in several],
        )
        kept, asked = (encode_facts(part, tokenizer, options.max_length) for part in parts)
        return kept, asked, f"the last wording of {len(several)} facts" if several else "nothing: the published values"
    examples = training_examples(data, tokenizer, options)[0]
    left_out = range(HELD_OUT - 1, len(examples), HELD_OUT)
    kept = examples.select([n for n in range(len(examples)) if n not in left_out])
    return kept, examples.select(left_out), f"{len(left_out)} examples" if left_out else "nothing: the published values"


def _log(share: float) -> float:
    return math.log(share) if share else -math.inf
