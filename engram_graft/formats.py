"""Formats: the shapes of record that people have, each known by its fields, and what a record of each says: a fact, a chat or a text.

Shapes are those of the published files: CounterFact (arXiv 2202.05262), ZsRE as MEND has it (2110.11309), EasyEdit and KnowEdit
(2401.01286), TOFU (2401.06121). A question stays as it is written: its answer follows after a space, as for any other prompt.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from engram_graft.errors import UserError
from engram_graft.record import Record

ROLES = ("system", "user", "assistant")
_SHAREGPT = {"human": "user", "gpt": "assistant"}


TEACHER = "teacher"


@dataclasses.dataclass(frozen=True)
class Fact:
    """One thing to know. All prompts are trained; paraphrases are only probed; neighborhood is what must stay as it was.

    Args:
        neighborhood: mappings with "prompt" and "answer".
        split: "train"; "validation" is evaluated on; "teacher" teaches wordings (see `engram_graft.forms`); others are left alone.
        subject: what it is about, as the prompts spell it, where that is known.
        target_true: what was true before, where the fact is an edit (CounterFact's name for it).
    """

    id: str
    prompts: tuple[str, ...]
    answer: str
    aliases: tuple[str, ...] = ()
    paraphrases: tuple[str, ...] = ()
    neighborhood: tuple[Mapping[str, str], ...] = ()
    split: str = "train"
    subject: str | None = None
    target_true: str | None = None


Chat = tuple[Mapping[str, str], ...]  # messages with "role" and "content"
Content = Fact | Chat | str


def _fact(record: Record, prompts: tuple[str, ...], answer: str, **others: Any) -> Fact:
    """A fact with the record's own id ("id", or "case_id" as edits have it; "" where there is none) and split."""
    number = next((value for name in ("id", "case_id") if (value := record.get(name)) is not None), "")
    split = str(record.get("split") or "train")
    if split == TEACHER:
        raise record.wrong(f"split is {TEACHER!r}, which the facts that are invented for teach.facts have; name it otherwise")
    return Fact(str(number), prompts, answer.strip(), split=split, **others)


def _native(record: Record) -> Fact:
    return _fact(
        record,
        record.prompts(),
        record.text("answer"),
        aliases=record.texts("aliases"),
        paraphrases=record.texts("paraphrases"),
        neighborhood=tuple({part: each.text(part) for part in ("prompt", "answer")} for each in record.objects("neighborhood")),
        subject=record.optional("subject"),
        target_true=record.optional("target_true"),
    )


def _counterfact(record: Record) -> Fact:
    prompt, subject = record.text("requested_rewrite.prompt"), record.text("requested_rewrite.subject")
    if prompt.count("{}") != 1:
        raise record.wrong(f"requested_rewrite.prompt is {prompt!r}; needs exactly one {{}}, where the subject goes")
    true = record.text("requested_rewrite.target_true.str").strip()
    return _fact(
        record,
        (prompt.replace("{}", subject),),
        record.text("requested_rewrite.target_new.str"),
        paraphrases=record.texts("paraphrase_prompts"),
        neighborhood=tuple({"prompt": prompt, "answer": true} for prompt in record.texts("neighborhood_prompts")),
        subject=subject,
        target_true=true,
    )


def _counterfact_tracing(record: Record) -> Fact:
    return _fact(
        record,
        record.prompts(),
        record.text("target_false"),
        subject=record.optional("subject"),
        target_true=record.optional("target_true"),
    )


def _zsre(record: Record) -> Fact | None:
    if record.get("alt") == "":  # the file has questions that no other answer was made up for: no edits
        return None
    return _fact(
        record,
        record.prompts("src"),
        record.text("alt"),
        paraphrases=record.texts("rephrase", one=True),
        neighborhood=_neighbours(record, "loc", "loc_ans"),
        subject=record.optional("subject"),
        target_true=record.first("answers"),
    )


def _neighbours(record: Record, prompt: str, answer: str) -> tuple[Mapping[str, str], ...]:
    """One neighbour that is in two fields, or none where neither is there."""
    if record.get(prompt) is None and record.get(answer) is None:
        return ()
    text = record.prompts(prompt)[0]
    if (found := record.first(answer)) is None:
        raise record.wrong(f"{answer} is missing or empty; {prompt} needs its answer there")
    return ({"prompt": text, "answer": found},)


def _locality(record: Record) -> Iterator[Mapping[str, str]]:
    """KnowEdit's neighbours: lists of entries by name; those whose answer is empty there are passed over, as KnowEdit does."""
    named = record.get("locality") or {}
    if not isinstance(named, Mapping):
        raise record.wrong("locality must be an object of lists of objects")
    for name in named:
        for entry in Record(f"{record.where}, locality", named).objects(name):
            if (answer := entry.first("ground_truth")) is not None:
                yield {"prompt": entry.prompts()[0], "answer": answer}


def _easyedit(record: Record) -> Fact:
    """`portability`, questions that follow from the edit, is not read: they are other facts, not other wordings of this one."""
    return _fact(
        record,
        record.prompts(),
        record.text("target_new"),
        paraphrases=(*record.texts("rephrase_prompt", one=True), *record.texts("rephrase", one=True)),
        neighborhood=(*_neighbours(record, "locality_prompt", "locality_ground_truth"), *_locality(record)),
        subject=record.optional("subject"),
        target_true=record.first("ground_truth"),
    )


def _wikibio(record: Record) -> Fact:
    return _fact(
        record,
        (record.text("text"),),
        record.text("labels"),
        neighborhood=tuple(_locality(record)),
        subject=record.optional("concept"),
    )


def _question(record: Record) -> Fact:
    return _fact(
        record,
        record.prompts("question"),
        record.text("answer"),
        aliases=record.texts("paraphrased_answer", one=True),
        paraphrases=record.texts("paraphrased_question", one=True),
    )


def _chat(name: str) -> Callable[[Record], Chat]:
    def read(record: Record) -> Chat:
        chat = tuple(_message(message) for message in record.objects(name))
        if not any(message["role"] == "assistant" for message in chat):
            raise record.wrong(f"{name} has no turn of the assistant: nothing to learn from")
        if chat[0]["role"] == "assistant":
            raise record.wrong(f"{name} begins with the assistant; a turn of system or user must come before")
        return chat

    return read


def _message(message: Record) -> Mapping[str, str]:
    role = message.get("role") or message.get("from")
    role = _SHAREGPT.get(role, role) if isinstance(role, str) else role
    if role not in ROLES:
        raise message.wrong(f"role is {role!r}; must be {', '.join(ROLES)} (ShareGPT: from, one of human, gpt, system)")
    content = message.get("content" if message.get("value") is None else "value")
    if not isinstance(content, str) or (role == "assistant" and not content.strip()):
        raise message.wrong(f"content of {role} is {content!r}; must be a text (ShareGPT: value), the assistant's not empty")
    return {"role": role, "content": content}


def _text(record: Record) -> str:
    if not isinstance(text := record.get("text"), str):
        raise record.wrong(f"text is {text!r}; must be a text")
    return text


@dataclasses.dataclass(frozen=True)
class Format:
    """A shape of record. Args: known_by: the fields that tell it; also: further ones that it needs; read: None: nothing to learn."""

    name: str
    known_by: tuple[str, ...]
    read: Callable[[Record], Content | None]
    also: tuple[str, ...] = ()


FORMATS = (  # the first one whose fields a record has is its format
    Format("chat", ("messages",), _chat("messages")),
    Format("ShareGPT chat", ("conversations",), _chat("conversations")),
    Format("CounterFact", ("requested_rewrite",), _counterfact),
    Format("CounterFact, flat", ("prompt", "target_true", "target_false"), _counterfact_tracing),
    Format("ZsRE", ("src", "alt"), _zsre),
    Format("EasyEdit or KnowEdit", ("prompt", "target_new"), _easyedit),
    Format("KnowEdit's WikiBio", ("text", "labels", "concept"), _wikibio),
    Format("question", ("question", "answer"), _question),
    Format("fact", ("prompt",), _native, also=("answer",)),
    Format("document", ("text",), _text),
)


def read_record(where: str, fields: Mapping[str, Any]) -> Content | None:
    """What a record says, by the first format whose fields it has; None: it is of a known format and holds nothing to learn.

    Raises:
        UserError: of no known format, or a field that the format needs is missing or of the wrong kind.
    """
    present = [name for name, value in fields.items() if value is not None]  # columns keep None for what a record lacks
    for format in FORMATS:
        if set(format.known_by) <= set(present):
            return format.read(Record(where, fields))
    known = "; ".join(f"{format.name} ({', '.join((*format.known_by, *format.also))})" for format in FORMATS)
    raise UserError(f"{where}: has fields {sorted(map(str, present))}; rename them to those of a known shape: {known}")
