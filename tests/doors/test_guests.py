"""The core knows none of its guests: an installed copy without their folders still trains, evaluates and resumes."""

import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

import pytest

import drawbar
from conftest import make_project

PACKAGE = Path(drawbar.__file__).parent
INSTALLED = distribution("drawbar")
GUESTS = {
    "convert": {"convert"},
    "deepspeed": {"deepspeed"},
    "imports": {"imports"},
    "jobs": {"jobs"},
    "parity": {"parity", "plan"},
    "plan": {"plan"},
    "report": {"report", "parity", "plan"},
}
"""Each, and what goes with it: the guests that use it."""
WITHOUT_COMMAND = {"deepspeed"}
LEFT_OUT = [*GUESTS.values(), set(GUESTS)]


def commands_of(guest: str) -> set[str]:
    points = [point for point in INSTALLED.entry_points if point.group == "drawbar.commands"]
    return {point.name for point in points if point.module.split(".")[1] == guest}


def test_every_guest_enters_by_an_entry_point() -> None:
    points = [point for point in INSTALLED.entry_points if point.group.startswith("drawbar.")]
    assert {point.module.split(".")[1] for point in points} == set(GUESTS)
    assert {guest for guest in GUESTS if not commands_of(guest)} == WITHOUT_COMMAND
    assert commands_of("jobs") == {"submit", "jobs", "status", "cancel", "resume", "logs", "doctor"}
    sources = [path for path in PACKAGE.rglob("*.py") if path.relative_to(PACKAGE).parts[0] not in GUESTS]
    knowing = [path for path in sources if re.search(rf"drawbar\.({'|'.join(GUESTS)})\b", path.read_text("utf-8"))]
    assert knowing == []


def test_a_guests_command_may_be_imported_first() -> None:
    script = "import drawbar.plan.command, drawbar.cli as cli; assert 'plan' in cli.group.commands"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.exhaustive
@pytest.mark.parametrize("left_out", LEFT_OUT, ids=lambda names: "-".join(sorted(names)))
def test_the_core_does_without(left_out: set[str], tmp_path: Path) -> None:
    copy = tmp_path / "installed" / "drawbar"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__", *left_out))
    metadata = Path(str(INSTALLED._path))
    shutil.copytree(metadata, copy.parent / metadata.name)
    (tmp_path / "project").mkdir()
    project = make_project(tmp_path / "project")
    environment = {**os.environ, "PYTHONPATH": str(copy.parent)}

    def run(*arguments: str, code: int = 0) -> str:
        command = [sys.executable, "-m", "drawbar", *arguments]
        done = subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == code, done.stderr
        assert "cannot be imported" not in done.stderr
        return done.stdout if code == 0 else done.stderr

    commands = run("--help").partition("Examples:")[0]
    for guest in GUESTS:
        for name in commands_of(guest):
            assert (f"\n  {name} " in commands) == (guest not in left_out)
    assert ("--deepspeed" in run("config", "show", "--help")) == ("deepspeed" not in left_out)
    settings = run("config", "show", "config.yaml")
    assert ("cluster:" in settings) == ("jobs" not in left_out)
    if "deepspeed" not in left_out:
        assert "deepspeed:" in settings
        if left_out == {"jobs"}:
            shutil.copytree(PACKAGE / "jobs", copy / "jobs")
            run("train", "config.yaml", "train.steps=4", "launch.nproc=2")
            shutil.rmtree(copy / "jobs")  # the run goes on without it
            run("train", "config.yaml", "train.steps=6")
            run("report", "runs/tiny")
        return
    assert "deepspeed" not in settings
    assert "parallel.strategy" in run("config", "explain", "parallel.strategy")
    said = run("train", "config.yaml", "parallel.strategy=deepspeed", code=2)
    assert "expected auto | single | dp | ddp | zero1 | fsdp | text" in said
    said = run("train", "config.yaml", "deepspeed.preset=zero2", code=2)
    assert "deepspeed: unknown key: drawbar was installed without its folder deepspeed" in said
    if "convert" not in left_out:
        assert "[dcp|huggingface]" in run("convert", "--help")
    run("train", "config.yaml", "train.steps=4", "launch.nproc=2")
    run("train", "config.yaml", "train.steps=6")
    run("eval", "runs/tiny")
    run("generate", "runs/tiny", "--prompt", "a")
    assert "tiny" in run("runs")
    assert "complete at step 6/6" in run("watch", "runs/tiny")
    run("checkpoint", "verify", "runs/tiny")
