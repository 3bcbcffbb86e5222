"""Stopping by signal."""

import os
import signal
import threading

import pytest
import torch

from drawbar.errors import ExitCode
from drawbar.runtime.dist import World
from drawbar.runtime.env import Place
from drawbar.train.stop import Reason, Stop


@pytest.fixture
def stop() -> Stop:
    return Stop(World(Place(), torch.device("cpu"), timeout=60))


@pytest.mark.parametrize(
    ("number", "reason", "code"),
    [
        (signal.SIGTERM, Reason.REQUEUE, 75),
        (signal.SIGUSR1, Reason.REQUEUE, 75),
        (signal.SIGINT, Reason.INTERRUPTED, 130),
    ],
)
def test_a_signal_asks_for_a_stop(stop: Stop, number: signal.Signals, reason: Reason, code: int) -> None:
    before = signal.getsignal(number)
    with stop:
        assert not stop.agreed()
        os.kill(os.getpid(), number)
        assert stop.agreed()
        assert (stop.reason, stop.exit_code) == (reason, code)
        assert signal.getsignal(number) == signal.SIG_DFL  # a second one ends the process
    assert signal.getsignal(number) == before


def test_the_most_pressing_reason_wins(stop: Stop) -> None:
    assert stop.exit_code == ExitCode.DONE
    for reason in (Reason.EARLY, Reason.INTERRUPTED, Reason.REQUEUE):
        stop.request(reason)
    assert stop.agreed()
    assert stop.reason is Reason.INTERRUPTED


def test_an_early_stop_is_no_failure(stop: Stop) -> None:
    stop.request(Reason.EARLY)
    assert stop.agreed()
    assert stop.exit_code == ExitCode.DONE


def test_a_thread_cannot_catch_signals_and_need_not(stop: Stop) -> None:
    before = signal.getsignal(signal.SIGTERM)
    found = []

    def train() -> None:
        with stop:
            found.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert found == [before]
