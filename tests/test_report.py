"""The report: its sentence is right in every case, each part is there only with its data, and the page is one safe file."""

import copy
import json
import re
from collections import Counter
from collections.abc import Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from engram_graft.errors import UserError
from engram_graft.probes.compare import compare, render_compare, write_compare
from engram_graft.probes.labels import percent, small
from engram_graft.probes.report import RIGHT, WRONG, read_metrics, render, write_report
from engram_graft.probes.verdict import verdict

LINES = [
    {"step": 1, "loss": 9.5},
    {"step": 2, "loss": 1.0, "recall": 0.5, "health": {"2": {"gate_hot": 0.6, "gate_cold": 0.4}, "ce_hot": 1.0, "ce_cold": 2.0}},
    {"step": 3, "loss": 0.1, "recall": 1.0, "health": {"2": {"gate_hot": 0.7, "gate_cold": None}, "ce_hot": 0.5, "ce_cold": 0.2}},
]
VOID = {"meta", "br"}


def facts(n: int = 100, free: int | None = 100, kl: float = 0.0007, **right: int) -> dict[str, Any]:
    """A report of recall: how many of `n` prompts each arm answers."""
    arms: dict[str, dict[str, Any]] = {}
    for arm, count in right.items():
        arms[arm] = {"recall": {"greedy_exact": count / n, "teacher_forced_exact": count / n, "answer_ce": 1.0, "n": n}}
        if free is not None:
            arms[arm]["task_exact"] = {"exact_match": count / n, "n": free}
    return {"arms": arms, "locality": {"kl": kl, "unchanged_positions": 0.5}}


def text(part: str = "heldout", **loss: float) -> dict[str, Any]:
    """A report of loss on text, by arm."""
    return {"arms": {arm: {part: {"ce": ce, "perplexity": 9.0, "bits_per_byte": 1.0, "n": 4064}} for arm, ce in loss.items()}}


def full() -> dict[str, Any]:
    """A report that has every part."""
    report = facts(base=0, graft=99, memory_off=1, shuffled=0, gate_open=90, lora_off=98, lora_only=55, knn_lm=99)
    gate = {"mean": 0.5, "sd": 0.1, "q01": 0.2, "q50": 0.5, "q99": 0.9, "below_05": 0.0, "above_95": 0.0, "histogram": [5] * 20}
    side = {"n": 3, "gate": 0.5, "ce": 1.0, "base_ce": 4.0}
    layer = {
        "gate": gate,
        "gate_step0": gate,
        "buckets": [
            {"from": 0.4, "to": 0.6, "n": 9, "ce": 1.0, "hot": 0.5},
            {"from": 0.6, "to": 0.8, "n": 0, "ce": None, "hot": None},
        ],
        "hot": side,
        "cold": {"n": 0, "gate": None, "ce": None, "base_ce": None},
        "utility_auc": None,
        "residual": {"total": 0.2, "direct": 0.19, "conv": 0.05},
        "heads": [
            {"order": 2, "head": 0, "rows": 53, "seen": 9, "coverage": 0.17, "collisions": 0.1, "expected_collisions": 0.12}
        ],
        "displacement": [{"touches": "1", "n": 4, "rms": 0.1}, {"touches": "2-3", "n": 0, "rms": None}],
    }
    for scores in report["arms"].values():
        scores["paraphrase"] = dict(scores["recall"])
        scores["locality"] = {
            "kl": 0.01,
            "kl_hit": None,
            "kl_miss": 0.01,
            "changed_argmax": 0.0,
            "unchanged_positions": 0.5,
            "hits": 0.0,
            "n": 20,
        }
        scores["neighborhood"] = {"kl": 0.1, "same_answer": 0.9, "n": 8}
        scores["efficacy"] = {"efficacy": 1.0, "paraphrase": 0.3, "neighborhood": 0.8, "score": 0.5, "n": 8}
        part = {"token": 0.5, "span": 0.1, "n": 64}
        scores["verbatim"] = {"visited": part, "held_out": part}
        scores |= text(graft=2.5)["arms"]["graft"] | text("text", graft=2.0)["arms"]["graft"]
    return report | {
        "known": 0,
        "seen_filter": True,
        "identity": {"bitwise": True, "logits": 40501248},
        "decoding": {"ok": True, "token by token": {"max_difference": 1e-5, "base": 1e-5, "ok": True}},
        "examples": [{"prompt": "Velmora exports", "answer": "wool", "base": "", "graft": "wool"}],
        "by_forms": {"1": {"facts": 9, "trained": 1.0, "unseen": 0.02}, "10": {"facts": 1, "trained": 1.0, "unseen": 0.9}},
        "health": {"layers": {"2": layer, "6": layer}},
        "warnings": ["Layer 2 is shut."],
        "controls": {"lora_only": {"about": "as many parameters", "parameters": 9000, "rank": 8}, "knn_lm": {"about": "", "parameters": 0}},
        "data": {"source": "facts.jsonl", "sha256": "ab" * 32},
    }  # fmt: skip


