"""What the launcher makes of what it sees of its ranks, which are real processes here."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from drawbar.config.schema.run_config import LimitsSection
from drawbar.distributed.pulse import PULSE, Kind, Pulse
from drawbar.errors import UserError
from drawbar.launch.observer import Observer, WatchedRank
from drawbar.launch.stacks import Frame
from harness import wait_until

RANK = """
import os, signal, sys, time
from drawbar.distributed import pulse

def stuck():
    if sys.argv[2] == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    while True:
        time.sleep(60) if sys.argv[2] == "sleep" else None

pulse.begin()
pulse.Pulse(1, pulse.Kind(sys.argv[1]), 5, "forward").write()
stuck()
"""
TIMEOUT = 10
Start = Callable[..., WatchedRank]


@pytest.fixture
def observer() -> Observer:
    return Observer(LimitsSection(), TIMEOUT)


@pytest.fixture
def start(observer: Observer, tmp_path: Path) -> Iterator[Start]:
    """Starts a rank that the observer watches, which is in step 5."""
    started = []
    script = tmp_path / "rank.py"
    script.write_text(RANK)

    def start_one(kind: Kind = Kind.STEP, how: str = "sleep") -> WatchedRank:
        pulse = tmp_path / f"{len(started)}.pulse"
        process = subprocess.Popen([sys.executable, script, kind, how], env={PULSE: str(pulse)}, start_new_session=True)
        started.append(process)
        watched = observer.add(len(started) - 1, process.pid, pulse, tmp_path / "no-errors")
        wait_until(lambda: (read := Pulse.read(pulse)) and read.step, "its pulse")
        wait_until(lambda: how != "stop" or watched.is_stopped, "the signal")
        observer.look(0)
        return watched

    yield start_one
    for process in started:
        process.kill()
        process.wait()


def verdict(observer: Observer) -> UserError:
    assert observer.verdict is not None
    return observer.verdict


@pytest.mark.parametrize("how", ["spin", "stop", "sleep"])
def test_a_stuck_rank_is_named_with_its_line_and_killed(how: str, observer: Observer, start: Start) -> None:
    rank = start(how=how)
    observer.look(TIMEOUT)
    assert observer.verdict is None
    observer.look(1)
    assert verdict(observer).what.startswith("rank 0 (step 5, forward) ")
    assert "has made no progress for 11 s" in verdict(observer).what
    assert ("SIGSTOP" in verdict(observer).what) == (how == "stop")
    assert ("launch.limits.step" in str(verdict(observer))) == (how != "stop")
    assert "rank.py, line " in (verdict(observer).where or "")
    assert wait_until(rank.exit_code, "its end") == -signal.SIGKILL


def test_the_rank_that_cannot_be_waiting_is_named(observer: Observer, start: Start) -> None:
    """The first one has been silent for longer, but its innermost call may be a collective."""
    first = start(how="sleep")
    observer.look(1)
    start(how="stop")
    first.file.with_suffix(".stacks").unlink()  # so that nothing shows what it does
    observer.look(TIMEOUT)
    assert verdict(observer).what.startswith("rank 1 (step 5, forward) was stopped")
    assert first.runs


def test_all_stuck_ranks_end(observer: Observer, start: Start) -> None:
    ranks = [start(how="stop"), start(how="stop")]
    for _ in range(2):
        observer.look(TIMEOUT + 1)
    for rank in ranks:
        assert wait_until(rank.exit_code, "its end") == -signal.SIGKILL


def test_a_rank_that_waits_is_not_stuck(observer: Observer, start: Start) -> None:
    rank = start(Kind.WAITING)
    observer.look(1000 * TIMEOUT)
    assert observer.verdict is None
    assert rank.exit_code() is None


def test_a_rank_that_is_stopped_does_not_wait(observer: Observer, start: Start) -> None:
    """Else the launcher would wait for it for ever after a signal, as nobody else ends it."""
    rank = start(Kind.WAITING, how="stop")
    observer.look(TIMEOUT)
    assert observer.verdict is None
    observer.look(1)
    assert verdict(observer).what.startswith("rank 0 (step 5, forward) was stopped")
    assert wait_until(rank.exit_code, "its end") == -signal.SIGKILL


def test_each_kind_of_activity_has_its_limit(observer: Observer) -> None:
    assert observer.limit(Kind.STEP) == TIMEOUT
    assert observer.limit(Kind.CALLBACK) == 3600
    assert observer.limit(Kind.START) == observer.limit(Kind.SAVE) == observer.limit(Kind.ENDED) == 14400
    assert Observer(LimitsSection(step=50, save=20), TIMEOUT).limit(Kind.STEP) == 50


def test_a_rank_that_has_ended_is_not_stuck(observer: Observer, start: Start) -> None:
    """Nobody else looks after a signal, when the launcher waits for its ranks."""
    rank = start()
    rank.send(signal.SIGKILL)
    observer.start()
    wait_until(lambda: not rank.runs, "the observer")
    observer.stop()
    assert rank.end == "by signal 9"
    observer.look(2 * TIMEOUT)
    assert observer.verdict is None


def set_pulse(rank: WatchedRank, changes: int) -> None:
    rank.file.write_bytes(json.dumps(Pulse(changes, Kind.STEP, 5, "forward")).encode())


def test_what_took_long_once_may_take_ten_times_as_long(observer: Observer, start: Start) -> None:
    first, second = start(), start()
    observer.look(8)
    set_pulse(first, 2)
    observer.look(0)
    assert observer.limit(Kind.STEP) == TIMEOUT  # as it may have waited for the second one
    set_pulse(second, 2)
    observer.look(0)
    assert observer.limit(Kind.STEP) == 80


def test_a_rank_that_gets_on_again_was_not_stuck(observer: Observer, start: Start) -> None:
    """While another node may yet name the rank at fault: what was seen then says nothing of the next silence."""
    observer._store = dist.HashStore()  # type: ignore[assignment]
    rank = start(how="sleep")
    rank.file.with_suffix(".stacks").unlink()  # so that it may be waiting
    observer.look(TIMEOUT)
    observer.look(6)  # of the ten seconds that other nodes have
    set_pulse(rank, 2)
    observer.look(0)
    observer.look(observer.limit(Kind.STEP))
    observer.look(6)
    assert observer.verdict is None


def test_only_torchs_own_files_may_wait() -> None:
    assert Frame(dist.__file__, 1, "wait").may_wait
    assert not Frame("/home/ada/torch/train.py", 1, "forward").may_wait


def test_a_process_id_that_may_be_anothers_gets_no_signal(observer: Observer, tmp_path: Path) -> None:
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        sent: list[int] = []
        gone = WatchedRank(0, 1, tmp_path / "pulse", tmp_path / "errors")  # no child of this process
        gone.send(signal.SIGKILL, lambda pid, number: sent.append(pid))
        assert not sent
        WatchedRank(0, other.pid, gone.file, gone.errors).send(0, lambda pid, number: sent.append(pid))
        assert sent == [other.pid]
    finally:
        other.kill()
        other.wait()
