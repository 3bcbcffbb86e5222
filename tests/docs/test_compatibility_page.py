"""The table of what combines: the page says what the rules say."""

import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
sys.path.append(str(DOCS))

import chat_templates_page  # noqa: E402
from compatibility_page import OTHERS, PARALLEL_OPTIONS, are_alternatives, broken_rules, render  # noqa: E402

from drawbar.config.rules.parallel_rules import PARALLEL  # noqa: E402
from programs import lacks  # noqa: E402


@pytest.mark.exhaustive
def test_the_page_is_current() -> None:
    assert (DOCS / "compatibility.md").read_text(encoding="utf-8") == render(), "run `make docs`"


def test_each_feature_works_alone() -> None:
    for feature in PARALLEL_OPTIONS + OTHERS:
        assert broken_rules(feature.settings) == [], feature.label


@pytest.mark.exhaustive
def test_the_page_of_chat_templates_is_current() -> None:
    if not chat_templates_page.IS_AVAILABLE:
        lacks("no trl here: make .venv/installed-others")
    assert (DOCS / "chat_templates.md").read_text(encoding="utf-8") == chat_templates_page.render(), "run `make docs`"


@pytest.mark.exhaustive
def test_the_page_says_what_the_rules_say() -> None:
    lines = render().splitlines()
    columns = next(line for line in lines if line.startswith("| | single")).split(" | ")[1:]
    cells = next(line for line in lines if line.startswith("| zero1 |")).split(" | ")[1:]
    row = {column.strip(" |"): cell.strip(" |") for column, cell in zip(columns, cells, strict=True)}
    assert (row["ddp"], row["zero1"]) == ("–", "–")
    number = row["tensor"]
    assert any(line.startswith(f"| {number} | torch's ZeroRedundancyOptimizer") for line in lines)


def test_every_pair_of_layouts_has_one_answer() -> None:
    for one in PARALLEL_OPTIONS:
        for other in PARALLEL_OPTIONS:
            assert are_alternatives(one, other) == are_alternatives(other, one)
    named = {rule.name for rule in PARALLEL}
    assert {rule.name for rule in broken_rules({"parallel.strategy": "zero1", "parallel.tensor": 2})} <= named