# -- verdict


@pytest.mark.parametrize(
    ("report", "sentence"),
    [
        (
            facts(base=0, graft=99, memory_off=0, shuffled=0),
            "The memory holds 99 of 100 facts by itself; without it the model knows none of them, with shuffled addresses none, and on "
            "neutral text the graft moved the base by 0.00070 nats a token.",
        ),
        (
            facts(n=300, base=0, graft=299, memory_off=2, shuffled=1, lora_off=298, kl=0.0458),
            "The memory answers 298 of 300 trained prompts by itself (299 with LoRA); without it the model knows 2, with shuffled "
            "addresses 1, and on neutral text the graft moved the base by 0.046 nats a token.",
        ),
        (
            facts(base=0, graft=22, memory_off=22, shuffled=22, lora_off=0, kl=1.19),
            "The memory is not used: with it the model knows 22 of 100 facts, without it 22; LoRA does it all, the memory by itself knows "
            "none, and on neutral text the graft moved the base by as much as 1.19 nats a token.",
        ),
        (
            facts(base=0, graft=98, memory_off=97, shuffled=96, lora_off=95),
            "The memory and LoRA each hold what was learnt: together 98 of 100 facts, the memory alone 95; LoRA alone 97, and on neutral "
            "text the graft moved the base by 0.00070 nats a token.",
        ),
    ],
)
def test_verdict_says_who_holds_the_facts_with_the_numbers(report: dict[str, Any], sentence: str) -> None:
    assert verdict(report) == sentence


@pytest.mark.parametrize(
    ("right", "said"),
    [
        ({"base": 2, "graft": 3, "memory_off": 2, "shuffled": 2}, "Nothing was learnt: it knows 3 of 100 facts and the base 2;"),
        ({"base": 40, "graft": 12, "memory_off": 40}, "The graft does harm: it knows 12 of 100 facts and the base 40;"),
        ({"base": 99, "graft": 100, "memory_off": 99}, "The base already answers 99 of 100 facts, so that this data cannot show"),
        ({"base": 30, "graft": 99, "memory_off": 30}, "the base knew 30 already"),
        ({"base": 0, "graft": 100, "memory_off": 0}, "The memory holds all 100 facts by itself"),
        ({"base": 0, "graft": 90, "memory_off": 2, "lora_off": 3}, "The memory and LoRA need each other: together they know 90"),
        ({"base": 0, "graft": 90, "memory_off": 40, "lora_off": 50}, "The memory and LoRA share the work: together they know 90"),
        ({"base": 0, "graft": 90, "memory_off": 0, "shuffled": 80}, "it still knows 80, so that it is not the addressed rows"),
        ({"base": 0, "graft": 1, "memory_off": 1, "lora_off": 60}, "the memory by itself knows 60"),
        ({"base": 0, "graft": 90}, "The memory holds 90 of 100 facts by itself; and on") ,
    ],
)  # fmt: skip
def test_verdict_is_right_when_the_memory_is_not_what_answers(right: dict[str, int], said: str) -> None:
    found = verdict(facts(**right))
    assert said.replace("; and on", "; on") in found and found.count(".") - found.count("0.") == 1


def test_verdict_counts_what_the_base_did_not_know() -> None:
    report = facts(base=30, graft=99, memory_off=30)
    report["arms"]["graft"]["recall"]["new"] = {"greedy_exact": 0.9, "n": 70}
    assert "of the 70 that the base did not know the graft knows 63" in verdict(report)


