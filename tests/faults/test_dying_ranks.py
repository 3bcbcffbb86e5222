"""When one rank dies the run ends within 10 s with a non-zero code, naming the rank and its own error first."""

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from conftest import make_project
from exhaustive import some
from harness import run_cli, start_cli

SECONDS_TO_END = 10
DOOMED = '''
import os, signal, time
import drawbar

FATE = os.environ["FATE"]
RANK = int(os.environ.get("RANK", -1))  # the launcher has none


class Doomed(drawbar.CausalLM):
    """causal_lm that meets its fate at its third step, or at its first evaluation."""

    def __init__(self, run_config):
        super().__init__(run_config)
        self.forwards = 0
        with open(f"process-{RANK}", "w") as file:
            file.write(str(os.getpid()))

    def build_model(self):
        if FATE == "raises beside a rank that writes":
            write_slowly()
        if FATE == "cannot start":
            raise drawbar.UserError("planted", remedy="pull it out")
        return super().build_model()

    def forward(self, model, batch):
        self.forwards += model.training
        if self.forwards == 3:
            if FATE == "raises in evaluation":
                if RANK == 0 and not model.training:
                    die()
            elif FATE == "long step" or ("beside" in FATE and RANK == 0):
                if FATE == "raises beside a deaf rank":  # as one whose main thread waits for a GPU
                    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
                open(f"in-long-step-{RANK}", "w").close()
                time.sleep(60)
            elif RANK == 1:
                while "beside" in FATE and not os.path.exists("in-long-step-0"):
                    time.sleep(0.01)
                die()
        return super().forward(model, batch)


def write_slowly():
    """Longer than a rank has when another one is gone."""
    from drawbar.checkpoint.directory import CheckpointDirectory

    write = CheckpointDirectory.write

    def written(self, snapshot):
        time.sleep(5)
        write(self, snapshot)

    CheckpointDirectory.write = written


def die():
    with open("death", "w") as file:
        file.write(repr(time.time()))
    if FATE == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if FATE == "exits":
        os._exit(7)
    raise ValueError("planted")
'''
SETTINGS = ("task.type=doomed:Doomed", "train.micro_batch=4", "eval.every=3")
COMMAND = ("train", "config.yaml", *SETTINGS, "launch.nproc=2")


@pytest.fixture
def doomed(tmp_path: Path) -> Path:
    """A project whose task dies."""
    project = make_project(tmp_path)
    (project / "doomed.py").write_text(DOOMED)
    return project


@dataclass(frozen=True)
class End:
    """How a run ended."""

    code: int
    err: str
    seconds: float
    """Since the rank died."""


def end_of(project: Path, fate: str) -> End:
    done = run_cli(*COMMAND, cwd=project, env={"FATE": fate})
    return End(done.code, done.err, time.time() - float((project / "death").read_text()))


def errors(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("error:")]


def ranks(project: Path) -> list[int]:
    return [int((project / f"process-{rank}").read_text()) for rank in range(2)]


def check_gone(processes: list[int], patience: float = 0.0) -> None:
    """None of ``processes`` runs ``patience`` seconds from now."""
    end = time.monotonic() + patience
    while (left := [process for process in processes if runs(process)]) and time.monotonic() < end:
        time.sleep(0.02)
    assert not left


def runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(process)], capture_output=True, text=True).stdout
    return bool(state.strip()) and not state.startswith("Z")  # its new parent has yet to collect it


def start(project: Path, output: Path) -> BaseProcess:
    """A run whose ranks are both in a long step."""
    process = start_cli(*COMMAND, cwd=project, output=output, env={"FATE": "long step"})
    while not all((project / f"in-long-step-{rank}").exists() for rank in range(2)):
        assert process.is_alive(), (output / "0.err").read_text()
        time.sleep(0.02)
    return process


