"""Forms: what facts are about, which wordings they share, and the invented facts that teach them; with inputs as people write them."""

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from engram_graft import forms
from engram_graft.data import TEACHER, Data, Fact, load_data
from engram_graft.encode import encode_facts, encode_prompt, subject_spans
from engram_graft.errors import UserError
from engram_graft.examples import training_data
from engram_graft.forms import Relation, find_relations, find_subjects, make_teachers, with_teachers
from engram_graft.recipe import TeachOptions, load_recipe

EXPORTS = ("{} exports", "The main export of {} is", "What does {} export? It exports")


def facts_of(templates: tuple[str, ...], answers: dict[str, str], trained: int = 1, **others: Any) -> tuple[Fact, ...]:
    """A fact a subject; the first `trained` templates are its prompts, the others its paraphrases."""
    made = []
    for subject, answer in answers.items():
        texts = tuple(template.replace("{}", subject) for template in templates)
        made.append(Fact(f"{subject}", texts[:trained], answer, paraphrases=texts[trained:], **others))
    return tuple(made)


FACTS = facts_of(EXPORTS, {"Velmora": "wool", "Ostrenk": "honey", "Calder Whimsett": "bread"})


def only(facts: tuple[Fact, ...], templates: dict[str, list[str]] | None = None) -> Relation:
    (relation,) = find_relations(facts, templates)
    return relation


# -- what a fact is about


MESSY = {
    "two words": "Calder Whimsett",
    "punctuation inside": "Dr. J. Okonkwo-Smith",
    "an apostrophe": "Sinead O'Vanna",
    "digits": "Route 4711",
    "decimal digits": "Ubrex 3.14",
    "only digits": "90210",
    "lower case": "the gremblic acid",
    "Cyrillic": "Вельмора Остренк",
    "accents": "Bélmørå",
    "accents written apart": "Cafe\u0301 Velmora\u0301",
    "Hindi": "वेल्मोरी",
    "Thai": "เวลโมรา",
    "Arabic": "فلمورا",
    "an underscore": "velmora_exports_2",
    "a regular expression": "a.*b",
}


@pytest.mark.parametrize("kind", MESSY)
def test_the_subject_is_what_the_wordings_have_in_common_as_it_is_spelled(kind: str) -> None:
    subject = MESSY[kind]
    facts = facts_of(EXPORTS, {subject: "wool", "Ostrenk": "honey"})
    assert find_subjects(facts) == [subject, "Ostrenk"]
    relation = only(facts)
    assert relation == Relation(EXPORTS, (subject, "Ostrenk"), ("wool", "honey"))


@pytest.mark.parametrize("mark", ["'", "\u2019"])
def test_a_possessive_is_not_of_the_subject(mark: str) -> None:
    templates = (f"{{}}{mark}s capital is", "The capital of {} is", f"Ask for {{}}{mark}s capital:")
    for order in itertools.permutations(templates):
        facts = facts_of(order, {"Velmora": "Zun", "Ost": "Mup", "Republic Ib": "Kex"})
        assert find_subjects(facts) == ["Velmora", "Ost", "Republic Ib"], "shorter than 'capital', but of one fact"
        assert set(only(facts).templates) == set(templates)
    always = facts_of((f"{{}}{mark}s capital is", f"Where is {{}}{mark}s throne? In"), {"Velmora": "Zun"})
    assert find_subjects(always) == ["Velmora"], "also where every wording has the possessive"


def test_of_two_runs_the_rarer_is_the_subject_and_of_equals_the_longer() -> None:
    templates = ("The official language of {} is", "{} has as its official language")
    facts = facts_of(templates, {"Ib": "Zun", "Ok": "Mup"})
    assert find_subjects(facts) == ["Ib", "Ok"]
    assert find_subjects(facts[:1]) == ["official language"], "control: one fact alone cannot tell"
    assert find_subjects([dataclasses.replace(facts[0], subject="Ib")]) == ["Ib"], "so its own field says it"


