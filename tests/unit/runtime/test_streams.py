"""Standard output and error that nobody reads any more, as behind ``| head``."""

import io
import logging
import os
import subprocess
import sys
from contextlib import chdir, redirect_stdout
from pathlib import Path

import pytest

from conftest import make_project
from drawbar.runtime.log import ignore_output_errors, open_log_file, start_logging
from exhaustive import some
from forked import DRAWBAR, fork_ranks, run_python
from harness import run_ranks


def close_reader(*descriptors: int) -> None:
    """Let these lead into a pipe that nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    for descriptor in descriptors:
        os.dup2(writer, descriptor)
    os.close(writer)


@pytest.mark.parametrize("unbuffered", [False, True])
@pytest.mark.parametrize("closed", [(1,), (2,), (1, 2)], ids=str)
def test_what_is_written_is_dropped_and_said_once(closed: tuple[int, ...], unbuffered: bool, tmp_path: Path) -> None:
    other = tmp_path / "other"
    run_ranks(write_to_nobody, 1, closed, unbuffered, str(tmp_path), str(other))
    log = (tmp_path / "logs" / "rank-0000.log").read_text()
    names = [{1: "standard output", 2: "standard error"}[number] for number in closed]
    for name in names:
        assert log.count(f"WARNING {name} cannot be written (Broken pipe): the run continues without it") == 1
    if len(closed) == 1:
        assert f"warning: {names[0]} cannot be written" in other.read_text()


def write_to_nobody(closed: tuple[int, ...], unbuffered: bool, folder: str, other: str) -> None:
    if len(closed) == 1:
        os.dup2(os.open(other, os.O_WRONLY | os.O_CREAT), 3 - closed[0])
    close_reader(*closed)
    if unbuffered:  # as after `python -u`
        for name, descriptor in (("stdout", 1), ("stderr", 2)):
            raw = open(descriptor, "wb", buffering=0, closefd=False)  # noqa: SIM115
            setattr(sys, name, io.TextIOWrapper(raw, write_through=True))
    ignore_output_errors()
    start_logging(0, logging.StreamHandler())
    open_log_file(Path(folder), 0)
    guarded = sys.stdout, sys.stderr
    ignore_output_errors()
    assert (sys.stdout, sys.stderr) == guarded
    for _ in range(3):
        print("x" * 100_000, flush=True)
        print("y" * 100_000, file=sys.stderr, flush=True)
        subprocess.run(["echo", "from a child"], check=True)


def test_a_stream_that_is_not_that_of_the_process_stays() -> None:
    with redirect_stdout(io.StringIO()) as notebook:
        ignore_output_errors()
        assert sys.stdout is notebook


@pytest.mark.parametrize("processes", some([1, 2], 1))
def test_a_run_goes_on(processes: int, tmp_path: Path) -> None:
    project = make_project(tmp_path)
    command = ("train", "config.yaml", f"launch.nproc={processes}")
    assert run_ranks(run_for_nobody, 1, str(project), (1, 2), command) == [0]
    assert (project / "runs" / "tiny" / "checkpoints" / "step-00000012").is_dir()
    assert "standard output cannot be written" in (project / "runs" / "tiny" / "logs" / "rank-0000.log").read_text()


@pytest.mark.parametrize("command", [("config", "explain", "optim.lr"), ("doctor", "--help"), ("status", "none")])
def test_another_command_ends_without_a_word(command: tuple[str, ...], tmp_path: Path) -> None:
    (code,) = run_ranks(run_for_nobody, 1, str(tmp_path), (1,), command)
    err = (tmp_path / "err").read_text()
    assert code in (1, 2)
    assert "Traceback" not in err
    assert "Broken pipe" not in err


def run_for_nobody(folder: str, closed: tuple[int, ...], command: tuple[str, ...]) -> int:
    """``drawbar COMMAND``; its exit code."""
    child = os.fork()
    if child == 0:
        os.dup2(os.open(f"{folder}/err", os.O_WRONLY | os.O_CREAT), 2)
        close_reader(*closed)
        fork_ranks()
        try:
            with chdir(folder):
                run_python([*DRAWBAR, *command])
        except SystemExit as end:
            sys.stdout.flush()  # as the interpreter does at its end
            os._exit(int(end.code or 0))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
