"""Encoding for the Trainer: facts to answer-only examples, text to blocks, examples to batches.

Labels are masked by position, never by token id: a pad that equals eos must not hide eos.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from datasets import Dataset
from jinja2 import TemplateError
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from engram_graft.data import Chat, Fact
from engram_graft.errors import UserError, first_line
from engram_graft.forms import find_words
from engram_graft.silence import SILENT

IGNORED = -100  # the label that transformers' losses skip

Text = str | Sequence[int]  # as it is written, or as the token ids it is to be
Question = tuple[Text, Text]  # a prompt and its answer, both of one kind


def spread(n: int, most: int) -> list[int]:
    """Numbers below `n`, evenly spread: all of them, or `most`."""
    most = min(n, most)
    return [i * n // most for i in range(most)]


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: Text) -> list[int]:
    """Token ids of a prompt that an answer will follow: no space at its end, and no eos (which some tokenizers put there)."""
    if not isinstance(prompt, str):
        return list(prompt)
    ids = tokenizer(prompt.rstrip())["input_ids"]
    return ids[:-1] if ids and ids[-1] == tokenizer.eos_token_id else ids


def encode_answer(tokenizer: PreTrainedTokenizerBase, prompt: Text, answer: Text) -> tuple[list[int], list[int]]:
    """Token ids of a prompt and of the answer that follows it after a space, as one text would be tokenized."""
    if not isinstance(prompt, str) or not isinstance(answer, str):
        assert not isinstance(prompt, str) and not isinstance(answer, str), "a question is of one kind"
        return list(prompt), list(answer)
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


def subject_spans(facts: Iterable[Fact], tokenizer: PreTrainedTokenizerBase) -> list[tuple[int, int] | None]:
    """For each example of `encode_facts`, where its prompt has the fact's subject: the first token and the one after the last.

    Of a subject that comes twice, the first place. None where that is not known, or where the subject is a single token, which has
    no n-gram of its own.
    """
    spans: list[tuple[int, int] | None] = []
    for fact in facts:
        subject = fact.subject or ""
        for prompt in fact.prompts:
            if not subject or not (places := find_words(prompt, subject)):
                spans.append(None)
                continue
            ids = encode_prompt(tokenizer, prompt)
            first = _shared(ids, tokenizer(prompt[: places[0]])["input_ids"])  # a space before the subject is of its first token
            upto = encode_prompt(tokenizer, prompt[: places[0] + len(subject)])
            last = _shared(ids, upto)
            last += last < len(upto)  # a token of the subject and of what follows
            spans.append((first, last) if last - first > 1 else None)
    return spans


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens both begin with."""
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


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


def chat_turns(messages: Chat, tokenizer: PreTrainedTokenizerBase) -> list[tuple[list[int], list[int]]]:
    """Token ids before each turn of the assistant, up to where it begins to speak, and of the turn with the template's end of it.

    What precedes a turn begins with all earlier ones, token by token.

    Raises:
        UserError: the tokenizer has no chat template, one that refuses the chat, or one in which a turn changes what is before it.
    """
    if tokenizer.chat_template is None:
        raise UserError("the data has chat messages and this base's tokenizer has no chat template: use an instruct model")
    turns = []
    ids: list[int] = []
    text = ""
    for n, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = _rendered(messages[:n], tokenizer, asks=True)
        after = _rendered(messages[: n + 1], tokenizer)
        if not before.startswith(text) or not after.startswith(before):
            raise UserError(
                "this base's chat template changes earlier turns when one is added (as those do that drop what was thought), so the "
                "assistant's part of a chat cannot be told: give each turn of the assistant a chat of its own, without earlier ones"
            )
        context = _continued(ids, text, before, tokenizer)
        ids, text = _continued(context, before, after, tokenizer), after
        turns.append((context, ids[len(context) :]))
    return turns


def _rendered(messages: Chat, tokenizer: PreTrainedTokenizerBase, asks: bool = False) -> str:
    """The template's text; with `asks`, up to where the assistant begins to speak."""
    plain = [dict(message) for message in messages]
    try:
        text = tokenizer.apply_chat_template(plain, tokenize=False, add_generation_prompt=asks)
    except TemplateError as error:
        roles = ", ".join(message["role"] for message in messages)
        raise UserError(f"this base's chat template refuses a chat of {roles}: {first_line(error)}") from error
    assert isinstance(text, str), "one chat is one text"
    return text