def test_a_name_inside_another_word_is_not_taken_for_it() -> None:
    templates = ("Annual reports of {} are kept in", "In which town did {} live? Annals say")
    facts = facts_of(templates, {"Ann": "Zun", "Bob": "Mup"})
    assert find_subjects(facts) == ["Ann", "Bob"]
    assert only(facts).templates == templates
    naive = [template.replace("{}", "Ann").replace("Ann", "{}", 1) for template in templates]
    assert naive != list(templates), "control: the first place is another word"


def test_in_scripts_without_spaces_a_given_subject_is_found_and_none_is_guessed() -> None:
    templates = ("{}的首都是", "请问{}的首都在哪里")
    bare = facts_of(templates, {"东海国": "甲", "西山国": "乙"})
    assert find_subjects(bare) == [None, None] and find_relations(bare) == []
    named = tuple(dataclasses.replace(fact, subject=fact.id) for fact in bare)
    assert only(named) == Relation(templates, ("东海国", "西山国"), ("甲", "乙"))
    assert find_subjects(bare, ["{}的首都是"]) == ["东海国", "西山国"], "or a template tells"


@pytest.mark.parametrize(
    ("prompts", "paraphrases"),
    [(("Velmora exports",), ()), (("Velmora exports",), ("They sell the",)), (("!!!",), ("???",)), (("a b",), ("",))],
)
def test_where_the_subject_cannot_be_told_there_is_none(prompts: Any, paraphrases: Any) -> None:
    fact = Fact("1", prompts, "wool", paraphrases=paraphrases)
    assert find_subjects([fact]) == [None] and find_relations([fact]) == []


def test_long_prompts_with_a_long_text_in_common_take_no_time() -> None:
    passage = " ".join(f"word{n}" for n in range(200))
    fact = Fact("1", (f"{passage} Who?", f"{passage} When?"), "x")
    assert find_subjects([fact]) == [passage]


def test_small_words_at_its_ends_that_other_facts_have_are_not_of_the_subject() -> None:
    templates = ("The capital of {} is", "The throne of {} is in")
    names = ["Mup", "Calder Whimsett", "Calder Zun", "Republic of Ib", "Republic of Ok"]
    facts = facts_of(templates, dict.fromkeys(names, "x"))
    assert find_subjects(facts) == names and only(facts).templates == templates
    assert find_subjects(facts[:1]) == ["of Mup is"], "control: one fact alone cannot tell"


# -- relations


def test_a_subject_that_comes_twice_leaves_a_gap_at_each_place() -> None:
    templates = ("{} exports, as all of {} knows,", "The export of {} is")
    relation = only(facts_of(templates, {"Velmora": "wool", "Ostrenk": "honey"}))
    assert relation.templates == templates
    for teacher in make_teachers([relation], 3):
        assert all("Velmora" not in prompt and "Ostrenk" not in prompt for prompt in teacher.prompts)
        assert teacher.prompts[0].count(str(teacher.subject)) == 2


def test_facts_of_one_prompt_belong_to_the_wordings_that_a_given_template_joins() -> None:
    facts = tuple(
        Fact(name, (f"{name} exports",), answer) for name, answer in (("Velmora", "wool"), ("Calder Whimsett", "honey"))
    )
    assert find_relations(facts) == [], "control"
    relation = only(facts, {"any name": ["{} exports", "{} sells"]})
    assert relation == Relation(("{} exports", "{} sells"), ("Velmora", "Calder Whimsett"), ("wool", "honey"))
    assert find_relations(facts, {"other": ["{} imports", "{} buys"]}) == [], "templates that match nothing change nothing"


def test_given_templates_that_match_no_fact_are_not_taught() -> None:
    relation = only(FACTS, {"capital": ["The capital of {} is", "{} is ruled from"]})
    assert relation.templates == EXPORTS
    joined = only(FACTS, {"exports": ["{} sells", EXPORTS[1]], "capital": ["{} is ruled from"]})
    assert joined.templates == (*EXPORTS, "{} sells"), "control: the one that matches joins"


def test_a_given_template_fills_in_the_least_that_fits() -> None:
    fact = Fact("1", ("What Velmora exports",), "wool", paraphrases=("It exports", "Traders of Velmora exports"))
    for given in (["{} exports", "What {} exports"], ["What {} exports", "{} exports"]):
        assert find_subjects([fact], given) == ["Velmora"]