def test_verdict_names_controls_and_which_do_as_well() -> None:
    found = verdict(facts(base=0, graft=90, memory_off=0, lora_only=55, one_row=0, knn_lm=92))
    assert found.endswith("; controls: kNN-LM 92 (as good as the graft or better), LoRA only 55, one row none.")
    assert "controls" not in verdict(facts(base=0, graft=90, memory_off=0, gate_open=80))


def test_verdict_calls_prompts_facts_only_where_each_fact_has_one_prompt() -> None:
    assert "of 100 facts" in verdict(facts(base=0, graft=90, memory_off=0))
    assert "of 100 trained prompts" in verdict(facts(free=50, base=0, graft=90, memory_off=0))
    assert "of 100 trained prompts" in verdict(facts(free=None, base=0, graft=90, memory_off=0)), "chats"
    other = facts(free=None, base=0, graft=90, memory_off=0) | {"data": {"trained": False}}
    assert "of 100 prompts" in verdict(other), "data that was not trained on"


def test_verdict_says_that_neutral_text_kept_every_bit() -> None:
    report = facts(base=0, graft=90, memory_off=0, kl=0.0)
    report["locality"]["unchanged_positions"] = 1.0
    assert verdict(report).endswith("and on neutral text not one logit changed.")
    report["locality"] = {"kl": None}
    assert "neutral" not in verdict(report)


@pytest.mark.parametrize(
    ("report", "sentence"),
    [
        (
            text(base=3.110, graft=2.633, memory_off=2.708, shuffled=2.75, lora_off=2.885),
            "On held-out text the loss falls from 3.110 to 2.633 nats a token; without the memory it is 2.708, by the memory alone 2.885, "
            "with shuffled addresses 2.750.",
        ),
        (
            text("text", base=3.0, graft=2.5, memory_off=3.0, shuffled=2.9),
            "On the trained text (none was held out) the loss falls from 3.000 to 2.500 nats a token, all by the memory; with shuffled "
            "addresses 2.900.",
        ),
        (
            text(base=3.0, graft=2.5, memory_off=2.505, lora_off=2.99),
            "On held-out text the loss falls from 3.000 to 2.500 nats a token, but not by the memory; without the memory it is 2.505, by "
            "the memory alone 2.990.",
        ),
        (
            text(base=3.0, graft=3.2, memory_off=3.0, lora_only=2.8),
            "On held-out text the graft does harm: the loss is 3.200 nats a token and the base's 3.000; controls: LoRA only 2.800 (as "
            "good as the graft or better).",
        ),
        (
            text(base=3.0, graft=2.995, memory_off=3.0),
            "On held-out text nothing was learnt: the loss is 2.995 nats a token and the base's 3.000.",
        ),
        ({"arms": {"base": {}, "graft": {}}}, "No probe of this report asked what was learnt."),
    ],
)
def test_verdict_of_text_names_the_loss_and_whose_gain_it_is(report: dict[str, Any], sentence: str) -> None:
    assert verdict(report) == sentence


def test_numbers_never_round_to_what_they_are_not() -> None:
    assert [percent(x) for x in (0, 0.00001, 0.5, 0.99996, 1)] == ["0\xa0%", "0.001\xa0%", "50.0\xa0%", "99.996\xa0%", "100\xa0%"]
    assert [small(x) for x in (0.0, 8e-10, 0.00082, 0.046, 1.19)] == ["0", "<\xa00.00001", "0.00082", "0.046", "1.19"]


# -- the page


