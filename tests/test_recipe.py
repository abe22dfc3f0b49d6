"""Recipes: every option is typed, unknown ones are errors, what was resolved is what is saved and read back."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import yaml

from engram_graft.config import EngramConfig
from engram_graft.errors import UserError
from engram_graft.recipe import LoraOptions, ProbeOptions, Recipe, TrainOptions, load_recipe, parse_setting

ROOT = Path(__file__).parents[1]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    return path


# -- the recipes of this repository


def test_there_are_recipes() -> None:
    assert RECIPES


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_every_recipe_loads_and_names_what_exists(path: Path) -> None:
    recipe = load_recipe(path)
    assert recipe.base and recipe.data and recipe.output
    assert (ROOT / recipe.data).exists()


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_every_recipe_opens_with_the_command_that_runs_it(path: Path) -> None:
    header = [line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("#")]
    assert any(f"engram-graft train --recipe recipes/{path.name}" in line for line in header)


# -- defaults, overrides, round trip


def test_without_a_file_the_recipe_is_the_defaults() -> None:
    assert load_recipe() == Recipe()


def test_an_empty_section_of_options_is_the_defaults(tmp_path: Path) -> None:
    assert load_recipe(written(tmp_path, "train: {}\nengram: {}\n")) == Recipe()


def test_dotted_overrides_win_over_the_file_and_make_missing_sections(tmp_path: Path) -> None:
    path = written(tmp_path, "base: a\ntrain:\n  max_steps: 7\n  batch_size: 3\n")
    overrides = {"train.max_steps": 9, "engram.layer_ids": [1], "base": "b", "train.trainer.bf16": True}
    recipe = load_recipe(path, overrides)
    assert (recipe.base, recipe.train.max_steps, recipe.train.batch_size) == ("b", 9, 3)
    assert recipe.engram.layer_ids == (1,) and recipe.train.trainer == {"bf16": True}
    assert load_recipe(path).train.max_steps == 7


CHANGED = Recipe(
    base="./some dir/base",
    data="facts: with colon.jsonl",
    output="runs/1e3",
    dtype="bfloat16",
    merged="m",
    engram=EngramConfig(layer_ids=(0, 3), max_ngram_size=2, engram_vocab_size=(101,), gate="sigmoid", pad_id=3, seed=5),
    lora=LoraOptions(rank=0, alpha=3, dropout=0.5, learning_rate=1e-7, target_modules=("a", "b")),
    train=TrainOptions(
        forms=2, learning_rate=3e-05, stop_at_recall=0.99, save_steps=4, trainer={"bf16": True, "report_to": ["x"]}
    ),
    probe=ProbeOptions(batch_size=1, max_new_tokens=2, examples=0),
)


@pytest.mark.parametrize("recipe", [Recipe(), CHANGED, *map(load_recipe, RECIPES)])
def test_what_is_saved_is_read_back_equal(recipe: Recipe, tmp_path: Path) -> None:
    text = yaml.safe_dump(recipe.to_dict(), sort_keys=False)
    assert load_recipe(written(tmp_path, text)) == recipe


def test_the_round_trip_covers_every_option() -> None:
    """Control: an option that were left out of `to_dict` would not be noticed at its default."""
    assert all(getattr(CHANGED.lora, field.name) != field.default for field in dataclasses.fields(LoraOptions))
    assert all(getattr(CHANGED.probe, field.name) != field.default for field in dataclasses.fields(ProbeOptions))
    saved = CHANGED.to_dict()
    for kind, part in ((Recipe, saved), (TrainOptions, saved["train"]), (EngramConfig, saved["engram"])):
        assert list(part) == [field.name for field in dataclasses.fields(kind)]


# -- unknown options


@pytest.mark.parametrize(
    ("name", "close"),
    [
        ("train.max_step", "train.max_steps"),
        ("train.learning_rat", "train.learning_rate"),
        ("engram.layers_ids", "engram.layer_ids"),
        ("lora.ranks", "lora.rank"),
        ("probe.batchsize", "probe.batch_size"),
        ("datas", "data"),
        ("trains.max_steps", "train"),
    ],
)
def test_an_unknown_option_is_named_with_the_one_that_was_meant(name: str, close: str) -> None:
    with pytest.raises(UserError) as raised:
        load_recipe(None, {name: 1})
    assert f"unknown recipe option {name.removesuffix('.max_steps')}: did you mean {close}?" in str(raised.value)


def test_an_unknown_option_like_no_other_is_answered_with_all_of_its_section() -> None:
    with pytest.raises(UserError, match=r"unknown recipe option lora\.qqq: the options here are rank, alpha, dropout"):
        load_recipe(None, {"lora.qqq": 1})


def test_an_unknown_option_in_the_file_is_refused_too(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"did you mean train\.max_steps"):
        load_recipe(written(tmp_path, "train:\n  max_stepps: 5\n"))


# -- types and values


@pytest.mark.parametrize("text", ["1e-3", "1.0e-3", "0.001", "'0.001'"])
def test_floats_are_floats_however_yaml_reads_them(text: str, tmp_path: Path) -> None:
    recipe = load_recipe(written(tmp_path, f"train:\n  learning_rate: {text}\n"))
    assert recipe.train.learning_rate == 1e-3 and isinstance(recipe.train.learning_rate, float)


def test_a_whole_number_where_a_float_is_wanted_becomes_one() -> None:
    recipe = load_recipe(None, {"train.max_grad_norm": 1, "train.stop_at_recall": "1"})
    assert isinstance(recipe.train.max_grad_norm, float) and recipe.train.stop_at_recall == 1.0


@pytest.mark.parametrize("name", ["base", "merged", "train.forms", "train.stop_at_recall", "engram.pad_id"])
def test_null_is_taken_where_an_option_may_be_absent(name: str) -> None:
    assert load_recipe(None, {name: None}) == Recipe()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("train.max_steps", "many"),
        ("train.max_steps", 2.5),
        ("train.max_steps", True),
        ("train.max_steps", None),
        ("train.max_steps", [1]),
        ("train.max_steps", {}),
        ("train.learning_rate", "fast"),
        ("train.learning_rate", True),
        ("train.learning_rate", None),
        ("train.learning_rate", [1e-3]),
        ("train.forms", "all"),
        ("train.stop_at_recall", "never"),
        ("train.lr_scheduler_type", 3),
        ("train.trainer", ["bf16"]),
        ("train.trainer", "bf16"),
        ("lora.target_modules", "q_proj"),
        ("lora.target_modules", [1]),
        ("lora.rank", "8"),
        ("base", 3),
        ("dtype", "float7"),
        ("dtype", None),
        ("engram.layer_ids", "two"),
        ("engram.layer_ids", [1.5]),
        ("engram.layer_ids", 2),
        ("engram.n_embed_per_ngram", "wide"),
        ("engram.conv", "yes"),
        ("engram.gate", 3),
        ("engram.pad_id", "eos"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_with_name_and_value(name: str, value: Any) -> None:
    with pytest.raises(UserError) as raised:
        load_recipe(None, {name: value})
    assert name.rpartition(".")[2] in str(raised.value) and repr(value) in str(raised.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("train.max_steps", 0),
        ("train.batch_size", -1),
        ("train.gradient_accumulation_steps", 0),
        ("train.learning_rate", 0.0),
        ("train.learning_rate", float("nan")),
        ("train.table_rate_multiplier", -5),
        ("train.max_length", 0),
        ("train.block_size", 1),
        ("train.forms", 0),
        ("train.stop_at_recall", 1.5),
        ("train.stop_at_recall", 0.0),
        ("train.recall_every", -1),
        ("train.save_steps", -1),
        ("train.warmup_steps", -1),
        ("train.weight_decay", -0.1),
        ("train.max_grad_norm", -1.0),
        ("train.seed", -1),
        ("train.lr_scheduler_type", "sometimes"),
        ("lora.rank", -1),
        ("lora.alpha", 0),
        ("lora.dropout", 1.5),
        ("lora.learning_rate", -1.0),
        ("probe.batch_size", 0),
        ("probe.max_new_tokens", 0),
        ("engram.layer_ids", [2, 2]),
        ("engram.max_ngram_size", 1),
    ],
)
def test_a_value_out_of_range_is_refused_before_anything_runs(name: str, value: Any) -> None:
    with pytest.raises(UserError) as raised:
        load_recipe(None, {name: value})
    assert name.rpartition(".")[2] in str(raised.value)


def test_stopping_at_recall_needs_recall_to_be_measured() -> None:
    with pytest.raises(UserError, match="recall_every above 0"):
        load_recipe(None, {"train.stop_at_recall": 0.9, "train.recall_every": 0})


# -- files that are no recipe


@pytest.mark.parametrize("value", ["fast", 3, ["max_steps"], None])
def test_a_section_that_is_no_mapping_is_refused(value: Any, tmp_path: Path) -> None:
    path = written(tmp_path, yaml.safe_dump({"train": value}))
    with pytest.raises(UserError, match=f"recipe section 'train': must be a mapping of options, found {type(value).__name__}"):
        load_recipe(path)


@pytest.mark.parametrize("name", ["base.x", "train.max_steps.x"])
def test_an_override_below_a_value_is_refused(name: str, tmp_path: Path) -> None:
    path = written(tmp_path, "base: a\ntrain:\n  max_steps: 3\n")
    with pytest.raises(UserError, match=f"recipe option '{name}': {name.split('.')[-2]} is a value, not a section"):
        load_recipe(path, {name: 1})


def test_a_file_that_is_missing_not_yaml_not_utf_8_or_no_mapping_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no\.yaml: cannot be read \(No such file"):
        load_recipe(tmp_path / "no.yaml")
    with pytest.raises(UserError, match=r"recipe\.yaml: not YAML .*line 1") as raised:
        load_recipe(written(tmp_path, "train: {a: ["))
    assert "\n" not in str(raised.value)
    for text, kind in (("- base", "list"), ("just words", "str"), ("", "NoneType")):
        with pytest.raises(UserError, match=f"must be a mapping of options, found {kind}"):
            load_recipe(written(tmp_path, text))
    (tmp_path / "recipe.yaml").write_bytes(b"base: caf\xe9")
    with pytest.raises(UserError, match="cannot be read"):
        load_recipe(tmp_path / "recipe.yaml")


def test_a_recipe_runs_no_code(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not YAML"):
        load_recipe(written(tmp_path, "base: !!python/object/apply:os.getcwd []\n"))


# -- --set


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("train.max_steps=40", ("train.max_steps", 40)),
        ("engram.layer_ids=[2, 6]", ("engram.layer_ids", [2, 6])),
        ("base=a=b", ("base", "a=b")),
        ("train.forms=null", ("train.forms", None)),
        ("train.forms=", ("train.forms", None)),
        ("engram.conv=false", ("engram.conv", False)),
        ("train.trainer={bf16: true}", ("train.trainer", {"bf16": True})),
    ],
)
def test_parse_setting_reads_a_dotted_name_and_a_yaml_value(text: str, expected: tuple[str, Any]) -> None:
    assert parse_setting(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [("train.max_steps", "must look like"), ("=3", "must look like"), ("", "must look like"), ("a=[1", "not YAML")],
)
def test_parse_setting_refuses_what_is_no_setting(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as raised:
        parse_setting(text)
    assert repr(text) in str(raised.value)


@pytest.mark.parametrize(
    ("tier", "directory", "says"),
    [
        ("disk", None, "must be one of resident, mmap"),
        ("mmap", None, "files need a directory"),
        ("resident", "d", "files need a directory"),
    ],
)
def test_tier_and_directory_of_tables_have_to_go_together(tier: str, directory: str | None, says: str) -> None:
    with pytest.raises(UserError, match=says):
        load_recipe(None, {"table_tier": tier, "table_dir": directory})


@pytest.mark.parametrize(("tier", "directory"), [(None, "d"), ("mmap", "d"), ("resident", None), (None, None)])
def test_a_directory_alone_means_files(tier: str | None, directory: str | None) -> None:
    assert load_recipe(None, {"table_tier": tier, "table_dir": directory}).table_dir == directory
