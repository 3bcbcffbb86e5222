"""docs/report.md: every command runs, and what it says of limits and states is true."""

from pathlib import Path
from typing import get_args

import pytest
from made_up import write_data
from pages import run_commands, write_files

from drawbar.report import recorded_run, report_page, run_history
from drawbar.tracking.run_view import STALE, SUBMITTED, UNKNOWN, RunState

pytestmark = pytest.mark.exhaustive

PAGE = Path(__file__).parents[2] / "docs" / "report.md"


def test_every_command_runs(tmp_path: Path) -> None:
    write_data(tmp_path)
    write_files(PAGE, tmp_path)
    assert run_commands(PAGE, tmp_path) == 7
    for page in ("runs/roads/report.html", "comparison.html"):
        assert "roads" in (tmp_path / page).read_text(encoding="utf-8").partition("</head>")[2]


def test_every_state_is_explained() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for state in (*get_args(RunState), STALE, UNKNOWN, SUBMITTED):
        assert f"| `{state}` | " in text


def test_the_limits_are_those_of_the_program() -> None:
    text = " ".join(PAGE.read_text(encoding="utf-8").split())
    assert f"at most {report_page.MOST_BUCKETS} buckets" in text
    shown = f"At most {run_history.MOST_CURVES} metrics, {run_history.MOST_EVENTS} events and "
    assert f"{shown}{recorded_run.MOST_PREDICTIONS} predictions" in text
    assert f"{recorded_run.MOST_CHARACTERS:,} characters" in text
