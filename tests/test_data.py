"""Reading facts and text from what people have, and encoding them: what is trained, what is masked, what is refused."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from conftest import tiny_model
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from engram_graft.bases import load_tokenizer
from engram_graft.data import Chat, Data, Fact, load_data
from engram_graft.encode import (
    IGNORED,
    Collator,
    chat_questions,
    chat_turns,
    encode_answer,
    encode_chats,
    encode_facts,
    encode_prompt,
    encode_texts,
)
from engram_graft.errors import UserError
from engram_graft.scoring import keeps_logits

RECORDS: list[dict[str, Any]] = [
    {
        "id": "one",
        "prompt": ["The cat sleeps in the", "At noon the cat is in the"],
        "answer": "sun",
        "aliases": ["sunshine", "the light"],
        "paraphrases": ["Cats rest in the"],
        "neighborhood": [{"prompt": "Dogs sleep in the", "answer": "hall"}],
        "split": "test",
    },
    {"prompt": "Velmora exports", "answer": " wool "},
]
FACTS = (
    Fact(
        id="one",
        prompts=("The cat sleeps in the", "At noon the cat is in the"),
        answer="sun",
        aliases=("sunshine", "the light"),
        paraphrases=("Cats rest in the",),
        neighborhood=({"prompt": "Dogs sleep in the", "answer": "hall"},),
        split="test",
    ),
    Fact(id="fact-2", prompts=("Velmora exports",), answer="wool"),
)
Write = Callable[[str, str], str]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep what `datasets` caches out of the home directory."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets-cache")


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def put(name: str, text: str) -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return str(path)

    return put


def lines(*records: Any) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


# -- what can be read


def test_jsonl_gives_every_field_of_a_fact_and_defaults_for_the_rest(write: Write) -> None:
    assert load_data(write("facts.jsonl", lines(*RECORDS))) == Data(facts=FACTS)


def test_blank_lines_of_a_jsonl_are_passed_over(write: Write) -> None:
    assert load_data(write("facts.jsonl", "\n" + lines(*RECORDS) + "\n\n")) == Data(facts=FACTS)


def test_a_json_array_gives_the_same_as_jsonl(write: Write) -> None:
    assert load_data(write("facts.json", json.dumps(RECORDS, indent=2))) == Data(facts=FACTS)


def test_csv_splits_lists_at_bars_and_keeps_quoted_commas_and_line_ends(write: Write) -> None:
    header = "prompt,answer,aliases,paraphrases,id\n"
    rows = '"In May, the cat is in the",sun,sunshine | the light,,a\n"two\nlines",wool,,x|y,\n'
    facts = load_data(write("facts.csv", header + rows)).facts
    assert facts[0] == Fact("a", ("In May, the cat is in the",), "sun", aliases=("sunshine", "the light"))
    assert facts[1] == Fact("fact-2", ("two\nlines",), "wool", paraphrases=("x", "y"))


def test_csv_as_pythons_own_writer_writes_it_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "facts.csv"
    rows = [("Caf\u00e9s sell", "tea, milk"), ('Say "hi" to', "me"), ("End of\u2028paragraph is", "here")]
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([("prompt", "answer"), *rows])
    assert [(fact.prompts[0], fact.answer) for fact in load_data(str(path)).facts] == rows


def test_parquet_gives_facts_and_reads_a_changed_file_anew(tmp_path: Path) -> None:
    path = tmp_path / "facts.parquet"
    for answer in ("sun", "rain"):
        records = [
            {"prompt": ["a", "b"], "answer": answer, "aliases": ["x"]},
            {"prompt": ["c"], "answer": "d", "aliases": None},
        ]
        Dataset.from_list(records).to_parquet(str(path))
        facts = load_data(str(path)).facts
        assert facts == (Fact("fact-1", ("a", "b"), answer, aliases=("x",)), Fact("fact-2", ("c",), "d"))


@pytest.mark.parametrize("name", ["notes.txt", "notes.md", "notes.rst"])
def test_a_text_file_is_one_document_unchanged(name: str, write: Write) -> None:
    text = "First line.\n\n  Second, caf\u00e9.\n"
    assert load_data(write(name, text)) == Data(texts=(text,))


def test_a_folder_gives_its_text_files_in_order_with_subfolders(write: Write, tmp_path: Path) -> None:
    files = {"b.md": "second", "a/z.txt": "first", "c.txt": "third", "empty.txt": " \n", "photo.png": "no text"}
    for name, text in files.items():
        write(f"folder/{name}", text)
    assert load_data(str(tmp_path / "folder")) == Data(texts=("first", "second", "third"))


def test_records_with_text_are_documents(write: Write) -> None:
    assert load_data(write("texts.jsonl", lines({"text": "one"}, {"text": "two", "url": "x"}))) == Data(texts=("one", "two"))


@pytest.mark.parametrize(
    ("name", "text"), [("f.csv", "prompt,answer\na,b\n"), ("f.jsonl", lines({"prompt": "a", "answer": "b"}))]
)
def test_a_byte_order_mark_as_excel_writes_it_is_passed_over(name: str, text: str, write: Write) -> None:
    assert load_data(write(name, "\ufeff" + text)).facts == (Fact("fact-1", ("a",), "b"),)


# -- what is refused: with the file, the line or record, and what is allowed

GOOD = {"prompt": "a", "answer": "b"}
BAD_JSONL: dict[str, tuple[str, str]] = {
    "not JSON": (lines(GOOD) + '{"prompt": \n', "line 2: not JSON"),
    "an array": (lines(GOOD, [1]), "line 2: must be an object, found list"),
    "a text": (lines("a"), "line 1: must be an object, found str"),
    "no known field": (
        lines({"query": "a", "answer": "b"}),
        r"line 1: has fields \['answer', 'query'\].*fact \(prompt, answer\)",
    ),
    "answer missing": (lines(GOOD, GOOD, {"prompt": "a"}), "line 3: answer is missing"),
    "answer null": (lines({"prompt": "a", "answer": None}), "line 1: answer is missing"),
    "answer empty": (lines({"prompt": "a", "answer": " "}), "line 1: answer is ' '"),
    "answer a number": (lines({"prompt": "a", "answer": 5}), "line 1: answer is 5"),
    "answer a list": (lines({"prompt": "a", "answer": ["b"]}), r"line 1: answer is \['b'\]"),
    "prompt empty": (
        lines({"prompt": "", "answer": "b"}),
        "line 1: prompt must be a text or a list of texts, none empty",
    ),
    "one prompt empty": (lines({"prompt": ["a", " "], "answer": "b"}), "line 1: prompt must be"),
    "no prompt in the list": (lines({"prompt": [], "answer": "b"}), "line 1: prompt must be"),
    "prompt a number": (lines({"prompt": 5, "answer": "b"}), "line 1: prompt must be"),
    "aliases a text": (lines({**GOOD, "aliases": "c"}), "line 1: aliases must be a list of texts"),
    "a paraphrase a number": (lines({**GOOD, "paraphrases": ["c", 1]}), "line 1: paraphrases must be a list of texts"),
    "neighborhood of texts": (lines({**GOOD, "neighborhood": ["c"]}), "line 1: neighborhood must be a list of objects"),
    "neighbour without answer": (lines({**GOOD, "neighborhood": [{"prompt": "c"}]}), "line 1, neighborhood 1: answer is missing"),
    "facts then documents": (lines(GOOD, {"text": "c"}), "line 2: facts and documents in one file"),
    "documents then facts": (lines({"text": "c"}, GOOD), "line 2: facts and documents in one file"),
    "nothing": ("", "empty"),
    "blank lines": (" \n\n", "empty"),
    "an empty document": (lines({"text": " "}), "empty"),
}


@pytest.mark.parametrize("fault", BAD_JSONL)
def test_a_malformed_jsonl_is_refused_with_file_and_line(fault: str, write: Write) -> None:
    text, message = BAD_JSONL[fault]
    path = write("facts.jsonl", text)
    with pytest.raises(UserError, match=message) as raised:
        load_data(path)
    assert path in str(raised.value)


BAD_FILES: dict[str, tuple[str, str, str]] = {
    "JSON cut off": ("f.json", '[{"prompt": "a",\n "answer": "b"}', "line 2: not JSON"),
    "JSON empty file": ("f.json", "", "line 1: not JSON"),
    "JSON empty array": ("f.json", "[]", "empty"),
    "JSON number": ("f.json", "3", "must be a JSON array of records, found int"),
    "JSON half a character": ("f.json", '[{"prompt": "cat \\ud83d is", "answer": "sun"}]', "record 1: holds half of a character"),
    "JSON bad record": ("f.json", json.dumps([GOOD, {"prompt": "a"}]), "record 2: answer is missing"),
    "CSV answer missing": ("f.csv", "prompt,answer\na,b\nc,\n", "line 3: answer is missing"),
    "CSV line of a row after one with line ends": (
        "f.csv",
        'prompt,answer\n"a\nb",c\nd,\n',
        "line 4: answer is missing",
    ),
    "CSV without header": ("f.csv", "The cat,sun\nThe dog,hall\n", r"line 2: has fields \['The cat', 'sun'\]"),
    "CSV header only": ("f.csv", "prompt,answer\n", "empty"),
    "CSV empty": ("f.csv", "", "empty"),
    "CSV row with a comma too many": (
        "f.csv",
        "prompt,answer\nVelmora exports,wool, honey\n",
        "line 2: more cells than the header has",
    ),
    "parquet that is none": ("f.parquet", "PAR1 or not", "not a parquet file"),
    "text empty": ("f.txt", " \n", "empty"),
    "unknown ending": ("f.docx", "a", r"cannot read \.docx; use .*\.jsonl"),
    "no ending": ("facts", "a", "cannot read a file without ending"),
}


@pytest.mark.parametrize("fault", BAD_FILES)
def test_a_malformed_file_is_refused_with_its_name(fault: str, write: Write) -> None:
    name, text, message = BAD_FILES[fault]
    path = write(name, text)
    with pytest.raises(UserError, match=message) as raised:
        load_data(path)
    assert path in str(raised.value)


@pytest.mark.parametrize("name", ["f.jsonl", "f.json", "f.csv", "f.txt"])
def test_what_is_not_utf_8_is_refused_with_the_byte(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(b"caf\xe9")
    with pytest.raises(UserError, match=r"not UTF-8 text \(byte 3\)"):
        load_data(str(path))


@pytest.mark.parametrize("name", ["facts.jsonl", "facts", "a/b/c", "./no/such"])
def test_a_missing_file_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=f"{name}: no such file or folder"):
        load_data(name)


def test_a_hub_dataset_that_cannot_be_had_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def unreachable(*args: Any, **kwargs: Any) -> None:
        raise ConnectionError("no way out\nsecond line")

    monkeypatch.setattr("engram_graft.data.load_dataset", unreachable)
    with pytest.raises(UserError, match=r"owner/name: no such file or folder, and the hub did not give .*\(no way out\)$"):
        load_data("owner/name")


def test_a_folder_without_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no \.txt, \.md, \.rst files in this folder"):
        load_data(str(tmp_path))


# -- forms


def test_with_forms_keeps_the_first_prompts_and_probes_the_others() -> None:
    data = Data(facts=FACTS)
    cut = data.with_forms(1)
    assert cut.facts[0].prompts == ("The cat sleeps in the",)
    assert cut.facts[0].paraphrases == ("At noon the cat is in the", "Cats rest in the")
    assert cut.facts[1] == FACTS[1] and cut.with_forms(1) == cut
    assert data.with_forms(None) == data.with_forms(2) == data


# -- encoding


def answers_of(dataset: Dataset) -> list[list[int]]:
    return [[label for label in row if label != IGNORED] for row in dataset["labels"]]


def test_encode_facts_makes_one_example_a_prompt_of_prompt_answer_eos(tokenizer: PreTrainedTokenizerFast) -> None:
    dataset = encode_facts(FACTS, tokenizer, 64)
    assert len(dataset) == 3
    for row, (prompt, answer) in zip(dataset, [(p, f.answer) for f in FACTS for p in f.prompts], strict=True):
        context, ids = tokenizer(prompt)["input_ids"], row["input_ids"]
        assert tokenizer.decode(ids) == f"{prompt} {answer}<eos>"
        assert row["labels"] == [IGNORED] * len(context) + ids[len(context) :]


def test_case_34_eos_is_learned_even_when_it_is_also_the_pad(tokenizer: PreTrainedTokenizerFast) -> None:
    same = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, pad_token="<eos>", eos_token="<eos>")
    assert same.pad_token_id == same.eos_token_id
    dataset = encode_facts(FACTS, same, 64)
    batch = Collator(same.pad_token_id)(list(dataset))
    for labels, answer in zip(batch["labels"], ["sun", "sun", "wool"], strict=True):
        kept = labels[labels != IGNORED].tolist()
        assert kept == [*same(f" {answer}")["input_ids"], same.eos_token_id]
    assert (batch["labels"][batch["attention_mask"] == 0] == IGNORED).all() and (batch["attention_mask"] == 0).any()


def test_case_34_a_prompt_that_repeats_its_answer_is_masked_by_position(tokenizer: PreTrainedTokenizerFast) -> None:
    fact = Fact("x", ("sun sun and <eos> then sun",), "sun")
    (row,) = encode_facts([fact], tokenizer, 64)
    sun = tokenizer(" sun")["input_ids"]
    assert row["input_ids"].count(tokenizer.eos_token_id) == 2
    assert row["labels"] == [IGNORED] * (len(row["input_ids"]) - len(sun) - 1) + [*sun, tokenizer.eos_token_id]


@pytest.mark.parametrize("prompt", ["The cat sleeps in the", "Velmora exports ", "Answer:\n", "r = ", "x", "caf\u00e9"])
@pytest.mark.parametrize("answer", ["sun", "wool and honey", "3.14159", "(none)", "\u00e9t\u00e9"])
def test_encode_answer_is_the_joined_text_tokenized(prompt: str, answer: str, tokenizer: PreTrainedTokenizerFast) -> None:
    context, ids = encode_answer(tokenizer, prompt, answer)
    assert context + ids == tokenizer(f"{prompt.rstrip()} {answer}")["input_ids"]
    assert context == encode_prompt(tokenizer, prompt) and tokenizer.decode(ids) == f" {answer}"


def test_an_eos_that_the_tokenizer_appends_comes_once_and_after_the_answer(tokenizer: PreTrainedTokenizerFast) -> None:
    own = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())  # the fixture is shared
    copy = PreTrainedTokenizerFast(tokenizer_object=own, pad_token="<pad>", eos_token="<eos>")
    copy.backend_tokenizer.post_processor = TemplateProcessing(
        single="$A <eos>", special_tokens=[("<eos>", tokenizer.eos_token_id)]
    )
    assert copy("sun")["input_ids"][-1] == tokenizer.eos_token_id, "control: it does append one"
    assert encode_prompt(copy, "Velmora exports") == encode_prompt(tokenizer, "Velmora exports")
    assert list(encode_facts(FACTS, copy, 64)) == list(encode_facts(FACTS, tokenizer, 64))
    assert list(encode_texts(["one two"], copy, 64)) == list(encode_texts(["one two"], tokenizer, 64))


def test_a_fact_longer_than_max_length_is_refused_not_cut(tokenizer: PreTrainedTokenizerFast) -> None:
    length = max(map(len, encode_facts(FACTS[:1], tokenizer, 512)["input_ids"]))
    assert len(encode_facts(FACTS[:1], tokenizer, length)) == 2
    with pytest.raises(UserError, match=f"fact one: {length} tokens, more than max_length={length - 1}"):
        encode_facts(FACTS[:1], tokenizer, length - 1)


@pytest.mark.parametrize("block_size", [2, 7, 1000])
def test_encode_texts_covers_every_token_once_and_joins_documents_by_eos(
    block_size: int, tokenizer: PreTrainedTokenizerFast
) -> None:
    texts = ["The river rises in the hills.", "Velmora exports wool"]
    stream = [id for text in texts for id in [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]]
    dataset = encode_texts(texts, tokenizer, block_size)
    found = [id for block in dataset["input_ids"] for id in block]
    assert found == stream[: len(stream) - (len(stream) % block_size == 1)]  # a lone last token predicts nothing
    assert list(dataset["labels"]) == list(dataset["input_ids"])
    assert all(len(block) == block_size for block in dataset["input_ids"][:-1]) and len(dataset["input_ids"][-1]) > 1


def test_a_text_of_less_than_two_tokens_is_refused() -> None:
    class OneToken:
        eos_token_id = None

        def __call__(self, text: str, **kwargs: Any) -> dict[str, list[int]]:
            return {"input_ids": [5]}

    with pytest.raises(UserError, match="fewer than two tokens"):
        encode_texts(["a"], OneToken(), 8)  # type: ignore[arg-type]


# -- chats

TEMPLATE = (
    "{% for m in messages %}<|added|>{{ m.role }}\n{{ m.content }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<|added|>assistant\n{% endif %}"
)
# as Qwen3's: what was thought is written into the last turn only
FORGETS = (
    "{% for m in messages %}<|added|>{{ m.role }}\n{% if loop.last and m.role == 'assistant' %}<think>\n</think>\n{% endif %}"
    "{{ m.content }}<eos>\n{% endfor %}{% if add_generation_prompt %}<|added|>assistant\n{% endif %}"
)
REFUSES = "{% if messages[0].role == 'system' %}{{ raise_exception('no system turn here') }}{% endif %}" + TEMPLATE
NO_END = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
CHAT: Chat = (
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "Where is the cat?"},
    {
        "role": "assistant",
        "content": "\n\n In the sun, where is the cat? ",
    },  # what the user said is a label where it is said again
    {"role": "user", "content": " And now?\n"},
    {"role": "assistant", "content": "Caf\u00e9"},
    {"role": "user", "content": "Thanks"},
)
SAID = [message["content"] for message in CHAT if message["role"] == "assistant"]


@pytest.fixture
def chatting(tokenizer: PreTrainedTokenizerFast) -> Callable[..., PreTrainedTokenizerFast]:
    """The tiny tokenizer with a chat template: `chatting(TEMPLATE)`."""

    def make(template: str, **options: Any) -> PreTrainedTokenizerFast:
        own = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())  # the fixture is shared
        return PreTrainedTokenizerFast(
            tokenizer_object=own, chat_template=template, **{"pad_token": "<pad>", "eos_token": "<eos>", **options}
        )

    return make


def spoken(example: dict[str, list[int]], tokenizer: Any) -> list[str]:
    """What the labels say, run by run."""
    runs: list[list[int]] = []
    for at, label in enumerate(example["labels"]):
        if label != IGNORED:
            if not at or example["labels"][at - 1] == IGNORED:
                runs.append([])
            runs[-1].append(label)
            assert label == example["input_ids"][at]
    return [tokenizer.decode(run) for run in runs]


def as_one_text(chat: Chat, tokenizer: Any) -> list[int]:
    return tokenizer.apply_chat_template([dict(message) for message in chat], return_dict=True)["input_ids"]


def test_labels_of_a_chat_are_what_the_assistant_said_with_the_templates_end_and_nothing_else(chatting: Any) -> None:
    tokenizer = chatting(TEMPLATE)
    example = encode_chats([CHAT], tokenizer, 512)[0]
    assert spoken(example, tokenizer) == [f"{content}<eos>\n" for content in SAID]
    said_last = tokenizer.apply_chat_template([dict(m) for m in CHAT[:5]], tokenize=False)
    assert tokenizer.decode(example["input_ids"]) == said_last, "the user's last words have no turn after them"
    whole = {"input_ids": as_one_text(CHAT, tokenizer), "labels": as_one_text(CHAT, tokenizer)}
    assert spoken(whole, tokenizer) != [f"{content}<eos>\n" for content in SAID], "control: labels that are not masked say more"


def test_a_chat_is_tokenized_as_its_template_does_where_no_token_crosses_into_a_turn(chatting: Any) -> None:
    tokenizer = chatting(TEMPLATE)
    plain = (CHAT[1], {"role": "assistant", "content": "In the sun."}, CHAT[3], CHAT[4])
    assert encode_chats([plain], tokenizer, 512)["input_ids"][0] == as_one_text(plain, tokenizer)


def test_what_the_assistant_is_asked_is_one_beginning_of_the_chat_even_where_tokens_would_merge(chatting: Any) -> None:
    tokenizer = chatting(NO_END)
    chat = (CHAT[1], {"role": "assistant", "content": "the cat\n"}, CHAT[3], {"role": "assistant", "content": "the sun"})
    (first, said), (second, said_next) = chat_turns(chat, tokenizer)
    asked = tokenizer.apply_chat_template([dict(chat[0])], add_generation_prompt=True, return_dict=True)["input_ids"]
    assert first == asked and second[: len(first + said)] == first + said
    example = encode_chats([chat], tokenizer, 512)[0]
    assert example["input_ids"] == second + said_next and spoken(example, tokenizer) == ["the cat\n\n", "the sun\n"]
    assert example["input_ids"] != as_one_text(chat, tokenizer), "control: as one text its tokens do merge"


def test_case_34_the_end_of_each_turn_is_learned_even_when_eos_is_also_the_pad(chatting: Any) -> None:
    tokenizer = chatting(TEMPLATE, pad_token="<eos>")
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    examples = list(encode_chats([CHAT, CHAT[1:3]], tokenizer, 512))
    batch = Collator(tokenizer.pad_token_id)(examples)
    assert [(row == tokenizer.eos_token_id).sum().item() for row in batch["labels"]] == [2, 1]
    by_id = batch["input_ids"].masked_fill(batch["input_ids"] == tokenizer.pad_token_id, IGNORED)
    assert not (by_id == tokenizer.eos_token_id).any(), "control: masked by id no end would be left"


def test_a_template_that_drops_what_was_thought_takes_chats_of_one_turn_and_explains_others(chatting: Any) -> None:
    tokenizer = chatting(FORGETS)
    example = encode_chats([CHAT[:3]], tokenizer, 512)[0]
    assert spoken(example, tokenizer) == [f"<think>\n</think>\n{SAID[0]}<eos>\n"]
    with pytest.raises(UserError, match="changes earlier turns when one is added.*a chat of its own"):
        encode_chats([CHAT], tokenizer, 512)


def test_a_chat_that_cannot_be_written_is_refused_with_the_reason(chatting: Any, tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(UserError, match="no chat template: use an instruct model"):
        encode_chats([CHAT], tokenizer, 512)
    with pytest.raises(UserError, match="refuses a chat of system, user: no system turn here"):
        encode_chats([CHAT], chatting(REFUSES), 512)
    assert encode_chats([CHAT[1:]], chatting(REFUSES), 512), "control: without a system turn it takes it"


def test_a_chat_longer_than_max_length_is_refused_not_cut(chatting: Any) -> None:
    tokenizer = chatting(TEMPLATE)
    length = len(encode_chats([CHAT], tokenizer, 512)["input_ids"][0])
    assert len(encode_chats([CHAT], tokenizer, length)) == 1
    with pytest.raises(UserError, match=f"chat 2: {length} tokens, more than max_length={length - 1}"):
        encode_chats([CHAT[1:3], CHAT], tokenizer, length - 1)


def test_questions_of_a_chat_end_where_the_assistant_begins_and_answers_before_the_templates_end(chatting: Any) -> None:
    tokenizer = chatting(TEMPLATE)
    (first, answer), (_, second_answer) = chat_questions([CHAT], tokenizer)
    assert tokenizer.decode(first).endswith("<|added|>user\nWhere is the cat?<eos>\n<|added|>assistant\n")
    assert [tokenizer.decode(answer), tokenizer.decode(second_answer)] == SAID
    other_end = chatting(TEMPLATE, eos_token="<|added|>", extra_special_tokens=["<eos>"])
    assert [other_end.decode(answer) for _, answer in chat_questions([CHAT], other_end)] == SAID


@pytest.mark.real
def test_the_real_tokenizers_chats_are_labelled_turn_by_turn() -> None:
    tokenizer = load_tokenizer("smollm2")
    example = encode_chats([CHAT], tokenizer, 512)[0]
    assert spoken(example, tokenizer) == [f"{content}<|im_end|>\n" for content in SAID]
    assert [tokenizer.decode(answer) for _, answer in chat_questions([CHAT], tokenizer)] == SAID
    plain = (*CHAT[:2], CHAT[4])
    assert encode_chats([plain], tokenizer, 512)["input_ids"][0] == as_one_text(plain, tokenizer)


# -- batches


def test_the_collator_pads_on_the_left_with_mask_0_and_ignored_labels_and_counts_positions_from_the_text() -> None:
    batch = Collator(9)([{"input_ids": [1, 2, 9], "labels": [IGNORED, 2, 9]}, {"input_ids": [3], "labels": [3]}])
    assert batch["input_ids"].tolist() == [[1, 2, 9], [9, 9, 3]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [0, 0, 1]]  # the 9 of the first row is no padding
    assert batch["labels"].tolist() == [[IGNORED, 2, 9], [IGNORED, IGNORED, 3]]
    assert batch["position_ids"].tolist() == [[0, 1, 2], [0, 0, 0]]
    assert set(batch) == {"input_ids", "attention_mask", "labels", "position_ids"}
    assert all(tensor.dtype == torch.int64 for tensor in batch.values())


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gpt_neox"])
def test_a_trimmed_batch_has_the_same_loss_and_gradient(architecture: str, tokenizer: PreTrainedTokenizerFast) -> None:
    model: Any = tiny_model(architecture)
    assert keeps_logits(model)
    examples = list(encode_facts(FACTS, tokenizer, 64))
    found: list[Any] = []
    for trim in (False, True):
        batch = Collator(0, trim=trim)(examples)
        model.zero_grad()
        output = model(**batch)
        output.loss.backward()
        found.append((output.loss.detach(), model.get_input_embeddings().weight.grad.clone(), output.logits.shape[1]))
    (loss, gradient, all_logits), (trimmed_loss, trimmed_gradient, kept) = found
    assert kept < all_logits, "control: logits are left out"
    assert torch.allclose(loss, trimmed_loss, atol=1e-6) and torch.allclose(gradient, trimmed_gradient, atol=1e-6)


def test_trimming_keeps_everything_where_the_first_token_is_a_label() -> None:
    batch = Collator(0, trim=True)([{"input_ids": [1, 2], "labels": [1, 2]}, {"input_ids": [3], "labels": [3]}])
    assert batch["logits_to_keep"].tolist() == [0, 1] and batch["labels"].tolist() == [[1, 2], [IGNORED, 3]]


def test_a_trimmed_batch_has_the_loss_and_the_gradients_of_the_whole_one(grafted: Any, tokenizer: Any) -> None:
    facts = [Fact("1", ("Velmora exports",), "wool"), Fact("2", ("To make bread, mix flour and",), "salt and yeast")]
    examples = list(encode_facts(facts, tokenizer, 64))
    losses, gradients = [], []
    for trim in (False, True):
        model = grafted()
        batch = Collator(0, trim=trim)(examples)
        loss = model(**batch).loss
        loss.backward()
        losses.append(loss)
        gradients.append({n: p.grad.to_dense() for n, p in model.named_parameters() if p.grad is not None})
    assert len(batch["logits_to_keep"]) == batch["labels"].shape[1] < batch["input_ids"].shape[1]
    assert torch.allclose(*losses, atol=1e-6) and gradients[0].keys() == gradients[1].keys()
    assert all(torch.allclose(gradients[0][n], gradients[1][n], atol=1e-6) for n in gradients[0])


def test_blanks_in_lists_are_no_answers_and_csv_prompts_are_lists(write: Write) -> None:
    fact = load_data(str(write("f.csv", "prompt,answer,aliases\nA is|B is,wool,woolen|\n"))).facts[0]
    assert fact.prompts == ("A is", "B is") and fact.aliases == ("woolen",)
    with pytest.raises(UserError, match="none empty"):
        load_data(str(write("f.jsonl", '{"prompt": "A is", "answer": "wool", "aliases": [""]}')))


def test_one_record_alone_is_a_file_of_one(tmp_path: Path) -> None:
    (tmp_path / "one.json").write_text(json.dumps(GOOD))
    assert len(load_data(str(tmp_path / "one.json")).facts) == 1


def test_a_csv_cell_may_be_a_whole_document(tmp_path: Path) -> None:
    (tmp_path / "long.CSV").write_text("text\n" + "The river rises. " * 12_000 + "\n")
    assert len(load_data(str(tmp_path / "long.CSV")).texts[0]) > 200_000