@pytest.mark.parametrize(
    ("fate", "error"),
    some(
        [
            (
                "raises beside a deaf rank",
                ": Doomed.forward fails: ValueError: planted",
            ),
            (
                "raises in evaluation",
                ": the evaluation failed on rank 0: ValueError: planted",
            ),
            ("killed", " was killed by SIGKILL"),
            ("exits", " ended with exit code 7 and no message"),
        ],
        2,
    ),
)
def test_a_rank_that_dies_ends_the_run(doomed: Path, fate: str, error: str) -> None:
    end = end_of(doomed, fate)
    assert end.code == 1
    [told] = errors(end.err)
    who = "rank [01]" if "evaluation" in fate else "rank 1"
    assert re.fullmatch(
        rf"error: {who} \(step 3, [a-z ]+\){error}", told
    )  # and not that the other one lost its connection
    assert end.seconds < SECONDS_TO_END
    check_gone(ranks(doomed))


def test_a_save_that_has_begun_is_finished_where_another_rank_dies(doomed: Path) -> None:
    done = run_cli(*COMMAND, "checkpoint.every=2", cwd=doomed, env={"FATE": "raises beside a rank that writes"})
    assert errors(done.err) == ["error: rank 1 (step 3, forward): Doomed.forward fails: ValueError: planted"]
    assert (doomed / "runs/tiny/checkpoints/step-00000002/manifest.json").exists(), done.err
    check_gone(ranks(doomed))


def test_what_no_rank_can_do_is_told_once(doomed: Path) -> None:
    done = run_cli(*COMMAND, cwd=doomed, env={"FATE": "cannot start"})
    assert done.code == 2
    assert errors(done.err) == ["error: planted"]
    assert done.err.count("pull it out") == 1
    assert "Traceback" not in done.err
    assert not (doomed / "runs" / "tiny").exists()
    check_gone(ranks(doomed))


@pytest.mark.exhaustive
def test_torchrun_names_the_rank_that_raised(doomed: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command = [*torchrun, "-m", "drawbar", "train", "config.yaml", *SETTINGS]
    done = subprocess.run(
        command,
        cwd=doomed,
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "FATE": "raises beside a long step"},
    )
    assert done.returncode == 1
    assert time.time() - float((doomed / "death").read_text()) < SECONDS_TO_END
    root_cause = done.stderr.split("Root Cause (first observed failure):")[1]
    assert "rank      : 1 (local_rank: 1)" in root_cause
    assert "ValueError: planted" in root_cause
    assert "saving" not in done.stderr  # the launcher's SIGTERM is no scheduler's
    check_gone(ranks(doomed))


def test_ranks_end_with_a_launcher_that_is_killed(doomed: Path, tmp_path: Path) -> None:
    process = start(doomed, output=tmp_path)
    assert process.pid is not None
    os.killpg(process.pid, signal.SIGKILL)
    process.join()
    check_gone(ranks(doomed), patience=2)


def test_a_second_interrupt_ends_the_run_at_once(doomed: Path, tmp_path: Path) -> None:
    process = start(doomed, output=tmp_path)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGINT)
    process.join(1)
    assert process.is_alive()  # it waits for the step to end
    assert "a second one exits at once" in (tmp_path / "0.err").read_text()
    os.kill(process.pid, signal.SIGINT)
    process.join(SECONDS_TO_END)
    assert process.exitcode == 130
    check_gone(ranks(doomed), patience=2)
    assert not list((doomed / "runs" / "tiny" / "checkpoints").glob("step-*"))


@pytest.mark.exhaustive
def test_a_crash_without_a_launcher_shows_its_line(tmp_path: Path) -> None:
    project = make_project(tmp_path)
    crash = "import ctypes, drawbar\n\nclass Crash(drawbar.Callback):\n    def on_step(self, run, info):\n"
    (project / "crash.py").write_text(f"{crash}        ctypes.string_at(0)\n")
    done = run_cli("train", "config.yaml", "callbacks=[crash:Crash]", cwd=project)
    assert done.code == -signal.SIGSEGV
    assert re.search(r'Current thread .*\n(  File .*\n)+?  File ".*crash\.py", line 5 in on_step', done.err)
