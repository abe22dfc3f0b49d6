"""`engram-graft probe` from the shell: what it lists, compares, refuses, and what a late failure leaves behind."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from test_cli import Trained, base, facts, graft, refused, run, train_arguments, trained, tree  # noqa: F401

from engram_graft.probes import CONTROLS, PROBES


def test_list_names_every_probe_and_control() -> None:
    ran = run("probe", "--list", "--json")
    listed = json.loads(ran.out)
    assert ran.code == 0 and listed["probes"] == {probe.name: probe.about for probe in PROBES}
    assert set(listed["controls"]) == set(CONTROLS) == {"lora_only", "one_row", "random_rows", "knn_lm"}
    assert all(name in run("probe", "--list").out for name in (*listed["probes"], *listed["controls"]))


def test_only_some_probes_go_into_a_directory_of_their_own(graft: Path, tmp_path: Path) -> None:  # noqa: F811
    before = tree(graft)
    ran = run("probe", graft, "--only", "recall, health", "--output", tmp_path / "some")
    assert ran.code == 0, ran.err
    report = json.loads((tmp_path / "some" / "probes.json").read_text())
    assert set(report["arms"]["graft"]) == {"recall"} and "health" in report and "locality" not in report
    assert tree(graft) == before
    refused(run("probe", graft, "--only", "recal", "--output", tmp_path / "none"), "'recal'", "recall")


@pytest.mark.parametrize("options", [["--only", "recall"], ["--data", "FACTS"]])
def test_a_grafts_own_report_is_not_replaced_by_part_of_one(options: list[str], graft: Path, facts: Path) -> None:  # noqa: F811
    before = tree(graft)
    given = [facts if option == "FACTS" else option for option in options]
    refused(run("probe", graft, *given, "--output", graft), options[0], "--output DIR")
    refused(run("probe", graft, *given), options[0])
    assert tree(graft) == before


def test_another_grafts_report_is_not_replaced(graft: Path, trained: Trained, tmp_path: Path) -> None:  # noqa: F811
    other = Path(shutil.copytree(graft, tmp_path / "other"))
    before = tree(other)
    refused(run("probe", graft, "--output", other), "another graft")
    assert tree(other) == before
    assert run("probe", graft, "--only", "recall", "--output", tmp_path / "free").code == 0, "control"


def test_compare_lays_grafts_side_by_side(graft: Path, trained: Trained, tmp_path: Path) -> None:  # noqa: F811
    ran = run("probe", graft, trained.out, "--compare", "--output", tmp_path / "both", "--json")
    compared = json.loads(ran.out)
    assert ran.code == 0 and compared["grafts"] == [str(graft), str(trained.out)] and compared["same_data"] is True
    rows = {row["path"]: row["values"] for row in compared["rows"]}
    assert rows["arms.graft.recall.greedy_exact"][0] == rows["arms.graft.recall.greedy_exact"][1]
    assert {path.name for path in (tmp_path / "both").iterdir()} == {"compare.html", "compare.json"}
    assert "score" in run("probe", graft, trained.out, "--compare").out


@pytest.mark.parametrize("broken", ["{}", "[]", "null", '{"arms": []}', '{"arms": {"graft": {}}}', "{"])
def test_compare_refuses_what_is_no_report(broken: str, graft: Path, trained: Trained) -> None:  # noqa: F811
    (graft / "probes.json").write_text(broken)
    refused(run("probe", graft, trained.out, "--compare"), "probes.json", "probe the graft again")


def test_compare_refuses_one_graft_twice_and_options_that_it_would_not_heed(graft: Path, trained: Trained) -> None:  # noqa: F811
    refused(run("probe", graft, f"{graft}/", "--compare"), "each once")
    refused(run("probe", graft, "--compare"), "two or more")
    refused(run("probe", graft, trained.out, "--compare", "--controls"), "--controls with --compare")
    (graft / "probes.json").unlink()
    refused(run("probe", graft, trained.out, "--compare"), f"engram-graft probe {graft}")


def test_controls_are_arms_of_the_report_and_a_failing_one_leaves_what_was_measured(
    graft: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ran = run("probe", graft, "--control", "knn_lm", "--control", "one_row", "--json")
    assert ran.code == 0, ran.err
    report = json.loads(ran.out)
    assert list(report["arms"])[-2:] == ["knn_lm", "one_row"] and set(report["controls"]) == {"knn_lm", "one_row"}
    assert "controls:" in report["verdict"] and "kNN-LM" in (graft / "report.html").read_text()

    def fails(*arguments: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr("engram_graft.probes.run_controls", fails)
    assert run("probe", graft, "--controls").code == 3
    kept = json.loads((graft / "probes.json").read_text())
    assert "recall" in kept["arms"]["graft"] and "controls" not in kept
    refused(run("probe", graft, "--control", "lora"), "'lora'", "lora_only")


def test_a_run_that_diverged_is_named_and_leaves_valid_json(base: Path, facts: Path, tmp_path: Path) -> None:  # noqa: F811
    arguments = [part for part in train_arguments(base, facts, tmp_path / "out", steps=3) if part != "--no-probe"]
    ran = run(*arguments, "--learning-rate", "1e30", "--set", "train.max_grad_norm=0")
    assert ran.code == 0, ran.err
    report = json.loads((tmp_path / "out" / "probes.json").read_text(), parse_constant=pytest.fail)
    (warning,) = report["warnings"]
    assert warning.startswith("The run diverged: ")
    page = (tmp_path / "out" / "report.html").read_text()
    assert not re.search(r">[^<]*\b(nan|inf|None)\b[^<]*<", page)
