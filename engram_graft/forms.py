"""Forms: the wordings that facts of one relation are asked in, and invented facts that teach the wordings themselves.

A memory is keyed by exact n-grams, so a fact trained in one wording is mostly not found in another. Facts of the same relation that are
trained in every wording teach the wordings, for all facts of the relation: such teachers are made here, from invented subjects.
"""

import dataclasses
import random
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from engram_graft.data import TEACHER, Data, Fact
from engram_graft.errors import UserError
from engram_graft.recipe import TeachOptions

GAP = "{}"  # where a template has its subject
_ONSETS = [*"bcdfghjklmnprstvwz", "br", "dr", "gl", "pr", "st", "tr"]
_VOWELS = [*"aeiou"]
_CODAS = [*"lmnrsx", "th", "ck", "nd", "rt"]
# a vowel sign of Hindi or Thai, or an accent written apart, is part of its word; to `re` it is not
_WORD = re.compile(r"[\w" + "".join(chr(n) for n in range(0x300, 0x10000) if unicodedata.category(chr(n)).startswith("M")) + "]+")


@dataclasses.dataclass(frozen=True)
class Relation:
    """Facts that share wordings. Args: templates: with `{}` wherever the subject is, in the order they were found; subjects, answers:
    of its facts."""

    templates: tuple[str, ...]
    subjects: tuple[str, ...]
    answers: tuple[str, ...]


def find_relations(facts: Sequence[Fact], templates: Mapping[str, Sequence[str]] | None = None) -> list[Relation]:
    """The relations among `facts`: facts belong together when a template is common to them.

    A text that has a `{}` of its own is no wording.

    Args:
        templates: lists of wordings by any name, each wording with one `{}`; they join what they match.
    """
    given = [tuple(form.rstrip() for form in forms) for forms in (templates or {}).values()]
    subjects = find_subjects(facts, [form for forms in given for form in forms])
    groups: dict[int, tuple[dict[str, None], dict[str, None], dict[str, None]]] = {}  # wordings, subjects, answers
    group_of: dict[str, int] = {}  # of each wording
    for number, (fact, subject) in enumerate(zip(facts, subjects, strict=True)):
        if subject is None:
            continue
        texts = [text for text in _texts(fact) if GAP not in text and subject in text]
        forms = dict.fromkeys(_template(text, subject) for text in texts)
        for more in given:
            if forms.keys() & set(more):
                forms |= dict.fromkeys(more)
        first, *others = sorted({group_of[form] for form in forms if form in group_of}) or [number]
        group = groups.setdefault(first, ({}, {}, {}))
        for other in others:  # this fact shows that they are one
            group_of.update(dict.fromkeys(groups[other][0], first))
            for mine, theirs in zip(group, groups.pop(other), strict=True):
                mine.update(theirs)
        group_of.update(dict.fromkeys(forms, first))
        for mine, new in zip(group, (forms, [subject], [fact.answer]), strict=True):
            mine.update(dict.fromkeys(new))
    return [Relation(tuple(forms), tuple(subjects), tuple(answers)) for forms, subjects, answers in groups.values()]


def find_subjects(facts: Sequence[Fact], templates: Iterable[str] = ()) -> list[str | None]:
    """What each fact is about, as its prompts spell it: the first of these that it has.

    - Its own field.
    - What fills one of the templates in one of its prompts: the least of what most of them have.
    - A run of words that all its prompts and paraphrases have in common: of those with the word that the fewest facts have, the longest;
      at its ends it has no small word that more facts have.

    None where that cannot be told (one prompt that no template matches).
    """
    ends = [template.rstrip().split(GAP) for template in templates]
    counts = Counter(word for fact in facts for word in set(_WORD.findall(" ".join(_texts(fact)))))
    return [fact.subject or _filled(_texts(fact), ends) or _common(_texts(fact), counts) for fact in facts]


def find_words(text: str, words: str) -> list[int]:
    """Where `words` are in `text`: as whole words, or where they nowhere are (scripts without spaces) as any letters."""
    found = []
    at = text.find(words)
    while at >= 0:
        found.append(at)
        at = text.find(words, at + len(words))
    return [at for at in found if _is_whole(text, at, at + len(words))] or found


def _is_whole(text: str, start: int, end: int) -> bool:
    return not (_WORD.match(text[start - 1 : start]) or _WORD.match(text, end))