def test_relations_that_share_a_template_are_one_whatever_the_order() -> None:
    exports = facts_of(("{} exports", "{}: look it up in"), {"Velmora": "wool"})
    capital = facts_of(("{} is ruled from", "The capital of {} is"), {"Ostrenk": "Zun"})
    assert len(find_relations((*exports, *capital))) == 2, "control"
    bridge = facts_of(("{}: look it up in", "{} is ruled from"), {"Mup": "Kex"})
    for order in itertools.permutations((*exports, *capital, *bridge)):
        relation = only(order)
        assert set(relation.templates) == {"{} exports", "{}: look it up in", "{} is ruled from", "The capital of {} is"}
        assert set(relation.subjects) == {"Velmora", "Ostrenk", "Mup"} and set(relation.answers) == {"wool", "Zun", "Kex"}


def test_a_text_with_a_gap_of_its_own_is_no_wording() -> None:
    templates = ("{} exports", "The export of {} is", "In format '@@' {} is followed by", "In braces {x} } { of {} is")
    facts = tuple(
        dataclasses.replace(fact, paraphrases=tuple(text.replace("@@", "{}") for text in fact.paraphrases))
        for fact in facts_of(templates, {"Velmora": "wool", "Ostrenk": "honey"})
    )
    relation = only(facts)
    assert relation.templates == (templates[0], templates[1], templates[3])
    for teacher in make_teachers([relation], 2):
        assert teacher.prompts[2] == f"In braces {{x}} }} {{ of {teacher.subject} is"


def test_a_space_at_the_end_of_a_prompt_makes_no_other_wording() -> None:
    facts = (*facts_of(EXPORTS, {"Velmora": "wool"}), *facts_of(tuple(f"{form} " for form in EXPORTS), {"Ostrenk": "honey"}))
    assert only(facts).templates == EXPORTS


def test_a_subject_that_no_prompt_has_is_left_out() -> None:
    assert [relation for relation in find_relations([dataclasses.replace(FACTS[0], subject="Zaldi")]) if relation.templates] == []


# -- teachers


def test_teachers_are_asked_in_every_wording_and_their_answers_are_the_relations_own() -> None:
    capital = facts_of(("The capital of {} is", "{} is ruled from"), {"Mup": "Zun", "Kex": "Ib"})
    data = with_teachers(Data(facts=(*FACTS, *capital)), TeachOptions(facts=5))
    own, teachers = data.facts[:5], data.facts[5:]
    assert [fact.subject for fact in own] == ["Velmora", "Ostrenk", "Calder Whimsett", "Mup", "Kex"]
    assert [dataclasses.replace(fact, subject=None) for fact in own] == [*FACTS, *capital], "nothing else of them changes"
    assert len(teachers) == 10 and all(fact.split == TEACHER and not fact.paraphrases for fact in teachers)
    for fact in teachers:
        templates = tuple(prompt.replace(str(fact.subject), "{}") for prompt in fact.prompts)
        assert templates in (EXPORTS, ("The capital of {} is", "{} is ruled from"))
        assert fact.answer in (("wool", "honey", "bread") if templates == EXPORTS else ("Zun", "Ib"))
    assert {fact.answer for fact in teachers} == {"wool", "honey", "bread", "Zun", "Ib"}, "each answer has its turn"
    assert len({fact.id for fact in data.facts}) == 15


def test_a_relation_of_one_answer_is_not_taught_for_it_would_teach_the_answer() -> None:
    same = Data(facts=facts_of(EXPORTS, {"Velmora": "wool", "Ostrenk": "wool"}))
    with pytest.raises(UserError, match="no two facts of one relation"):
        with_teachers(same, TeachOptions(facts=3))
    other = Data(facts=facts_of(EXPORTS, {"Velmora": "wool", "Ostrenk": "honey"}))
    assert len(with_teachers(other, TeachOptions(facts=3)).facts) == 5, "control"


def test_given_wordings_that_no_prompt_has_are_refused() -> None:
    with pytest.raises(UserError, match="teach.templates: no prompt of the data is worded as one of sells"):
        with_teachers(Data(facts=FACTS), TeachOptions(facts=1, templates={"sells": ["{} sels"]}))


