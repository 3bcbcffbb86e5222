"""docs/deepspeed.md: its commands run, its configurations are ones that work, and its JSON is what it says it is."""

import json
import re
from pathlib import Path

import pytest
from made_up import write_data
from pages import Block, blocks, run_commands, write_files

import drawbar
from drawbar.config.rules.rule_table import RULES, TRAIN_RULES, check_rules
from drawbar.deepspeed.config_json import check_start, deepspeed_json
from runs import largest_difference, losses

PAGE = Path(__file__).parents[2] / "docs" / "deepspeed.md"
PARTS = [block for block in blocks(PAGE) if block.mark == "part"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The page's files; the data is ours."""
    write_data(tmp_path)
    write_files(PAGE, tmp_path)
    for block in blocks(PAGE):
        if block.language == "json" and block.mark != "output":
            (tmp_path / f"{block.mark}.json").write_text(block.text, encoding="utf-8")
    return tmp_path


def test_every_command_runs(folder: Path) -> None:
    assert run_commands(PAGE, folder) == 7
    runs = folder / "runs"
    by_drawbar, *others = (losses(runs / name) for name in ("stories", "by-torchrun", "by-deepspeed"))
    assert [largest_difference(by_drawbar, other) for other in others] == [0, 0]
    assert not (runs / "wrong").exists()


@pytest.mark.parametrize("block", PARTS, ids=range(len(PARTS)))
def test_every_configuration_is_allowed(block: Block, tmp_path: Path) -> None:
    (tmp_path / "part.yaml").write_text(block.text, encoding="utf-8")
    loaded = drawbar.load_config(tmp_path / "part.yaml")
    check_rules(loaded, RULES + TRAIN_RULES)
    check_start(loaded, 8)


def test_presets_are_what_the_table_says(folder: Path) -> None:
    rows = re.findall(r"^\| `(zero\w+)` \| `(.*)` \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(rows) == 4
    for preset, settings in rows:
        short, long = (
            deepspeed_json(drawbar.load_config(folder / "stories.yaml", overrides), 2, "bf16").values
            for overrides in ([f"deepspeed.preset={preset}"], ["parallel.strategy=deepspeed", *settings.split()])
        )
        assert short == long


def test_every_setting_of_the_table_exists() -> None:
    """The column ``Set instead``."""
    table = PAGE.read_text(encoding="utf-8").split("## From a JSON to settings")[1].split("##")[0]
    column = "".join(re.findall(r"^\|.*\| (.*) \|$", table, re.MULTILINE))
    named = set(re.findall(r"`(\w+)\.(\w+)", column)) - {("metrics", "jsonl")}
    assert len(named) > 20
    settings = drawbar.load_config(None, ["deepspeed.preset=zero2"]).config.model_dump()
    assert [(section, name) for section, name in named if name not in settings.get(section, {})] == []


def test_the_json_of_the_page_is_json(folder: Path) -> None:
    assert json.loads((folder / "ds.json").read_text())["zero_optimization"]["stage"] == 2
