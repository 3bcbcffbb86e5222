"""``drawbar watch``: a run that trains elsewhere, on a terminal and in a pipe; and every way in which it ends."""

import fcntl
import json
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path

import pyte
import pytest

from drawbar.jobs.records import JobEnd, JobRecord, append_records
from drawbar.tracking.run_view import RunState, write_run_status
from drawbar.util.run_dir import LOCK_FILE
from harness import Finished, run_cli, start_cli, wait_until
from messages import check_one_message

SECONDS = 300  # the machine may be busy


class Screen:
    """``drawbar watch`` on a terminal of so many columns, as a person sees it."""

    def __init__(self, folder: Path, columns: int, *arguments: str) -> None:
        self.screen = pyte.Screen(columns, 24)
        stream = pyte.ByteStream(self.screen)
        self.pid, self._terminal = pty.fork()
        if self.pid == 0:
            os.chdir(folder)
            os.environ["TERM"] = "xterm-256color"
            for name in ("COLUMNS", "LINES"):  # rich believes them before the terminal
                os.environ.pop(name, None)
            os.execv(sys.executable, [sys.executable, "-m", "drawbar", "watch", *arguments])
        self.resize(columns)

        def read() -> None:
            while True:
                try:
                    stream.feed(os.read(self._terminal, 65536))
                except OSError:  # the other side is closed
                    return

        self._reader = threading.Thread(target=read, daemon=True)
        self._reader.start()

    def resize(self, columns: int) -> None:
        fcntl.ioctl(self._terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        self.screen.resize(columns=columns)

    @property
    def text(self) -> str:
        return "\n".join(line.rstrip() for line in self.screen.display if line.strip())

    def wait_for(self, text: str) -> str:
        return wait_until(
            lambda: self.text if text in self.text else None, lambda: f"{text!r} in\n{self.text}", SECONDS
        )

    def press_ctrl_c(self) -> None:
        os.write(self._terminal, b"\x03")

    def end(self) -> int:
        """The exit code."""
        _, status = os.waitpid(self.pid, 0)
        self._reader.join(10)
        os.close(self._terminal)
        return os.waitstatus_to_exitcode(status)


def test_a_run_while_it_trains(project: Path, tmp_path: Path) -> None:
    """On two terminals, of which one becomes narrower, and in a pipe, which sees the end."""
    output = tmp_path / "output"
    output.mkdir()
    narrow = Screen(project, 48, "runs/tiny", "--wait", str(SECONDS))  # it waits for the run
    training = start_cli("train", "config.yaml", "train.steps=100000", cwd=project, output=output)
    narrow.wait_for("best  loss")
    wide = Screen(project, 120, "runs/tiny")
    piped = subprocess.Popen(
        [sys.executable, "-m", "drawbar", "watch", "runs/tiny"], cwd=project, stdout=subprocess.PIPE, text=True
    )
    assert piped.stdout is not None
    assert piped.stdout.readline().startswith("tiny: training on ")
    shown = wide.wait_for("left")
    for word in (
        "tiny training",
        "/100,000",
        "loss ",
        "lr ",
        "tok/s",
        "memory ",
        "GiB",
        "evaluation",
        "best",
        "checkpoint",
    ):
        assert word in shown, shown
    wide.resize(50)
    wide.wait_for("\nprogress  step ")  # the labels have no column of their own any more
    for screen in (wide, narrow):
        screen.press_ctrl_c()
        assert screen.end() == 0
    assert training.is_alive()

    os.kill(training.pid or 0, signal.SIGTERM)
    training.join()
    lines = piped.stdout.read().splitlines()
    assert piped.wait() == 1
    assert any(line.startswith("step ") and "loss" in line and line.endswith("left") for line in lines)
    assert any("validation  loss" in line for line in lines)
    assert lines[-1].startswith("tiny: stopped at step ")
    assert "\x1b" not in "".join(lines)
    # what has ended is shown once
    again = Screen(project, 100, "runs/tiny")
    assert "stopped at step" in again.wait_for("is not training now")
    assert again.end() == 1


def make_run(folder: Path, state: RunState | None, ago: float = 1.0, host: str = "gpu7") -> Path:
    folder.mkdir()
    (folder / "config.yaml").write_text("train: {steps: 20}\n")
    line = {"step": 10, "time": time.time() - ago, "train/loss": 2.5}
    (folder / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    (folder / LOCK_FILE).write_text(f"process 4194305 on {host}\n")  # more than any process's number
    if state is not None:
        write_run_status(folder, state, 10, 20, started=0.0)
    return folder


def submit(folder: Path, number: str = "7", sweep: str | None = None) -> JobRecord:
    place = {name: str(folder / name) for name in ("workdir", "log", "script")}
    job = JobRecord(
        number, time.time(), folder.name, str(folder), **place,
        nodes=1, processes=1, arguments=(), launcher="ssh", sweep=sweep,
    )  # fmt: skip
    append_records([job])
    return job


def watch(folder: Path, *arguments: str) -> Finished:
    return run_cli("watch", *arguments, cwd=folder)


@pytest.mark.parametrize(
    ("state", "ago", "code", "says"),
    [
        ("complete", 1.0, 0, "complete at step 10/20"),
        ("stopped", 1.0, 1, "stopped at step 10/20: it has saved"),
        ("failed", 1.0, 1, "failed at step 10/20: its log says why"),
        ("training", 3600.0, 1, "dead at step 10/20: its process is gone"),
    ],
)
def test_a_run_that_has_ended(tmp_path: Path, state: RunState, ago: float, code: int, says: str) -> None:
    make_run(tmp_path / "demo", state, ago)
    if state == "training":  # its status is as old as its metrics
        status = json.loads((tmp_path / "demo" / "status.json").read_text())
        (tmp_path / "demo" / "status.json").write_text(json.dumps(status | {"time": status["time"] - ago}))
    done = watch(tmp_path, "demo")
    assert done.code == code, done.err
    assert done.out.splitlines()[0] == "step 10/20  loss 2.500"
    assert says in done.out.splitlines()[-1]


def test_a_process_that_was_killed_on_this_machine_is_missed_at_once(tmp_path: Path) -> None:
    make_run(tmp_path / "demo", "training", host=os.uname().nodename)
    done = watch(tmp_path, "demo")
    assert done.code == 1
    assert "dead at step 10/20" in done.out


def test_a_job_that_ended_before_its_run_began(tmp_path: Path) -> None:
    job = submit(tmp_path / "queued")
    JobEnd(1, time.time()).write(job.end_file)
    done = watch(tmp_path, "queued")
    assert done.code == 1
    assert "its job has ended, and the run has not begun; job 7: FAILED exit code 1: failed" in done.out


def test_a_run_that_is_not_there(tmp_path: Path) -> None:
    make_run(tmp_path / "demo", "complete")
    done = watch(tmp_path, "dmeo", "--wait", "0.2")
    assert done.code == 2
    assert "dmeo has not begun: waiting for it, up to 0s; did you mean" in done.err
    check_one_message(done.err.partition("\n")[2], "dmeo has not begun within", f"did you mean {tmp_path / 'demo'}?")


def test_a_sweep_is_no_run(tmp_path: Path) -> None:
    place = {name: str(tmp_path / "sweep" / name) for name in ("workdir", "log", "script")}
    jobs = [
        JobRecord(
            f"900_{index}", 1.0, f"lr-{index}", str(tmp_path / f"lr-{index}"), **place,
            nodes=1, processes=1, arguments=(), launcher="slurm", sweep="sweep",
        )
        for index in range(2)
    ]  # fmt: skip
    append_records(jobs)
    done = watch(tmp_path, "900")
    assert done.code == 2
    check_one_message(done.err, "900 is a sweep of 2 runs", "lr-0")


def test_it_needs_no_torch(tmp_path: Path) -> None:
    make_run(tmp_path / "demo", "complete")
    script = "import sys; from drawbar.cli import group; group.main(['watch', 'demo'], standalone_mode=False); "
    command = [sys.executable, "-c", script + "print('torch' in sys.modules)"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.endswith("False\n")
