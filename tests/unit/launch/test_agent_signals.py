"""The launcher of ranks hears of a scheduler's signal twice, where Apptainer hands on what it was told, too."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest
from torch.distributed.elastic.metrics import api as timing
from torch.distributed.elastic.multiprocessing.api import SignalException

from drawbar.config.schema.run_config import LimitsSection
from drawbar.launch import agent
from drawbar.launch.observer import Observer, WatchedRank
from harness import run_ranks


@pytest.mark.parametrize(
    ("number", "echo_seconds", "code"),
    [(signal.SIGTERM, 60.0, 0), (signal.SIGUSR1, 60.0, 0), (signal.SIGTERM, 0.0, 143), (signal.SIGINT, 60.0, 130)],
)
def test_an_echo_is_no_second_signal(number: signal.Signals, echo_seconds: float, code: int) -> None:
    """A person's second Ctrl-C never is one."""
    assert run_ranks(be_told_twice, 1, number, echo_seconds) == [code]


def be_told_twice(number: signal.Signals, echo_seconds: float) -> int:
    child = os.fork()
    if child == 0:
        agent.ECHO_SECONDS = echo_seconds
        agent._handle_signals("no-such-folder", Observer(LimitsSection(), timeout=10))
        with pytest.raises(SignalException):
            os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_signal_in_torchs_timing_comes_a_moment_later() -> None:
    """There, an exception becomes an UnboundLocalError of torch's own."""
    assert run_ranks(be_told_in_torchs_timing, 1) == [0]


def be_told_in_torchs_timing() -> int:
    child = os.fork()
    if child == 0:
        agent._handle_signals("no-such-folder", Observer(LimitsSection(), timeout=10))
        told: list[bool] = []

        @timing.prof
        def work() -> None:
            handler = signal.getsignal(signal.SIGINT)
            assert callable(handler)
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # on a busy machine it might come before the note
            handler(signal.SIGINT, sys._getframe(1))
            told.append(True)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
            time.sleep(60)

        with pytest.raises(SignalException):
            work()
        os._exit(0 if told else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_signal_while_the_observer_looks_comes_a_moment_later() -> None:
    """Else the main thread would wait for the ranks with the lock of the observer, which then ends no stuck one."""
    assert run_ranks(be_told_in_the_observer, 1) == [0]


def be_told_in_the_observer() -> int:
    child = os.fork()
    if child == 0:
        observer = Observer(LimitsSection(), timeout=10)
        agent._handle_signals("no-such-folder", observer)
        rank = Told(0, os.getpid(), Path("no-such-pulse"), Path("no-such-errors"))
        observer.note_end(rank, 0)
        with pytest.raises(SignalException):
            time.sleep(60)
        os._exit(0 if rank.end else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


class Told(WatchedRank):
    """A rank at whose end the launcher gets a signal."""

    def look(self, seconds: float) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0)  # Python runs the handler
