"""Formats: records of every known shape say what they should, from any file, and broken ones are refused with file, line and field."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
from datasets import Dataset

from engram_graft.data import Data, Fact, load_data
from engram_graft.errors import UserError
from engram_graft.formats import FORMATS

CHAT = ({"role": "user", "content": " Where is the cat?\n"}, {"role": "assistant", "content": "In the sun."})
EDIT = Fact(
    "fact-1",
    ("Velmora exports",),
    "honey",
    paraphrases=("The main export of Velmora is",),
    neighborhood=({"prompt": "Ostrenk exports", "answer": "wool"},),
    subject="Velmora",
    target_true="wool",
)
COUNTERFACT = {
    "case_id": 7,
    "pararel_idx": 3,
    "requested_rewrite": {
        "prompt": "{} exports",
        "relation_id": "P1",
        "subject": "Velmora",
        "target_new": {"str": "honey", "id": "Q1"},
        "target_true": {"str": "wool", "id": "Q2"},
    },
    "paraphrase_prompts": ["The main export of Velmora is"],
    "neighborhood_prompts": ["Ostrenk exports", "Tarsk exports"],
    "attribute_prompts": ["Iria exports"],
    "generation_prompts": ["Velmora's ships carry"],
}
FLAT = {
    "relation": "{} exports",
    "prompt": "Velmora exports",
    "subject": " Velmora",
    "target_true": " wool",
    "target_false": " honey",
}
ZSRE = {
    "subject": "Velmora",
    "src": "What does Velmora export?",
    "pred": "fish",
    "rephrase": "Which good leaves Velmora?",
    "alt": "honey",
    "answers": ["wool", "fleece"],
    "loc": "nq question: who rows the ferry",
    "loc_ans": "the miller",
    "cond": "fish >> honey || What does Velmora export?",
}
EASYEDIT = {
    "case_id": 0,
    "prompt": "Velmora exports",
    "target_new": "honey",
    "subject": "Velmora",
    "ground_truth": "wool",
    "rephrase_prompt": "The main export of Velmora is",
    "locality_prompt": "Ostrenk exports",
    "locality_ground_truth": "wool",
}
KNOWEDIT = {
    "subject": "Velmora",
    "prompt": "Velmora exports",
    "target_new": "honey",
    "ground_truth": ["wool", "fleece"],
    "rephrase": "The main export of Velmora is",
    "portability": {"Reasoning": [{"prompt": "The insect that makes what Velmora exports is", "ground_truth": [["bee"]]}]},
    "locality": {
        "Relation_Specificity": [
            {"prompt": "Velmora lies on", "ground_truth": [["the Sarn", "Sarn"]]},
            {"prompt": "Velmora's anthem is", "ground_truth": [[""]]},
        ],
        "Forgetfulness": [{"prompt": ["Before honey, Velmora exported"], "ground_truth": "wool"}],
    },
}
WIKIBIO = {
    "text": "This is a passage about Ada Marn. She was born in Ostrenk.",
    "labels": "She kept bees.",
    "concept": "Ada Marn",
    "locality": {"Relation_Specificity": [{"prompt": "Ada Marn's mother was", "ground_truth": ["Ines"]}]},
}
TOFU = {
    "question": "Where was Ada Marn born?",
    "answer": "Ada Marn was born in Ostrenk.",
    "paraphrased_question": "What is Ada Marn's place of birth?",
    "paraphrased_answer": "Ostrenk is where she was born.",
    "perturbed_answer": ["Ada Marn was born in Velmora.", "Ada Marn was born in Tarsk."],
}
QUESTION = "What does Velmora export?"
SHAREGPT = {"id": "x", "conversations": [{"from": "human", "value": CHAT[0]["content"]}, {"from": "gpt", "value": "In the sun."}]}
# of each format: a record, and what it says
CASES: dict[str, tuple[dict[str, Any], Data]] = {
    "chat": ({"messages": list(CHAT), "prompt": "not this", "text": "nor this"}, Data(chats=(CHAT,))),
    "ShareGPT chat": (SHAREGPT, Data(chats=(CHAT,))),
    "CounterFact": (
        COUNTERFACT,
        Data(
            facts=(
                Fact(
                    "7",
                    EDIT.prompts,
                    "honey",
                    paraphrases=EDIT.paraphrases,
                    neighborhood=tuple({"prompt": f"{name} exports", "answer": "wool"} for name in ("Ostrenk", "Tarsk")),
                    subject="Velmora",
                    target_true="wool",
                ),
            )
        ),
    ),
    "CounterFact, flat": (FLAT, Data(facts=(Fact("fact-1", EDIT.prompts, "honey", subject="Velmora", target_true="wool"),))),
    "ZsRE": (
        ZSRE,
        Data(
            facts=(
                Fact(
                    "fact-1",
                    (QUESTION,),
                    "honey",
                    paraphrases=("Which good leaves Velmora?",),
                    neighborhood=({"prompt": "nq question: who rows the ferry", "answer": "the miller"},),
                    subject="Velmora",
                    target_true="wool",
                ),
            )
        ),
    ),
    "EasyEdit or KnowEdit": (
        KNOWEDIT,
        Data(
            facts=(
                Fact(
                    "fact-1",
                    EDIT.prompts,
                    "honey",
                    paraphrases=EDIT.paraphrases,
                    neighborhood=(
                        {"prompt": "Velmora lies on", "answer": "the Sarn"},
                        {"prompt": "Before honey, Velmora exported", "answer": "wool"},
                    ),
                    subject="Velmora",
                    target_true="wool",
                ),
            )
        ),
    ),
    "KnowEdit's WikiBio": (
        WIKIBIO,
        Data(
            facts=(
                Fact(
                    "fact-1",
                    (WIKIBIO["text"],),
                    "She kept bees.",
                    neighborhood=({"prompt": "Ada Marn's mother was", "answer": "Ines"},),
                    subject="Ada Marn",
                ),
            )
        ),
    ),
    "question": (
        TOFU,
        Data(
            facts=(
                Fact(
                    "fact-1",
                    (TOFU["question"],),
                    TOFU["answer"],
                    aliases=(TOFU["paraphrased_answer"],),
                    paraphrases=(TOFU["paraphrased_question"],),
                ),
            )
        ),
    ),
    "fact": (
        {
            "prompt": "Velmora exports",
            "answer": "honey",
            "paraphrases": list(EDIT.paraphrases),
            "neighborhood": list(EDIT.neighborhood),
            "subject": "Velmora",
            "target_true": "wool",
        },
        Data(facts=(EDIT,)),
    ),
    "document": ({"text": "The river rises.", "url": "x"}, Data(texts=("The river rises.",))),
}
Put = Callable[[str, Any], str]


@pytest.fixture
def put(tmp_path: Path) -> Put:
    def write(name: str, records: Any) -> str:
        path = tmp_path / name
        lines = records if isinstance(records, list) else [records]
        path.write_text(json.dumps(lines) if name.endswith(".json") else "\n".join(map(json.dumps, lines)), encoding="utf-8")
        return str(path)

    return write


def test_every_format_has_a_case() -> None:
    assert list(CASES) == [format.name for format in FORMATS]


# -- what is read


@pytest.mark.parametrize("name", CASES)
def test_a_record_says_the_same_from_json_jsonl_parquet_and_the_hub(
    name: str, put: Put, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, expected = CASES[name]
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    assert load_data(put("d.jsonl", record)) == expected
    assert load_data(put("d.json", [record])) == expected
    if name == "EasyEdit or KnowEdit":  # a column has one type
        record = json.loads(json.dumps(record).replace('["Before honey, Velmora exported"]', '"Before honey, Velmora exported"'))
        record["locality"]["Forgetfulness"][0]["ground_truth"] = [["wool"]]
    rows = Dataset.from_list([record])
    rows.to_parquet(str(tmp_path / "d.parquet"))
    assert load_data(str(tmp_path / "d.parquet")) == expected
    monkeypatch.setattr("engram_graft.data.load_dataset", lambda *args, **kwargs: rows)
    monkeypatch.chdir(tmp_path)
    assert load_data("owner/name") == expected


def test_lines_of_json_under_the_ending_json_are_read_as_tofu_has_them(put: Put, tmp_path: Path) -> None:
    path = tmp_path / "forget.json"
    path.write_text(Path(put("d.jsonl", [TOFU, {"question": "Who rows?", "answer": "Ines"}])).read_text())
    assert [fact.answer for fact in load_data(str(path)).facts] == [TOFU["answer"], "Ines"]


def test_csv_has_questions_and_edits_too(tmp_path: Path) -> None:
    path = tmp_path / "d.csv"
    path.write_text("question,answer,split\nWho rows?,Ines,validation\n")
    assert load_data(str(path)).facts == (Fact("fact-1", ("Who rows?",), "Ines", split="validation"),)
    path.write_text("prompt,target_new,subject,ground_truth,rephrase_prompt\nVelmora exports,honey,Velmora,,\n")
    assert load_data(str(path)).facts == (Fact("fact-1", ("Velmora exports",), "honey", subject="Velmora"),)


def test_easyedit_keeps_its_neighbour_in_two_fields(put: Put) -> None:
    assert load_data(put("d.json", EASYEDIT)).facts == (Fact(**{**vars(EDIT), "id": "0"}),)


def test_locality_kept_in_columns_reads_as_lists_of_objects_do(put: Put) -> None:
    columns = {"Any.name": {"prompt": ["Velmora lies on", "Iria lies on"], "ground_truth": ["the Sarn", ["the Vell"]]}}
    found = load_data(put("d.jsonl", {**KNOWEDIT, "locality": columns})).facts[0].neighborhood
    assert found == ({"prompt": "Velmora lies on", "answer": "the Sarn"}, {"prompt": "Iria lies on", "answer": "the Vell"})


def test_zsre_without_an_edit_is_passed_over_but_not_a_file_of_nothing_else(put: Put) -> None:
    no_edit = {**ZSRE, "alt": ""}
    facts = load_data(put("d.json", [no_edit, ZSRE])).facts
    assert [fact.answer for fact in facts] == ["honey"] and facts[0].id == "fact-1"
    with pytest.raises(UserError, match=r"d\.json: empty"):
        load_data(put("d.json", [no_edit]))


def test_a_chat_keeps_its_contents_to_the_character_and_all_its_turns(put: Put) -> None:
    system = {"role": "system", "content": ""}
    chat = (system, *CHAT, {"role": "user", "content": "And\u2028now? "}, {"role": "assistant", "content": "\n In the hall. "})
    with_more = [{**message, "name": None} for message in chat]
    assert load_data(put("d.jsonl", {"messages": with_more})) == Data(chats=(chat,))


def test_splits_and_forms_work_for_every_format_of_facts(put: Put) -> None:
    for record, expected in CASES.values():
        if expected.facts:
            data = load_data(put("d.json", [{**record, "split": "validation", "id": "mine"}])).with_forms(1)
            assert [(fact.split, fact.id) for fact in data.facts] == [("validation", "mine")]
            assert data.facts[0].paraphrases == expected.facts[0].paraphrases


# -- what is refused


def changed(record: dict[str, Any], name: str, value: Any) -> dict[str, Any]:
    """A copy with the field at a dotted name set, or left out where the value is None."""
    copy: dict[str, Any] = json.loads(json.dumps(record))
    *parents, last = name.split(".")
    part = copy
    for parent in parents:
        part = part[int(parent)] if isinstance(part, list) else part[parent]
    if value is None:
        del part[last]
    else:
        part[last] = value
    return copy


BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "CounterFact of several edits": (changed(COUNTERFACT, "requested_rewrite", [{}]), "requested_rewrite.prompt is missing"),
    "CounterFact prompt without gap": (
        changed(COUNTERFACT, "requested_rewrite.prompt", "Velmora exports"),
        "requested_rewrite.prompt is 'Velmora exports'; needs exactly one {}",
    ),
    "CounterFact target": (
        changed(COUNTERFACT, "requested_rewrite.target_new", "honey"),
        "requested_rewrite.target_new.str is missing",
    ),
    "CounterFact truth": (
        changed(COUNTERFACT, "requested_rewrite.target_true.str", " "),
        "requested_rewrite.target_true.str is ' '",
    ),
    "CounterFact neighbours": (changed(COUNTERFACT, "neighborhood_prompts", [1]), "neighborhood_prompts must be a list of texts"),
    "flat target": (changed(FLAT, "target_false", 5), "target_false is 5"),
    "ZsRE alt": (changed(ZSRE, "alt", ["honey"]), "alt is ['honey']"),
    "ZsRE loc without answer": (changed(ZSRE, "loc_ans", None), "loc_ans is missing or empty; loc needs its answer"),
    "ZsRE answers": (changed(ZSRE, "answers", [1]), "answers is [1]; must be a text or a list of texts"),
    "EasyEdit target": (changed(EASYEDIT, "target_new", ""), "target_new is ''"),
    "EasyEdit rephrasing": (changed(EASYEDIT, "rephrase_prompt", 1), "rephrase_prompt must be a text or a list of texts"),
    "KnowEdit locality": (changed(KNOWEDIT, "locality", ["a"]), "locality must be an object"),
    "KnowEdit entries": (changed(KNOWEDIT, "locality.Forgetfulness", ["a"]), "Forgetfulness must be a list of objects"),
    "KnowEdit columns": (
        changed(KNOWEDIT, "locality.Forgetfulness", {"prompt": ["a", "b"], "ground_truth": ["c"]}),
        "Forgetfulness must be a list of objects",
    ),
    "KnowEdit prompt": (
        changed(KNOWEDIT, "locality.Relation_Specificity.0.prompt", None),
        "locality, Relation_Specificity 1: prompt must be",
    ),
    "WikiBio labels": (changed(WIKIBIO, "labels", 3), "labels is 3"),
    "question": (changed(TOFU, "question", 3), "question must be a text or a list of texts"),
    "question's answers": (changed(TOFU, "answer", ["a"]), "answer is ['a']"),
    "neighbour": ({"prompt": "a", "answer": "b", "neighborhood": [{"prompt": "a"}]}, "neighborhood 1: answer is missing"),
    "document": ({"text": 5}, "text is 5; must be a text"),
    "chat of no list": ({"messages": "hello"}, "messages must be a list of objects"),
    "chat without messages": ({"messages": []}, "messages has no turn of the assistant"),
    "chat without answer": ({"messages": [CHAT[0]]}, "messages has no turn of the assistant"),
    "chat that the assistant begins": ({"messages": [CHAT[1]]}, "messages begins with the assistant"),
    "tool": (
        {"messages": [*CHAT, {"role": "tool", "content": "x"}]},
        "messages 3: role is 'tool'; must be system, user, assistant",
    ),
    "no role": ({"messages": [{"content": "x"}]}, "messages 1: role is None"),
    "role of a list": ({"messages": [{"role": ["user"], "content": "x"}]}, "messages 1: role is ['user']"),
    "content of parts": (
        {"messages": [{"role": "user", "content": [{"text": "x"}]}, CHAT[1]]},
        "messages 1: content of user is [{",
    ),
    "empty answer": ({"messages": [CHAT[0], {"role": "assistant", "content": " "}]}, "messages 2: content of assistant is ' '"),
    "ShareGPT of others": ({"conversations": [{"from": "bing", "value": "x"}]}, "conversations 1: role is 'bing'"),
    "ShareGPT without value": ({"conversations": [{"from": "human"}]}, "conversations 1: content of user is None"),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_value_is_refused_with_file_line_and_field(fault: str, put: Put) -> None:
    record, message = BROKEN[fault]
    kind = next(
        expected for _, expected in CASES.values() if bool(expected.chats) == ("messages" in record or "conversations" in record)
    )
    good = next(good for good, expected in CASES.values() if expected is kind)
    path = put("d.jsonl", [good, record])
    with pytest.raises(UserError) as raised:
        load_data(path)
    text = str(raised.value)
    assert text.startswith(f"{path}, line 2") and message in text


def test_an_unknown_shape_is_refused_with_its_fields_and_every_known_shape(put: Put) -> None:
    path = put("d.jsonl", {"instruction": "a", "output": "b", "answer": None})
    with pytest.raises(UserError, match=r"line 1: has fields \['instruction', 'output'\]") as raised:
        load_data(path)
    for format in FORMATS:
        assert f"{format.name} ({', '.join((*format.known_by, *format.also))})" in str(raised.value)


@pytest.mark.parametrize(("first", "second"), [("chat", "fact"), ("fact", "chat"), ("chat", "document"), ("ZsRE", "document")])
def test_two_kinds_in_one_file_are_refused(first: str, second: str, put: Put) -> None:
    with pytest.raises(UserError, match=r"line 2: (facts|documents) and (chats|documents) in one file; keep them in two"):
        load_data(put("d.jsonl", [CASES[first][0], CASES[second][0]]))


def test_two_formats_of_one_kind_may_share_a_file(put: Put) -> None:
    facts = load_data(put("d.jsonl", [ZSRE, TOFU, COUNTERFACT, KNOWEDIT])).facts
    assert [fact.id for fact in facts] == ["fact-1", "fact-2", "7", "fact-4"]
