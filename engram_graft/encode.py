"""Encoding for the Trainer: facts to answer-only examples, text to blocks, examples to batches.

Labels are masked by position, never by token id: a pad that equals eos must not hide eos.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from engram_graft.data import Fact
from engram_graft.errors import UserError

IGNORED = -100  # the label that transformers' losses skip


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: str) -> list[int]:
    """Token ids of a prompt that an answer will follow: no space at its end, and no eos (which some tokenizers put there)."""
    ids = tokenizer(prompt.rstrip())["input_ids"]
    return ids[:-1] if ids and ids[-1] == tokenizer.eos_token_id else ids


def encode_answer(tokenizer: PreTrainedTokenizerBase, prompt: str, answer: str) -> tuple[list[int], list[int]]:
    """Token ids of a prompt and of the answer that follows it after a space, as one text would be tokenized."""
    context = encode_prompt(tokenizer, prompt)
    whole = encode_prompt(tokenizer, f"{prompt.rstrip()} {answer}")
    if whole[: len(context)] == context:
        return context, whole[len(context) :]
    return context, tokenizer(f" {answer}", add_special_tokens=False)["input_ids"]


def encode_facts(facts: Iterable[Fact], tokenizer: PreTrainedTokenizerBase, max_length: int) -> Dataset:
    """One example a prompt: `input_ids` is prompt, answer, eos; `labels` is the same but for the prompt, which is masked."""
    examples: dict[str, list[list[int]]] = {"input_ids": [], "labels": []}
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]  # so that the model learns to stop
    for fact in facts:
        for prompt in fact.prompts:
            context, answer = encode_answer(tokenizer, prompt, fact.answer)
            ids = context + answer + end
            if len(ids) > max_length:
                raise UserError(
                    f"fact {fact.id}: {len(ids)} tokens, more than max_length={max_length}; raise it or shorten the fact"
                )
            examples["input_ids"].append(ids)
            examples["labels"].append([IGNORED] * len(context) + answer + end)
    return Dataset.from_dict(examples)


def encode_texts(texts: Iterable[str], tokenizer: PreTrainedTokenizerBase, block_size: int) -> Dataset:
    """Documents joined by eos and cut into blocks of `block_size` tokens, every token a label; the last block may be short."""
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    stream: list[int] = []
    for text in texts:
        stream += tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] + end
    blocks = [stream[start : start + block_size] for start in range(0, len(stream), block_size)]
    blocks = [block for block in blocks if len(block) > 1]  # one token has no next one to predict
    if not blocks:
        raise UserError("the text has fewer than two tokens: nothing to learn from")
    return Dataset.from_dict({"input_ids": blocks, "labels": blocks})


@dataclasses.dataclass(frozen=True)
class Collator:
    """Pads a batch on the left, with an attention mask and position ids that say where.

    Args:
        pad_id: fills the padding; any id will do.
        trim: keep labels, and ask the model for logits, only from one position before the first label on: with answer-only
            labels most of the vocabulary projection is never computed. For models whose forward takes `logits_to_keep`.
    """

    pad_id: int
    trim: bool = False

    def __call__(self, examples: list[dict[str, list[int]]]) -> dict[str, Any]:
        length = max(len(example["input_ids"]) for example in examples)

        def padded(values: list[list[int]], fill: int) -> Tensor:
            return torch.tensor([[fill] * (length - len(row)) + row for row in values])

        ids = [list(example["input_ids"]) for example in examples]
        labels = padded([list(example["labels"]) for example in examples], IGNORED)
        mask = padded([[1] * len(row) for row in ids], 0)
        batch: dict[str, Any] = {"input_ids": padded(ids, self.pad_id), "attention_mask": mask, "labels": labels}
        batch["position_ids"] = (mask.cumsum(1) - 1).clamp_min(0)
        if self.trim:
            first = int((labels != IGNORED).any(0).nonzero()[0])
            # as indices: transformers then copies the positions into one matrix, a slice it would multiply row by row
            batch["logits_to_keep"] = torch.arange(max(first - 1, 0), length)
            batch["labels"] = labels[:, max(first - 1, 0) :]
        return batch
