"""The training examples of a recipe: its data with the facts that teach wordings, encoded, with the n-grams that training leaves out."""

from typing import Any

from datasets import Dataset
from torch import nn
from transformers import PreTrainedTokenizerBase

from engram_graft.background import background_texts, expected_rates
from engram_graft.data import TEACHER, Data, load_data
from engram_graft.encode import Question, encode_chats, encode_facts, split_texts, subject_spans
from engram_graft.errors import UserError
from engram_graft.forms import with_teachers
from engram_graft.grafted import find_graft
from engram_graft.ngrams import count_ngrams
from engram_graft.recipe import Recipe, TrainOptions
from engram_graft.silence import SILENT, Silence, Span


def training_data(recipe: Recipe, data: Data | None = None) -> Data:
    """`data`, or what `recipe.data` names, with as many wordings of each fact as are trained, and with the facts that teach them.

    Raises:
        UserError: the recipe names no data, or data that cannot be read or taught.
    """
    if data is None:
        if recipe.data is None:
            raise UserError("no training data: pass --data, a file of facts or text, or set data in the recipe")
        data = load_data(recipe.data)
    return with_teachers(data.with_forms(recipe.train.forms), recipe.teach)


def fact_questions(data: Data) -> list[Question]:
    """The first prompt of each of the data's own facts, and its answer."""
    return [(fact.prompts[0], fact.answer) for fact in data.facts if fact.split != TEACHER]


def find_silence(model: nn.Module, tokenizer: PreTrainedTokenizerBase, data: Data, options: TrainOptions) -> Silence | None:
    """What training a grafted model on `data` is to leave out; None: nothing.

    Raises:
        UserError: the memory has no seen filter, without which such n-grams would speak untrained.
    """
    teaches = any(fact.split == TEACHER for fact in data.facts)
    if not options.stop_ngrams and not teaches:
        return None
    graft = find_graft(model)
    if not graft.config.seen_filter:
        raise UserError(
            "engram.seen_filter=false: n-grams that training leaves out would speak untrained; keep the filter, or set "
            "train.stop_ngrams and teach.facts to 0"
        )
    plan, orders = graft.plan, graft.config.orders
    if not options.stop_ngrams:
        return Silence(plan.lookup, orders)
    ngrams = count_ngrams(training_examples(data, tokenizer, options)[0]["input_ids"][:], plan, whole=True)
    rates = expected_rates(model, background_texts(model, tokenizer, options.background, options.seed), ngrams)
    stopped = (spellings[rate >= options.stop_ngrams] for spellings, rate in zip(ngrams.distinct, rates, strict=True))
    return Silence(plan.lookup, orders, frozenset(tuple(gram) for of_order in stopped for gram in plan.lookup[of_order].tolist()))


def training_examples(
    data: Data, tokenizer: PreTrainedTokenizerBase, options: TrainOptions, silence: Silence | None = None
) -> tuple[Dataset, Dataset | None]:
    """What is trained, and what evaluation is on: facts of split "validation", or a share of the text; None: nothing.

    Facts that teach wordings are trained beside the others, which are repeated until both have about as many prompts
    and each of them is trained about as often.

    Raises:
        UserError: nothing would be left of one of the two.
    """
    if not data.facts:
        if data.chats:
            if options.validation:
                raise UserError(f"train.validation={options.validation}: is for text; of chats nothing is held out")
            trained, held_out = encode_chats(data.chats, tokenizer, options.max_length), None
        else:
            trained, held_out = split_texts(data.texts, tokenizer, options.block_size, options.validation, options.seed)
        return _marked(trained, silence, [None] * len(trained)), held_out
    if options.validation:
        raise UserError(
            f'train.validation={options.validation}: is for text; of facts, those with the split "validation" are held out'
        )
    own, teachers, validation = ([f for f in data.facts if f.split == s] for s in ("train", TEACHER, "validation"))
    if not own:
        raise UserError('no fact has split "train": nothing to learn from')
    share = sum(len(fact.prompts) for fact in teachers) / len(own)  # prompts that each fact gets, to be as many as the teachers'
    facts = [fact for fact in own for _ in range(max(1, round(share / len(fact.prompts))))] + teachers
    examples = encode_facts(facts, tokenizer, options.max_length)
    spans: list[Span | None] = subject_spans(facts, tokenizer) if teachers else [None] * len(examples)
    held_out = encode_facts(validation, tokenizer, options.max_length) if validation else None
    return _marked(examples, silence, spans), held_out


def _marked(examples: Dataset, silence: Silence | None, subjects: list[Span | None]) -> Dataset:
    if silence is None:
        return examples
    marks: list[Any] = [silence.marks(ids, span) for ids, span in zip(examples["input_ids"][:], subjects, strict=True)]
    return examples.add_column(SILENT, marks)  # type: ignore[call-arg]