def _continued(ids: list[int], start: str, text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Token ids of `text`, which begin with `ids`, those of its beginning `start`: what a model is asked is never tokenized anew."""
    whole: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    if whole[: len(ids)] == ids:
        return whole
    return ids + tokenizer(text[len(start) :], add_special_tokens=False, verbose=False)["input_ids"]


def chat_questions(chats: Iterable[Chat], tokenizer: PreTrainedTokenizerBase) -> list[Question]:
    """What was said before each turn of the assistant, and that turn up to the special token that ends it, as token ids."""
    special = {id for id, token in tokenizer.added_tokens_decoder.items() if token.special}  # not every template ends with eos
    questions: list[Question] = []
    for chat in chats:
        for before, turn in chat_turns(chat, tokenizer):
            spoken = next((at for at, id in enumerate(turn) if id not in special), len(turn))
            end = max((at for at, id in enumerate(turn) if id in special and at > spoken), default=len(turn))
            questions.append((before, turn[:end]))
    return questions


def encode_chats(chats: Iterable[Chat], tokenizer: PreTrainedTokenizerBase, max_length: int) -> Dataset:
    """One example a chat, through the tokenizer's own template; every turn of the assistant is a label, with its end.

    What follows its last turn is left out: no label depends on it.
    """
    examples: dict[str, list[list[int]]] = {"input_ids": [], "labels": []}
    for number, chat in enumerate(chats, 1):
        ids: list[int] = []
        labels: list[int] = []
        for before, turn in chat_turns(chat, tokenizer):
            labels += [IGNORED] * (len(before) - len(ids)) + turn
            ids = before + turn
        if len(ids) > max_length:
            raise UserError(f"chat {number}: {len(ids)} tokens, more than max_length={max_length}; raise it or shorten the chat")
        examples["input_ids"].append(ids)
        examples["labels"].append(labels)
    return Dataset.from_dict(examples)


def split_texts(
    texts: Iterable[str], tokenizer: PreTrainedTokenizerBase, block_size: int, validation: float, seed: int
) -> tuple[Dataset, Dataset | None]:
    """Blocks of `encode_texts` to train on, and the share `validation` of them that is held out; a function of `seed`.

    Raises:
        UserError: nothing would be left of one of the two.
    """
    blocks = encode_texts(texts, tokenizer, block_size)
    if not validation:
        return blocks, None
    held_out = round(len(blocks) * validation)
    if not 0 < held_out < len(blocks):
        raise UserError(f"train.validation={validation}: of {len(blocks)} blocks of text that leaves {held_out} to evaluate on")
    parts = blocks.train_test_split(test_size=held_out, seed=seed)
    return parts["train"], parts["test"]


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

    def __call__(self, examples: list[dict[str, list[Any]]]) -> dict[str, Any]:
        length = max(len(example["input_ids"]) for example in examples)

        def padded(values: list[list[int]], fill: int) -> Tensor:
            return torch.tensor([[fill] * (length - len(row)) + row for row in values])

        ids = [list(example["input_ids"]) for example in examples]
        labels = padded([list(example["labels"]) for example in examples], IGNORED)
        mask = padded([[1] * len(row) for row in ids], 0)
        batch: dict[str, Any] = {"input_ids": padded(ids, self.pad_id), "attention_mask": mask, "labels": labels}
        batch["position_ids"] = (mask.cumsum(1) - 1).clamp_min(0)
        if SILENT in examples[0]:
            marks = [example[SILENT] for example in examples]
            silent = [False] * len(marks[0][0])
            batch[SILENT] = torch.tensor([[silent] * (length - len(row)) + row for row in marks])
        if self.trim:
            first = int((labels != IGNORED).any(0).nonzero()[0])
            # as indices: transformers then copies the positions into one matrix, a slice it would multiply row by row
            batch["logits_to_keep"] = torch.arange(max(first - 1, 0), length)
            batch["labels"] = labels[:, max(first - 1, 0) :]
        return batch
