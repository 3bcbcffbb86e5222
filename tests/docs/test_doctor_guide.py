"""docs/doctor.md: its commands run, and print what it shows."""

from pathlib import Path

import pytest
from made_up import write_data
from pages import run_commands, write_files

from drawbar.launch.findings import Level

pytestmark = pytest.mark.exhaustive

PAGE = Path(__file__).parents[2] / "docs" / "doctor.md"


def test_every_command_runs(tmp_path: Path) -> None:
    write_data(tmp_path)
    write_files(PAGE, tmp_path)
    assert run_commands(PAGE, tmp_path) == 2


def test_every_level_is_explained() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for level in Level:
        assert f"| {level} | " in text