class Page(HTMLParser):
    """Collects ids, references and resources, and checks that tags are closed in order."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.used: set[str] = set()
        self.resources: list[str] = []
        self.tags: Counter[str] = Counter()
        self.feed(source)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.open += [] if tag in VOID else [tag]
        for name, value in attrs:
            assert not name.startswith("on"), "no script in attributes"
            self.ids += [value or ""] if name == "id" else []
            self.used |= set(re.findall(r"url\(#(.*?)\)", value or ""))
            if name.split(":")[-1] in ("src", "href", "data", "srcset"):
                self.used |= {value[1:]} if value and value.startswith("#") else set()
                self.resources += [] if value and value.startswith("#") else [value or ""]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def everything() -> str:
    return render(full(), LINES)


def test_a_page_is_one_file_that_loads_nothing(everything: str) -> None:
    for source in (everything, render_compare({"a": full(), "b": full()})):
        page = Page(source)
        assert page.resources == [] and not {"script", "link", "img", "iframe", "object"} & page.tags.keys()
        assert not re.search(r"@import|@font-face|url\((?!#)", source)
        addresses = set(re.findall(r"https?://[^\s\"'<>]*", source))
        assert addresses <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}, "names of XML, which nothing fetches"
    assert Page("<a href='x'></a>").resources, "control"


def test_ids_of_the_charts_are_unique_and_found(everything: str) -> None:
    page = Page(everything)
    assert page.tags["svg"] == 8 and len(page.ids) > 20 and max(Counter(page.ids).values()) == 1
    assert page.used and page.used <= set(page.ids)
    bare = re.findall(r'id="[\w-]*?-(\w+)"', everything)
    assert max(Counter(bare).values()) > 1, "control: without their chart's name they would collide"


def test_every_chart_has_a_caption_and_says_in_words_what_it_shows(everything: str) -> None:
    charts = re.findall(
        r'<figure>\s*<svg role="img" aria-label="([^"]+)".*?</svg>\s*<figcaption>[^<]+</figcaption>', everything, re.DOTALL
    )
    assert len(charts) == everything.count("<svg") and "graft: trained wordings 99.0\xa0%" in charts[0]
    assert ">unseen wordings</text>" in everything, "text stays text"
    assert everything.count("<table") == everything.count("<caption") + 1, "the answers' heading is their caption"


def test_what_others_wrote_is_escaped_everywhere() -> None:
    evil = "<script>alert(1)</script>\"'&"
    report = full() | {"warnings": [evil], "data": {"source": evil, "sha256": evil}}
    report["examples"] = [dict.fromkeys(("prompt", "answer", "base", "graft"), evil)]
    report["controls"][evil] = {"about": evil, "parameters": 1}
    report["arms"][evil] = report["arms"]["lora_only"]
    report["health"]["layers"][evil] = report["health"]["layers"]["2"]
    report["decoding"][evil] = report["decoding"]["token by token"]
    compared = render_compare({evil: report, "$a$": full()})
    for source in (render(report, LINES), compared):
        assert "<script" not in source and source.count("&lt;script&gt;") > 3
        assert "script" not in Page(source).tags
    assert "$a$" in compared, "and no dollar sign is taken for a formula"


def test_the_same_report_gives_the_same_bytes(everything: str, tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("".join(f"{json.dumps(line)}\n" for line in LINES))
    write_report(full(), metrics, tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text(encoding="utf-8") == everything
    assert render(full(), LINES[:2]) != everything, "control"


def _without(report: dict[str, Any], path: str) -> dict[str, Any]:
    report = copy.deepcopy(report)
    *parents, key = path.split(".")
    for arm in report["arms"].values() if parents == ["arms"] else [report]:
        del arm[key]
    return report


PARTS = {
    "arms.paraphrase": ["of unseen wordings", ">Unseen wordings<"],
    "arms.task_exact": [">Free answers<", ">free answers<"],
    "arms.heldout": [">Held-out text<", "nats a token on held-out text"],
    "arms.text": [">Trained text<"],
    "arms.verbatim": [">Verbatim<", ">verbatim<"],
    "arms.efficacy": [">Edits<", ">efficacy<"],
    "arms.neighborhood": ["Related prompts that were not trained"],
    "arms.locality": ["Neutral text: distance from the base", ">other top token<", "of drift on neutral text"],
    "known": ["trained prompts before"],
    "seen_filter": ["The seen filter is on"],
    "identity": ["40,501,248 logits were compared"],
    "decoding": [">token by token<"],
    "examples": ["Answers side by side"],
    "by_forms": ["Recall by the number of trained wordings"],
    "health": [">Gates<", ">Rows<", "Gate of layer 2", "Hot and cold n-grams after training", "Coverage and collisions", "utility AUC"],
    "warnings": [">Warnings<", "Layer 2 is shut."],
    "controls": [">parameters<", ">Controls<"],
    "data": ["Probed on facts.jsonl, SHA-256 abababababab"],
}  # fmt: skip


@pytest.mark.parametrize("path", PARTS)
def test_a_part_is_absent_where_the_report_has_nothing_for_it(path: str, everything: str) -> None:
    source = render(_without(full(), path), LINES)
    for words in PARTS[path]:
        assert words in everything, f"control: {words}"
        assert words not in source


def test_curves_are_absent_without_metrics_and_the_gates_over_training_without_health(everything: str) -> None:
    heading, over = "<h2>Training</h2>", "Hot and cold n-grams over training"
    assert heading in everything and over in everything
    bare = render(full(), [])
    assert heading not in bare and over not in bare
    plain = render(full(), [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0}])
    assert heading in plain and over not in plain and "Training: loss<" in plain


def test_a_report_of_one_arm_of_text_or_of_nothing_is_a_page() -> None:
    for report in (text(base=3.0, graft=2.5), facts(graft=5), {"arms": {"base": {}, "graft": {}}}):
        source = render(report, [])
        assert Page(source).tags["h1"] == 1 and verdict(report) in source
        assert len(re.findall("<section>", source)) <= 2


def test_wrong_answers_come_first_and_what_is_left_out_is_counted() -> None:
    rows = [{"prompt": f"p{n}", "answer": "The wool.", "base": "", "graft": "wool" if n % 2 else "no"} for n in range(100)]
    source = render({**facts(base=0, graft=50), "examples": rows}, [])
    marks = re.findall(r'<tr class="(right|wrong)">', source)
    assert marks == ["wrong"] * WRONG + ["right"] * RIGHT
    assert f"50 free answers are right and 50 wrong; not shown here: {50 - WRONG} wrong and {50 - RIGHT} right ones." in source
    judged = render({**facts(base=0, graft=50), "examples": [rows[0] | {"right": True}]}, [])
    assert "1 free answers are right and 0 wrong." in judged, "an alias counts where the probe says so"


def test_long_trainings_are_drawn_with_few_points() -> None:
    lines = [{"step": n, "loss": 1 + n % 7} for n in range(1, 50_001)]
    assert len(render(facts(graft=5), lines)) < len(render(facts(graft=5), lines[:50])) + 30_000


def test_a_broken_line_of_metrics_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "lo')
    with pytest.raises(UserError, match=r"metrics\.jsonl, line 2: not JSON .*remove that line"):
        read_metrics(path)
    assert read_metrics(tmp_path / "absent.jsonl") == []


# -- side by side


def column(found: Mapping[str, Any], metric: str) -> list[Any]:
    return next(row["values"] for row in found["rows"] if row["metric"] == metric)


def test_compare_has_a_row_a_metric_and_a_column_a_graft(tmp_path: Path) -> None:
    reports = {"runs/a": full(), "runs/b": facts(base=0, graft=70, memory_off=0)}
    found = compare(reports)
    assert found["grafts"] == ["runs/a", "runs/b"] and json.loads(json.dumps(found)) == found
    assert column(found, "trained wordings, greedy") == [0.99, 0.7]
    assert column(found, "unseen wordings, greedy") == [0.99, None]
    assert found["verdicts"] == [verdict(report) for report in reports.values()]
    assert all(any(value is not None for value in row["values"]) for row in found["rows"])
    write_compare(reports, tmp_path / "compare.html")
    assert (tmp_path / "compare.html").read_text(encoding="utf-8") == render_compare(reports)


def test_compare_says_whether_the_grafts_were_asked_the_same() -> None:
    a, b = full(), full()
    b["arms"]["graft"]["recall"]["greedy_exact"] = 0.5
    same = compare({"a": a, "b": b})
    assert same["same_data"] is True and "<strong>99.0" in render_compare({"a": a, "b": b})
    b["data"] = {"source": "other.jsonl", "sha256": "cd" * 32}
    other = compare({"a": a, "b": b})
    assert other["same_data"] is False and "different data (a: facts.jsonl, b: other.jsonl)" in other["note"]
    page = render_compare({"a": a, "b": b})
    assert other["note"] in page and "<strong>" not in page, "no best among scores that do not compare"
    del b["data"]
    unknown = compare({"a": a, "b": b})
    assert unknown["same_data"] is None and "not recorded what was probed for b" in unknown["note"]


@pytest.mark.parametrize(("share", "words"), [(0.45, "45 of"), (1.0, "all of"), (0.0, "none of")])
def test_verdict_says_how_many_related_prompts_keep_the_bases_answer(share: float, words: str) -> None:
    report = {"arms": {"base": {}, "graft": {"neighborhood": {"kl": 0.1, "same_answer": share, "n": 100}}}}
    assert f"while {words} 100 related prompts keep the base's answer." in verdict(report)
    assert "related" not in verdict({"arms": {"base": {}, "graft": {}}}), "control"