def test_teachers_are_a_function_of_the_seed() -> None:
    one, two, other = (with_teachers(Data(facts=FACTS), TeachOptions(facts=4, seed=seed)) for seed in (0, 0, 1))
    assert one == two
    assert not {fact.subject for fact in one.facts[3:]} & {fact.subject for fact in other.facts[3:]}, "control"


def test_invented_names_look_like_the_subjects_and_are_never_theirs_nor_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    relation = Relation(("{} is", "{}:"), ("Calder van Whimsett",), ("x", "y"))
    for fact in make_teachers([relation], 30):
        words = str(fact.subject).split()
        assert [word[0].isupper() for word in words] == [True, False, True] and all(word.isalpha() for word in words)
    monkeypatch.setattr(forms, "_ONSETS", ("b",))
    monkeypatch.setattr(forms, "_VOWELS", ("a", "o"))
    monkeypatch.setattr(forms, "_CODAS", ("l",))
    possible = {"".join(parts) + "l" for n in (2, 3) for parts in itertools.product(("ba", "bo"), repeat=n)}
    taken = {"Babal", "BABOL"}
    few = [Relation(("{} is", "{}:"), ("Bobal", *taken), ("x", "y")), Relation(("{} has", "{}!"), ("Zun",), ("x", "y"))]
    names = [str(fact.subject) for fact in make_teachers(few, 4)]
    assert len(set(names)) == 8 and not {name.lower() for name in names} & {"babal", "babol", "bobal"}
    assert {name.lower() for name in names} <= possible and len(possible) == 12, "control: 9 names were left, 8 are taken"


def test_a_relation_of_one_wording_has_nothing_to_teach() -> None:
    facts = [Fact("1", ("Velmora exports",), "wool", subject="Velmora")]
    with pytest.raises(
        UserError,
        match="teach.facts=2: the data has no two facts of one relation that is asked in two wordings or more.*templates",
    ):
        with_teachers(Data(facts=tuple(facts)), TeachOptions(facts=2))
    mixed = with_teachers(Data(facts=(*facts, *FACTS)), TeachOptions(facts=2, templates={}))
    assert {len(fact.prompts) for fact in mixed.facts if fact.split == TEACHER} == {3}


@pytest.mark.parametrize("data", [Data(), Data(texts=("Velmora exports wool.",)), Data(facts=(Fact("1", ("a",), "b"),))])
def test_teaching_without_facts_to_teach_is_refused(data: Data) -> None:
    with pytest.raises(UserError, match="give facts paraphrases"):
        with_teachers(data, TeachOptions(facts=1))
    assert with_teachers(data, TeachOptions()) == data, "control: not asked for"


def test_with_teachers_twice_is_with_teachers_once() -> None:
    once = with_teachers(Data(facts=FACTS), TeachOptions(facts=2))
    assert with_teachers(once, TeachOptions(facts=2)) is once
    recipe = load_recipe(None, {"teach.facts": 2, "train.forms": 1})
    assert training_data(recipe, training_data(recipe, Data(facts=FACTS))) == training_data(recipe, Data(facts=FACTS))


def test_with_forms_cuts_the_users_facts_and_keeps_teachers_whole() -> None:
    data = with_teachers(Data(facts=facts_of(EXPORTS, {"Velmora": "wool", "Ostrenk": "honey"}, trained=3)), TeachOptions(facts=2))
    cut = data.with_forms(1)
    assert [len(fact.prompts) for fact in cut.facts] == [1, 1, 3, 3]
    assert [len(fact.paraphrases) for fact in cut.facts] == [2, 2, 0, 0]


