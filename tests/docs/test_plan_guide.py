"""docs/plan.md: its commands run, and print what it shows."""

from pathlib import Path

import pytest
from made_up import write_data
from pages import run_commands, write_files

pytestmark = pytest.mark.exhaustive

PAGE = Path(__file__).parents[2] / "docs" / "plan.md"


def test_every_command_runs(tmp_path: Path) -> None:
    write_data(tmp_path)
    write_files(PAGE, tmp_path)
    assert run_commands(PAGE, tmp_path) == 2
