"""docs/families.md says what is measured, and what drawbar goes by."""

import sys
from pathlib import Path

import pytest
import torch

from drawbar.models.heads import Head
from exhaustive import evenly, params

sys.path.insert(0, str(Path(__file__).parents[2] / "docs"))

import families

torch.set_num_threads(1)  # tiny tensors

HEADS = {task: head for head, task in families.TASKS.items()}
LINES = [line for line in families.PAGE.read_text("utf-8").splitlines() if line.startswith("| ")][2:]
ROWS: list[tuple[str, Head]] = [(line.split(" | ")[0][2:], HEADS[line.split(" | ")[1]]) for line in LINES]
NOT_EQUAL = [case for case, line in zip(ROWS, LINES, strict=True) if "one by one" in line]
OFTEN = [*evenly(ROWS, 8), *evenly(NOT_EQUAL, 4)]


@pytest.mark.parametrize(("family", "head"), params(ROWS, OFTEN))
def test_a_line_is_what_is_measured(family: str, head: Head) -> None:
    measured = families.measure(family, head)
    assert measured == families.declared(family, head)
    assert measured.line() in LINES


def test_every_family_is_on_the_page() -> None:
    untried = families.PAGE.read_text("utf-8").rpartition("take tokens alone: ")[2]
    named = {family for family, _ in ROWS} | {one.partition(" (")[0].strip() for one in untried.split(",")}
    assert named >= {family for family, head in families.cases() if head != "causal_lm"}