def test_counterfact_records_are_taught_by_their_own_subject(tmp_path: Path) -> None:
    records = [
        {
            "case_id": n,
            "requested_rewrite": {
                "prompt": "The mother tongue of {} is",
                "target_new": {"str": new},
                "target_true": {"str": "French"},
                "subject": subject,
            },
            "paraphrase_prompts": [f"A line of noise. {subject}, a native", f"{subject} spoke the language"],
            "neighborhood_prompts": ["The native language of Montesquieu is"],
        }
        for n, (subject, new) in enumerate({"Danielle Vanclair": "English", "L. Aba": "Russian"}.items())
    ]
    (tmp_path / "c.json").write_text(json.dumps(records))
    recipe = load_recipe(None, {"data": str(tmp_path / "c.json"), "teach.facts": 2})
    own, teachers = training_data(recipe).facts[:2], training_data(recipe).facts[2:]
    assert (
        [fact.subject for fact in own]
        == ["Danielle Vanclair", "L. Aba"]
        == [f.subject for f in load_data(str(recipe.data)).facts]
    )
    for fact in teachers:
        name = fact.subject
        assert fact.prompts == (
            f"The mother tongue of {name} is",
            f"A line of noise. {name}, a native",
            f"{name} spoke the language",
        )
        assert fact.answer in ("English", "Russian") and not fact.neighborhood and fact.target_true is None


@pytest.mark.parametrize("wrong", [["no gap"], ["{} and {}"], ["{}"], "{} is", [3], {"a": 1}])
def test_wordings_without_one_gap_are_refused(wrong: Any) -> None:
    with pytest.raises(UserError, match=r"teach.templates: exports must be a list of wordings, each with words and one \{\}"):
        TeachOptions(templates={"exports": wrong})
    assert TeachOptions(templates={"exports": ["{} is"]}), "control"
    with pytest.raises(UserError, match="teach.facts=-1: must be 0 or more"):
        TeachOptions(facts=-1)


# -- where a prompt has its subject, in tokens


@pytest.mark.parametrize("kind", MESSY)
def test_a_span_has_the_tokens_of_the_subject_and_no_others(kind: str, tokenizer: Any) -> None:
    subject = MESSY[kind]
    templates = (*EXPORTS, "{}'s main export is", "Q: who?\n{} exports", "They say ({}) exports", "of  {}", "{}")
    facts = facts_of(templates, {subject: "wool"}, trained=len(templates), subject=subject)
    spans = subject_spans(facts, tokenizer)
    assert len(spans) == len(templates) == len(encode_facts(facts, tokenizer, 512))
    for prompt, span in zip(facts[0].prompts, spans, strict=True):
        assert span is not None
        ids = encode_prompt(tokenizer, prompt)
        assert tokenizer.decode(ids[slice(*span)]).lstrip(" ") == subject, prompt
        assert tokenizer.decode(ids[: span[0]]).rstrip(" ") == prompt[: prompt.index(subject)].rstrip(" ")


def test_the_span_of_a_subject_that_comes_twice_is_its_first_whole_word(tokenizer: Any) -> None:
    fact = Fact("1", ("Annual reports of Ann and Ann are",), "x", subject="Ann")
    ids = encode_prompt(tokenizer, fact.prompts[0])
    (span,) = subject_spans([fact], tokenizer)
    assert span is not None and tokenizer.decode(ids[: span[0]]).rstrip() == "Annual reports of"


def test_there_is_no_span_without_a_subject_or_of_one_token(tokenizer: Any) -> None:
    prompts = ("The e sleeps", "At noon")
    subjects = [None, "", "dog", "e"]
    facts = [Fact("1", prompts, "sun", subject=subject) for subject in subjects]
    assert subject_spans(facts, tokenizer) == [None] * 8
    assert subject_spans([Fact("1", prompts, "sun", subject="e sleeps")], tokenizer)[0] is not None, "control"


def test_a_span_skips_the_token_that_begins_texts_and_holds_one_that_runs_over_the_subject() -> None:
    class Pairs:
        """Two letters a token, after a bos; what is left alone is a token too."""

        eos_token_id, bos = None, 999

        def __call__(self, text: str) -> dict[str, list[int]]:
            pairs = [text[at : at + 2] for at in range(0, len(text), 2)]
            return {"input_ids": [self.bos, *(sum(ord(c) << 8 * n for n, c in enumerate(pair)) for pair in pairs)]}

    tokenizer: Any = Pairs()
    assert subject_spans([Fact("1", ("velmo is",), "x", subject="velmo")], tokenizer) == [(1, 4)], "ve lm 'o '"
    assert subject_spans([Fact("1", ("in velmo is",), "x", subject="velmo")], tokenizer) == [(2, 5)], "in ' v' el mo"
