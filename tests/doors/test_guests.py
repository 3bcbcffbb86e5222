"""The core knows none of its guests: an installed copy without their folders still trains, evaluates and resumes."""

import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import drawbar
from conftest import make_project

PACKAGE = Path(drawbar.__file__).parent
GUESTS = {
    "convert": {"convert"},
    "jobs": {"jobs"},
    "parity": {"parity", "plan"},
    "plan": {"plan"},
    "report": {"report", "parity", "plan"},
}
"""Each, and what goes with it: the guests that use it."""
LEFT_OUT = [*GUESTS.values(), set(GUESTS)]


def guests_by_command() -> dict[str, str]:
    points = [point for point in entry_points(group="drawbar.commands") if point.dist.name == "drawbar"]
    return {point.name: point.module.split(".")[1] for point in points}


def test_every_guest_enters_by_entry_points() -> None:
    found = guests_by_command()
    assert set(found.values()) == set(GUESTS)
    assert {name for name, guest in found.items() if guest == "jobs"} >= {"submit", "jobs", "logs", "doctor"}
    sources = [path for path in PACKAGE.rglob("*.py") if path.relative_to(PACKAGE).parts[0] not in GUESTS]
    knowing = [path for path in sources if re.search(rf"drawbar\.({'|'.join(GUESTS)})\b", path.read_text("utf-8"))]
    assert knowing == []


@pytest.mark.parametrize("left_out", LEFT_OUT, ids=lambda names: "-".join(sorted(names)))
def test_the_core_does_without(left_out: set[str], tmp_path: Path) -> None:
    copy = tmp_path / "installed" / "drawbar"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__", *left_out))
    (tmp_path / "project").mkdir()
    project = make_project(tmp_path / "project")
    # behind the copy, the folder that may hold the entry points; its package is not found any more
    environment = {**os.environ, "PYTHONPATH": f"{copy.parent}{os.pathsep}{PACKAGE.parent}"}

    def run(*arguments: str) -> str:
        command = [sys.executable, "-m", "drawbar", *arguments]
        done = subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        assert "warning: the command" not in done.stderr
        return done.stdout

    commands = run("--help").partition("Examples:")[0]
    for name, guest in guests_by_command().items():
        assert (f"\n  {name} " in commands) == (guest not in left_out)
    if left_out == {"jobs"}:
        run("train", "config.yaml", "train.steps=4")
        run("report", "runs/tiny")
    if left_out != set(GUESTS):
        return
    run("train", "config.yaml", "train.steps=4", "launch.nproc=2")
    run("train", "config.yaml", "train.steps=6")
    run("eval", "runs/tiny")
    run("generate", "runs/tiny", "--prompt", "a")
    assert "tiny" in run("runs")
    assert "complete at step 6/6" in run("watch", "runs/tiny")
    run("checkpoint", "verify", "runs/tiny")
