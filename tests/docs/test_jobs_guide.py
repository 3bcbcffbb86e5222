"""docs/jobs.md: dry runs are run, and all other commands are those of the program."""

import shlex
from pathlib import Path

import click
import pytest
from made_up import write_data
from pages import blocks, run_commands, write_files

from drawbar.cli import group
from drawbar.jobs.records import LOST, STOPPED

PAGE = Path(__file__).parents[2] / "docs" / "jobs.md"
COMMANDS = [
    line
    for block in blocks(PAGE)
    if block.language == "bash" and block.mark == "hub"
    for line in block.text.splitlines()
    if line.startswith("drawbar ")
]


def test_dry_runs_run(tmp_path: Path) -> None:
    write_data(tmp_path)
    write_files(PAGE, tmp_path)
    assert run_commands(PAGE, tmp_path) == 2
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("line", COMMANDS)
def test_the_parser_takes_what_needs_a_cluster(line: str) -> None:
    _, name, *arguments = shlex.split(line, comments=True)
    context = group.commands[name].make_context(name, arguments, parent=click.Context(group, **group.context_settings))
    assert isinstance(context, click.Context)


def test_our_own_states_are_explained() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for state in (LOST, STOPPED):
        assert f"| `{state}` | " in text
