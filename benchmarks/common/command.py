"""Run the program as users do, and look at it from outside: its memory, what it reads, when it logs a step."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common.fresh_process import ROOT, MeasurementFailed, plain_environment

DRAWBAR = [sys.executable, "-m", "drawbar"]


@dataclass
class Watched:
    """What a command and all processes below it came to."""

    seconds: float
    memory: int
    """Bytes that the largest process had at its highest."""
    read: int
    """Bytes that all of them read, from files of any kind."""


def watch(command: Sequence[str], folder: Path) -> Watched:
    """Run a command to its end, and look again and again at all processes below it. Linux alone.

    Raises:
        MeasurementFailed: it fails.
    """
    started = time.perf_counter()
    memory: dict[int, int] = {}
    process = _start(command, folder)
    while not os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
        for pid in _below(process.pid):
            memory[pid] = max(memory.get(pid, 0), 1024 * _number(pid, "status", "VmHWM:"))
        time.sleep(0.02)
    read = _number(process.pid, "io", "rchar:")  # with that of all below it, as each was waited for
    process.wait()
    _check(process, command, folder)
    return Watched(time.perf_counter() - started, max(memory.values()), read)


def seconds_to_step(command: Sequence[str], run_dir: Path, folder: Path, step: int, kill_after: bool = False) -> float:
    """Seconds from the start of a command to the end of a training step, by the run's own log of that time.

    Args:
        step: the first one that this process makes, or a later one.
        kill_after: kill it then, as a crash would; else wait for its end.
    """
    started, metrics = time.time(), run_dir / "metrics.jsonl"
    process = _start(command, folder)
    try:
        while (at := _logged_at(metrics, step, started)) is None:
            if process.poll() is not None and _logged_at(metrics, step, started) is None:
                process.returncode = process.returncode or 1  # it ended before that step
                _check(process, command, folder)
            time.sleep(0.01)
        if not kill_after:
            process.wait()
            _check(process, command, folder)
        return at - started
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def end_of_failing(command: Sequence[str], folder: Path) -> float:
    """``time.time()`` at the end of a command that fails.

    Raises:
        MeasurementFailed: it does not fail.
    """
    process = _start(command, folder)
    if process.wait() == 0:
        raise MeasurementFailed(f"{' '.join(command)} did not fail")
    return time.time()


def _start(command: Sequence[str], folder: Path) -> subprocess.Popen[bytes]:
    with (folder / "log.txt").open("ab") as log:
        return subprocess.Popen(
            command, cwd=ROOT, stdout=log, stderr=log, env=plain_environment(), start_new_session=True
        )


def _check(process: subprocess.Popen[bytes], command: Sequence[str], folder: Path) -> None:
    if process.returncode:
        raise MeasurementFailed(f"{' '.join(command)} failed:\n{(folder / 'log.txt').read_text()[-3000:]}")


def _logged_at(metrics: Path, step: int, since: float) -> float | None:
    """When a step was logged by a process that was started at ``since``."""
    if not metrics.exists():
        return None
    lines = [json.loads(line) for line in metrics.read_text().splitlines(keepends=True) if line.endswith("\n")]
    times = [line["time"] for line in lines if line["step"] >= step and line["time"] > since and "train/loss" in line]
    return times[0] if times else None


def _below(pid: int) -> list[int]:
    """A process and all that it started, at any depth."""
    found = [pid]
    for parent in found:
        with suppress(OSError):  # it has ended
            tasks = list(Path(f"/proc/{parent}/task").iterdir())
            found += [int(child) for task in tasks for child in (task / "children").read_text().split()]
    return found


def _number(pid: int, file: str, key: str) -> int:
    """A number of ``/proc``; 0 where the process has ended."""
    try:
        lines = Path(f"/proc/{pid}/{file}").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(key)), 0)
