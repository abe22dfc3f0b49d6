"""What a probe is, and what it is asked about: one interface for everything in this folder."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from engram_graft.data import Data, Fact
from engram_graft.encode import Question, chat_questions, split_texts
from engram_graft.locate import unwrap
from engram_graft.modes import no_learning
from engram_graft.probes.arms import Arm, arms_of
from engram_graft.recipe import ProbeOptions, TrainOptions

Scores = dict[str, Any]  # plain values, as they go into probes.json


@dataclasses.dataclass(frozen=True)
class Probe:
    """One measurement.

    Args:
        name: its key in probes.json, at `arms.ARM.NAME`.
        about: one line for `engram-graft probe --list`.
        run: the scores of every arm of a subject by the arm's name; empty where the subject's data has nothing to ask.
        of_memory: it looks into the memory, so that there is nothing to ask of a control.
    """

    name: str
    about: str
    run: Callable[["Subject"], dict[str, Scores]]
    of_memory: bool = False


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model that is probed, and what it is asked.

    Args:
        data: facts, texts or chats.
        training: how `data` was trained on: how texts were cut and what was held out.
        trained: whether it was; if not, all of a text is held out.
        given_arms: the arms, "base" among them; None: all that mean something for the model.
        reference: the grafted model whose memory tells which n-grams were learned, where that is not `model` (a control).
    """

    model: nn.Module
    tokenizer: PreTrainedTokenizerBase
    data: Data
    options: ProbeOptions = dataclasses.field(default_factory=ProbeOptions)
    training: TrainOptions = dataclasses.field(default_factory=TrainOptions)
    trained: bool = True
    given_arms: Mapping[str, Arm] | None = None
    reference: nn.Module | None = None

    @cached_property
    def arms(self) -> Mapping[str, Arm]:
        """Its arms by name."""
        return arms_of(self.model) if self.given_arms is None else self.given_arms

    @property
    def device(self) -> torch.device:
        """Where its inputs go."""
        return unwrap(self.model).device

    def each_arm(self) -> Iterator[str]:
        """Each arm's name, with the model in that arm until the next one is asked for."""
        for name, arm in self.arms.items():
            with arm(self.model):
                yield name

    @cached_property
    def facts(self) -> list[Fact]:
        """The facts that were trained; all of them where none is of split "train"."""
        return [fact for fact in self.data.facts if fact.split == "train"] or list(self.data.facts)

    @cached_property
    def questions(self) -> list[Question]:
        """Trained prompts with their answers; of chats, what came before each turn of the assistant and that turn."""
        asked = [(prompt, fact.answer) for fact in self.facts for prompt in fact.prompts]
        return [*asked, *chat_questions(self.data.chats, self.tokenizer)]

    @cached_property
    def paraphrases(self) -> list[Question]:
        """The same facts in wordings that they were not trained in (others may have been: see `engram_graft.forms`)."""
        return [(prompt, fact.answer) for fact in self.facts for prompt in fact.paraphrases]

    @cached_property
    def blocks(self) -> tuple[Dataset | None, Dataset | None]:
        """Blocks of text that were trained on, and blocks that were held out; None where there are none."""
        if not self.data.texts:
            return None, None
        options = self.training
        trained, held_out = split_texts(
            self.data.texts, self.tokenizer, options.block_size, options.validation if self.trained else 0.0, options.seed
        )
        return (trained, held_out) if self.trained else (None, trained)

    def logits(self, input_ids: Tensor) -> Tensor:
        """Logits `[B, T, V]` of unpadded texts, in the arm the model is in."""
        with no_learning(self.model):
            return self.model(input_ids=input_ids.to(self.device)).logits