def _texts(fact: Fact) -> list[str]:
    return [text.rstrip() for text in (*fact.prompts, *fact.paraphrases)]


def _filled(texts: Sequence[str], ends: Iterable[Sequence[str]]) -> str | None:
    fills = [
        text[len(before) : len(text) - len(after)].strip()
        for before, after in ends
        for text in texts
        if text.startswith(before) and text.endswith(after) and len(text) > len(before) + len(after)
    ]
    return min(filter(None, fills), key=lambda fill: (-sum(fill in text for text in texts), len(fill)), default=None)


def _common(texts: Sequence[str], counts: Mapping[str, int]) -> str | None:
    if len(texts) < 2:
        return None
    words = list(_WORD.finditer(texts[0]))
    runs: list[tuple[int, int, str]] = []
    for first in range(len(words)):
        rarest = counts[words[first][0]]
        for word in words[first:]:
            run, rarest = texts[0][words[first].start() : word.end()], min(rarest, counts[word[0]])
            if not all(any(_is_whole(text, at, at + len(run)) for at in find_words(text, run)) for text in texts[1:]):
                break  # nor is any longer one
            # "Velmora is" and "of Velmora" are no names, nor is "Velmora's"
            outer = any(counts[at[0]] > rarest and at[0][0].islower() for at in (words[first], word))
            if not outer and not run.endswith(("'s", "\u2019s")):
                runs.append((rarest, -len(run), run))
    return min(runs, key=lambda run: run[:2])[2] if runs else None


def _template(text: str, subject: str) -> str:
    """`text` with a gap wherever its subject is."""
    for at in reversed(find_words(text, subject)):
        text = text[:at] + GAP + text[at + len(subject) :]
    return text


def with_teachers(data: Data, options: TeachOptions) -> Data:
    """`data` with invented facts of split "teacher" for each of its relations, and with the subjects of its own facts filled in.

    Raises:
        UserError: teachers are asked for and the data has no facts, or none whose relation has two wordings.
    """
    if not options.facts or any(fact.split == TEACHER for fact in data.facts):
        return data
    subjects = find_subjects(data.facts, [form for forms in options.templates.values() for form in forms])
    facts = tuple(dataclasses.replace(fact, subject=subject) for fact, subject in zip(data.facts, subjects, strict=True))
    relations = find_relations(facts, options.templates)
    wordings = {form for relation in relations for form in relation.templates}
    for name, forms in options.templates.items():
        if not wordings.intersection(form.rstrip() for form in forms):
            raise UserError(
                f"teach.templates: no prompt of the data is worded as one of {name} ({forms}); add the wording it has"
            )
    teachers = make_teachers(relations, options.facts, options.seed)
    if not teachers:
        raise UserError(
            f"teach.facts={options.facts}: the data has no two facts of one relation that is asked in two wordings or more; give facts "
            "paraphrases, or their relations' wordings in teach.templates"
        )
    return dataclasses.replace(data, facts=(*facts, *teachers))


def make_teachers(relations: Sequence[Relation], each: int, seed: int = 0) -> list[Fact]:
    """`each` invented facts for every relation with two wordings and two answers or more, each asked in all of them, the answers drawn
    from the relation's own (where there is one alone, it and not the wording would be taught). Deterministic in `seed`."""
    rng = random.Random(seed)
    taken = {subject.casefold() for relation in relations for subject in relation.subjects}
    teachers = []
    for number, relation in enumerate(relations):
        for n in range(each if len(relation.templates) > 1 and len(relation.answers) > 1 else 0):
            subject = _invent(rng, rng.choice(relation.subjects), taken)
            taken.add(subject.casefold())
            prompts = tuple(template.replace(GAP, subject) for template in relation.templates)
            answer = relation.answers[n % len(relation.answers)]
            teachers.append(Fact(f"teacher-{number + 1}-{n + 1}", prompts, answer, split=TEACHER, subject=subject))
    return teachers


def _invent(rng: random.Random, like: str, taken: set[str]) -> str:
    """A name of as many words as `like`, capitalised as they are, that is not in `taken` (case-folded)."""
    while True:
        words = []
        for word in like.split():
            made = "".join(rng.choice(_ONSETS) + rng.choice(_VOWELS) for _ in range(rng.choice((2, 2, 3)))) + rng.choice(_CODAS)
            words.append(made.capitalize() if word[:1].isupper() else made)
        if (name := " ".join(words)).casefold() not in taken:
            return name
