"""docs/strategies.md: its commands run, and its configurations are ones that work."""

import re
from pathlib import Path

import pytest
from made_up import write_data
from pages import Block, blocks, run_commands, write_files

import drawbar
from drawbar.config.rules.rule_table import RULES, TRAIN_RULES, check_rules

PAGE = Path(__file__).parents[2] / "docs" / "strategies.md"
PARTS = [block for block in blocks(PAGE) if block.mark == "part"]


@pytest.mark.exhaustive
def test_every_command_runs(tmp_path: Path) -> None:
    write_data(tmp_path)
    write_files(PAGE, tmp_path)
    assert run_commands(PAGE, tmp_path) == 3


@pytest.mark.parametrize("block", PARTS, ids=range(len(PARTS)))
def test_every_configuration_is_allowed(block: Block, tmp_path: Path) -> None:
    (tmp_path / "part.yaml").write_text(block.text, encoding="utf-8")
    check_rules(drawbar.load_config(tmp_path / "part.yaml"), RULES + TRAIN_RULES)


def test_every_choice_is_allowed() -> None:
    """The column ``Set`` of the first table, on top of fsdp where it says ``also``."""
    choices = [line.split(" | ")[1] for line in PAGE.read_text(encoding="utf-8").splitlines() if "| `parallel." in line]
    choices += re.findall(r"also (`[^|]*`)", PAGE.read_text(encoding="utf-8"))
    given = [re.findall(r"(?:parallel|train|optim)\.\w+=[\w{}: ]+?(?=[` ])", choice) for choice in choices]
    assert len([settings for settings in given if settings]) >= 10
    for settings in given:
        fitting = [setting.replace("NODES", "2") for setting in settings]
        before = [] if any("strategy" in setting for setting in fitting) else ["parallel.strategy=fsdp"]
        for setting in fitting if len(fitting) > 1 and "activation" in fitting[0] else [None]:
            overrides = [setting] if setting else fitting
            check_rules(drawbar.load_config(None, [*before, *overrides]), RULES)
