"""Explaining a setting, the JSON schema, and the generated page of the documentation."""

import re
from pathlib import Path

import jsonschema
import pytest

from drawbar.cli.init import SCHEMA
from drawbar.config.io.explain import explain, schema_json
from drawbar.config.io.fields import catalogue
from drawbar.config.io.load_config import load_config
from drawbar.config.io.source import parse_yaml
from drawbar.config.schema.run_config import CausalLMConfig, TaskConfig, run_config_type
from drawbar.errors import UserError


class ScoringConfig(TaskConfig):
    """Scores sentences."""

    threshold: float
    """From which score on a sentence counts as good."""
    shape: list[list[int]] = [[1]]


@pytest.fixture
def loaded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text("optim:\n  lr: 0.5\ntask: {from_scratch: {n_layer: 2}}\n")
    return load_config("config.yaml", ["train.steps=7"])


def test_setting_of_the_file(loaded):
    assert explain("optim.lr", loaded).splitlines() == [
        "optim.lr = 0.5",
        "  from:     config.yaml:2",
        "  allowed:  number >= 0",
        "  default:  0.0003",
        "  meaning:  Peak learning rate.",
    ]


def test_setting_of_the_command_line_and_default(loaded):
    assert "train.steps = 7\n  from:     command line\n" in explain("train.steps", loaded)
    text = explain("parallel.strategy", loaded)
    assert "parallel.strategy = auto\n  from:     default\n" in text
    words = "auto | single | dp | ddp | zero1 | fsdp | deepspeed | text of the form package.module:name"
    assert f"  allowed:  {words}\n" in text


def test_a_text_where_a_section_may_be(tmp_path, monkeypatch):
    """Texts have methods of the names of settings: split, format."""
    text = explain("data.train", load_config(None, ["data.train=a.txt"]))
    assert text.startswith("data.train = a.txt")
    assert "data.train.split = (not set)" in text


def test_section_lists_its_settings(loaded):
    text = explain("optim", loaded)
    assert "  optim.lr = 0.5 " in text
    assert "Peak learning rate." in text
    assert "train.steps" not in text


def test_setting_that_holds_keys_lists_them(loaded):
    text = explain("tracking.profile", loaded)
    assert "section (start, steps) | null" in text
    assert "  tracking.profile.steps = (not set) " in text
    assert "default:  (required)" in explain("tracking.profile.start", loaded)


def test_key_of_a_free_mapping(loaded):
    text = explain("task.from_scratch.n_layer", loaded)
    assert "task.from_scratch.n_layer = 2\n  from:     config.yaml:3\n  part of:  task.from_scratch: Start from" in text
    assert "task.from_scratch.n_head = (not set)" in explain("task.from_scratch.n_head", loaded)


@pytest.mark.parametrize(
    ("key", "remedy"),
    [
        ("optim.lrr", "did you mean optim.lr?"),
        ("lr", "did you mean optim.lr?"),
        ("zzzz", "sections: run, task, data"),
        ("optim.zzzz", "in optim: name, lr, weight_decay"),
        ("optim.lr.zzzz", "sections: run, task, data"),
    ],
)
def test_unknown_key(loaded, key, remedy):
    with pytest.raises(UserError) as caught:
        explain(key, loaded)
    assert str(caught.value) == f"there is no setting {key}\n  fix:   {caught.value.remedy}"
    assert remedy in str(caught.value)


def test_options_of_an_own_task():
    loaded = load_config(None, ["task.threshold=0.5"], ScoringConfig)
    assert "task: Scores sentences.\n" in explain("task", loaded)
    assert "meaning:  From which score on a sentence counts as good." in explain("task.threshold", loaded)
    assert "allowed:  list of list of whole number\n" in explain("task.shape", loaded)
    schema = schema_json(ScoringConfig)
    assert schema["$defs"]["ScoringConfig"]["required"] == ["threshold"]
    assert "CausalLMConfig" not in schema["$defs"]


def test_json_schema_is_closed_and_documented():
    schema = schema_json()
    assert schema["additionalProperties"] is False
    assert schema["$defs"]["OptimSection"]["properties"]["lr"]["description"] == "Peak learning rate."
    assert "CausalLMConfig" in schema["$defs"]


ROOT = Path(__file__).parents[3]
FILES = [*(ROOT / "src/drawbar/templates").glob("*/config.yaml"), *(ROOT / "examples").glob("*/*.yaml")]


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}/{file.name}")
def test_the_yaml_files_name_the_schema_and_keep_to_it(file):
    text = file.read_text(encoding="utf-8").replace("{{name}}", "demo")
    named = re.match(r"# yaml-language-server: \$schema=(\S+)\n", text)
    assert named is not None
    is_template = "templates" in file.parts
    assert named.group(1) == SCHEMA if is_template else (file.parent / named.group(1)).is_file()
    jsonschema.validate(parse_yaml(text), schema_json())


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("optim: {lrr: 1}", "optim"),
        ("task: {type: seq2seq, label_column: x}", "task"),
        ("task: {type: sequence_classification, model: bert, problem: sorting}", "task.problem"),
        ("train: {steps: many}", "train.steps"),
    ],
)
def test_the_schema_finds_mistakes_in_the_section_of_the_task_too(text, path):
    found = jsonschema.Draft202012Validator(schema_json()).iter_errors(parse_yaml(text))
    assert path in [".".join(map(str, error.absolute_path)) for error in found]


def test_the_schema_takes_any_option_of_a_users_own_task():
    for text in ("task: {type: 'task:Dates', width: 128}", "task: {width: 128}"):  # the second one is read by a script
        jsonschema.validate(parse_yaml(text), schema_json())


@pytest.mark.parametrize("name", ["fsdp", "auto", "compression:compressed", "of_an_installed_package"])
def test_the_schema_takes_strategies_of_users_and_of_other_packages(name):
    jsonschema.validate({"parallel": {"strategy": name}}, schema_json())


def test_every_setting_has_a_meaning():
    undocumented = [
        setting.key
        for setting in catalogue(run_config_type(CausalLMConfig)).values()
        if not setting.meaning and not setting.is_section
    ]
    assert undocumented == []


def test_no_setting_is_explained_by_a_pattern():
    known = catalogue(run_config_type(CausalLMConfig))
    assert [key for key, setting in known.items() if "^" in setting.allowed or "[A-Z" in setting.allowed] == []
