"""Forms: the wordings that facts of one relation are asked in, and invented facts that teach the wordings themselves.

A memory is keyed by exact n-grams, so a fact trained in one wording is mostly not found in another. Facts of the same relation that are
trained in every wording teach the wordings, for all facts of the relation: such teachers are made here, from invented subjects.
"""

import dataclasses
import random
import re
from collections.abc import Iterable, Mapping, Sequence

from engram_graft.data import TEACHER, Data, Fact
from engram_graft.errors import UserError
from engram_graft.recipe import TeachOptions

GAP = "{}"  # where a template has its subject
_ONSETS = (
    "b",
    "br",
    "c",
    "d",
    "dr",
    "f",
    "g",
    "gl",
    "h",
    "j",
    "k",
    "l",
    "m",
    "n",
    "p",
    "pr",
    "r",
    "s",
    "st",
    "t",
    "tr",
    "v",
    "w",
    "z",
)
_VOWELS = ("a", "e", "i", "o", "u")
_CODAS = ("l", "m", "n", "r", "s", "th", "ck", "x", "nd", "rt")
_WORD = re.compile(r"\w+(?:['\u2019-]\w+)*")


@dataclasses.dataclass(frozen=True)
class Relation:
    """Facts that share wordings. Args: templates: each with one `{}`, in the order they were found; subjects, answers: of its facts."""

    templates: tuple[str, ...]
    subjects: tuple[str, ...]
    answers: tuple[str, ...]


def find_relations(facts: Sequence[Fact], templates: Mapping[str, Sequence[str]] | None = None) -> list[Relation]:
    """The relations among `facts`: facts belong together when a template is common to them.

    A fact's subject is its own field; or what fills one of the given templates in one of its prompts; or the longest run of words that
    all its prompts and paraphrases have in common.

    Args:
        templates: lists of wordings by any name, each wording with one `{}`; they join what they match.
    """
    given = [tuple(forms) for forms in (templates or {}).values()]
    groups: list[tuple[dict[str, None], dict[str, None], dict[str, None]]] = []
    for fact in facts:
        subject = find_subject(fact, [form for forms in given for form in forms])
        if subject is None:
            continue
        forms = dict.fromkeys(_template(text, subject) for text in (*fact.prompts, *fact.paraphrases) if subject in text)
        for more in given:
            if forms.keys() & set(more):
                forms |= dict.fromkeys(more)
        merged = (forms, {subject: None}, {fact.answer: None})
        for group in [group for group in groups if group[0].keys() & forms.keys()]:
            groups.remove(group)
            merged = (group[0] | merged[0], group[1] | merged[1], group[2] | merged[2])
        groups.append(merged)
    return [Relation(tuple(forms), tuple(subjects), tuple(answers)) for forms, subjects, answers in groups]


def find_subject(fact: Fact, templates: Iterable[str] = ()) -> str | None:
    """What `fact` is about, as its prompts spell it; None where that cannot be told (one prompt that no template matches)."""
    if fact.subject is not None:
        return fact.subject
    texts = (*fact.prompts, *fact.paraphrases)
    for template in templates:
        before, after = template.split(GAP)
        for text in texts:
            if text.startswith(before) and text.endswith(after) and len(text) > len(before) + len(after):
                return text[len(before) : len(text) - len(after)]
    if len(texts) < 2:
        return None
    # positions of words, so that what lies between two of them (a space, a dot) belongs to a run
    spans = [match.span() for match in _WORD.finditer(texts[0])]
    best = ""
    for first in range(len(spans)):
        for last in range(first, len(spans)):
            run = texts[0][spans[first][0] : spans[last][1]]
            if len(run) > len(best) and all(re.search(rf"(?<!\w){re.escape(run)}(?!\w)", text) for text in texts[1:]):
                best = run
    return best or None


def _template(text: str, subject: str) -> str:
    return text.replace(subject, GAP, 1)


def with_teachers(data: Data, options: TeachOptions) -> Data:
    """`data` with invented facts of split "teacher" for each of its relations, and with the subjects of its own facts filled in.

    Raises:
        UserError: teachers are asked for and the data has no facts, or none whose relation has two wordings.
    """
    if not options.facts or any(fact.split == TEACHER for fact in data.facts):
        return data
    forms = [form for forms in options.templates.values() for form in forms]
    facts = tuple(dataclasses.replace(fact, subject=find_subject(fact, forms)) for fact in data.facts)
    teachers = make_teachers(find_relations(facts, options.templates), options.facts, options.seed)
    if not teachers:
        raise UserError(
            f"teach.facts={options.facts}: the data has no facts that are asked in two wordings or more; give facts paraphrases, or "
            "their relations' wordings in teach.templates"
        )
    return dataclasses.replace(data, facts=(*facts, *teachers))


def make_teachers(relations: Sequence[Relation], each: int, seed: int = 0) -> list[Fact]:
    """`each` invented facts for every relation with two wordings or more, each asked in all of them, the answers drawn from the
    relation's own. Deterministic in `seed`."""
    rng = random.Random(seed)
    taken = {subject for relation in relations for subject in relation.subjects}
    teachers = []
    for number, relation in enumerate(relations):
        for n in range(each if len(relation.templates) > 1 else 0):
            subject = _invent(rng, rng.choice(relation.subjects), taken)
            taken.add(subject)
            prompts = tuple(template.replace(GAP, subject) for template in relation.templates)
            answer = relation.answers[n % len(relation.answers)]
            teachers.append(Fact(f"teacher-{number + 1}-{n + 1}", prompts, answer, split=TEACHER, subject=subject))
    return teachers


def _invent(rng: random.Random, like: str, taken: set[str]) -> str:
    """A name of as many words as `like`, capitalised as they are, that nothing in `taken` has."""
    while True:
        words = []
        for word in like.split():
            made = "".join(rng.choice(_ONSETS) + rng.choice(_VOWELS) for _ in range(rng.choice((2, 2, 3)))) + rng.choice(_CODAS)
            words.append(made.capitalize() if word[:1].isupper() else made)
        if (name := " ".join(words)) not in taken:
            return name
