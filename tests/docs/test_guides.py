"""docs/tasks.md and docs/data.md: every command runs, every configuration is loaded, and what they show is true."""

import json
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest
from made_up import write_data
from pages import Block, blocks, run_commands, write_files

import drawbar
from drawbar.config.rules.rule_table import RULES, check_rules
from drawbar.data.sources import open_records
from drawbar.tasks.task_registry import task_class

DOCS = Path(__file__).parents[2] / "docs"
TASKS, DATA, METRICS = DOCS / "tasks.md", DOCS / "data.md", DOCS / "metrics.md"
PARTS = [
    (page, block)
    for page in (TASKS, DATA, METRICS)
    for block in blocks(page)
    if block.language == "yaml" and block.mark
]


def walked(page: Path, folder: Path, at_least: int) -> Path:
    write_data(folder)
    write_files(page, folder)
    assert run_commands(page, folder) >= at_least
    return folder


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of docs/tasks.md, after all of its commands."""
    return walked(TASKS, tmp_path_factory.mktemp("tasks"), at_least=15)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.exhaustive
def test_every_command_about_tasks_runs(tasks: Path) -> None:
    for run, names in {
        "stories": {"loss", "perplexity", "bits_per_byte"},
        "reviews": {"loss", "accuracy", "f1_macro"},
        "entities": {"loss", "entity_precision", "entity_recall", "entity_f1", "tag_accuracy"},
        "translate": {"loss", "perplexity", "chrf", "exact_match"},
        "masked": {"loss", "perplexity"},
        "answers": {"loss", "perplexity", "exact_match"},
        "lengths": {"loss", "perplexity", "bleu", "longer"},
        "languages": {"loss", "accuracy"},
    }.items():
        scores = json.loads((tasks / "runs" / run / "eval" / "validation" / "scores.json").read_text())
        assert scores.keys() - {"step", "records"} == names, run


@pytest.mark.exhaustive
def test_predictions_are_merged_with_their_records(tasks: Path) -> None:
    for name, labels in (("labelled", {"positive", "negative"}), ("guessed", {"english", "german"})):
        found = lines(tasks / f"{name}.jsonl")
        assert [record["text"] for record in found] == (tasks / "new.tsv").read_text().splitlines()[1:]
        assert {record["prediction"] for record in found} <= labels
    assert lines(tasks / "runs" / "reviews" / "eval" / "test" / "predictions.jsonl")[0].keys() == {
        "id", "text", "label", "prediction"}  # fmt: skip


@pytest.mark.exhaustive
def test_what_was_wrong_leaves_nothing_behind(tasks: Path) -> None:
    assert not (tasks / "runs" / "mean").exists()
    assert not list((tasks / "adapter").glob("model*"))
    assert (tasks / "adapter" / "adapter_model.safetensors").exists()
    assert (tasks / "merged" / "model.safetensors").exists()


@pytest.mark.exhaustive
def test_every_command_about_data_runs(tmp_path: Path) -> None:
    walked(DATA, tmp_path, at_least=5)


@pytest.mark.parametrize(("page", "block"), PARTS, ids=lambda value: getattr(value, "name", ""))
def test_settings_are_those_of_the_program(page: Path, block: Block, tmp_path: Path) -> None:
    """Parts of a configuration load, tasks take them, and the data that they name can be read."""
    (tmp_path / "part.yaml").write_text(block.text, encoding="utf-8")
    write_data(tmp_path)
    with chdir(tmp_path):
        config = drawbar.load_config("part.yaml").config
        check_rules(config, RULES)
        task_class(config.task.type)(config)
        if block.mark == "part" and config.data.train is not None:
            assert len(open_records(config.data, "train")) > 0


def test_every_method_is_in_the_table() -> None:
    page = TASKS.read_text(encoding="utf-8")
    methods = [name for name, value in vars(drawbar.Task).items() if callable(value) and not name.startswith("_")]
    missing = [name for name in methods if name != "Config" and f"| `{name}(" not in page]
    assert not missing
