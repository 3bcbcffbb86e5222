"""Stopping by signal."""

import os
import signal
import threading
import time
from contextlib import suppress
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from drawbar.distributed.interrupt import ECHO_SECONDS
from drawbar.distributed.process_group import Distributed
from drawbar.distributed.rank_info import RankInfo
from drawbar.errors import ExitCode, UserError
from drawbar.train.stop import Reason, Stop
from exhaustive import some
from harness import run_ranks


@pytest.fixture
def stop() -> Stop:
    return Stop(Distributed(RankInfo(), torch.device("cpu"), timeout=60))


@pytest.mark.parametrize(
    ("number", "reason", "code"),
    [
        (signal.SIGTERM, Reason.REQUEUE, 75),
        (signal.SIGUSR1, Reason.REQUEUE, 75),
        (signal.SIGINT, Reason.INTERRUPTED, 130),
        (signal.SIGHUP, Reason.INTERRUPTED, 130),
    ],
)
def test_a_signal_asks_for_a_stop(stop: Stop, number: signal.Signals, reason: Reason, code: int) -> None:
    before = signal.getsignal(number)
    with stop:
        stop.begin()
        assert not stop.agree()
        os.kill(os.getpid(), number)
        assert stop.agree()
        assert (stop.reason, stop.exit_code) == (reason, code)
    assert signal.getsignal(number) == before


def test_nohup_is_heeded(stop: Stop) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop:
            stop.begin()
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.agree()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(
    ("own", "other", "agreed", "stops"),
    [
        ([], Reason.SAVE, Reason.SAVE, False),  # another rank's callback asked for a checkpoint
        ([Reason.SAVE], Reason.NONE, Reason.SAVE, False),
        ([Reason.SAVE], Reason.CALLBACK, Reason.CALLBACK, True),  # the end saves as well
        ([Reason.CALLBACK], Reason.NONE, Reason.CALLBACK, True),
        ([Reason.EARLY, Reason.SAVE], Reason.REQUEUE, Reason.REQUEUE, True),
    ],
)
def test_what_one_rank_wants_all_ranks_do(
    stop: Stop, own: list[Reason], other: Reason, agreed: Reason, stops: bool, monkeypatch: pytest.MonkeyPatch
) -> None:

    def with_other(_: Distributed, values: list[float]) -> list[float]:
        counts, wishes = values[: -len(Reason)], values[-len(Reason) :]
        return [2 * count for count in counts] + [
            wish + (reason is other) for wish, reason in zip(wishes, Reason, strict=True)
        ]

    monkeypatch.setattr(Distributed, "sum_all", with_other)
    for reason in own:
        stop.request(reason)
    assert stop.agree_and_sum(3.0, 5.0) == [6.0, 10.0]
    assert stop.has_agreed == stops
    assert stop.reason == agreed
    monkeypatch.setattr(Distributed, "sum_all", lambda _, values: values)
    assert stop.agree() == any(reason > Reason.SAVE for reason in own)  # a checkpoint is asked for once


def test_what_failed_on_one_rank_is_raised_on_all(stop: Stop, monkeypatch: pytest.MonkeyPatch) -> None:
    assert stop.failure() is None
    other = UserError("the callback Mine.on_step on rank 1 failed", remedy="correct it")
    monkeypatch.setattr(Distributed, "all_gather", lambda _, own: [own, other])
    assert stop.failure() is other
    stop.fail(own := UserError("the evaluation failed", remedy="correct it"))
    stop.fail(UserError("and then more", remedy="correct it"))
    assert stop.failure() is own


@pytest.mark.parametrize(("number", "launcher"), some([("SIGTERM", False), ("SIGINT", True), ("SIGINT", False)], 1))
def test_a_second_signal_ends_the_process(number: str, launcher: bool) -> None:
    """Unless it is the same one: schedulers and launchers pass on what others were told, too."""
    run_ranks(be_told_twice, 1, number, launcher, env={"TORCHELASTIC_RUN_ID": "1"} if launcher else {})


def be_told_twice(name: str, launcher: bool) -> None:
    for patience, is_echo in ((0.0, launcher or name == "SIGTERM"), (ECHO_SECONDS, False)):
        child = os.fork()
        if child == 0:
            with Stop(Distributed(RankInfo(), torch.device("cpu"), timeout=60)) as stop:
                stop.begin()
                os.kill(os.getpid(), signal.Signals[name])
                time.sleep(patience)
                os.kill(os.getpid(), signal.Signals[name])
                os._exit(stop.agree())
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == (1 if is_echo else -signal.Signals[name])


@pytest.mark.parametrize("is_told_twice", some([False, True], 1))
def test_signals_are_taken_while_the_main_thread_is_inside_a_call(is_told_twice: bool) -> None:
    run_ranks(be_told_inside_a_call, 1, is_told_twice)


def be_told_inside_a_call(is_told_twice: bool) -> None:
    """A first signal asks for a stop, once; a second one ends the process, which waits in C++."""
    child = os.fork()
    if child == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        with Stop(Distributed(RankInfo(), torch.device("cpu"), timeout=60)) as stop:
            stop.begin()
            for seconds in (0.1, 0.2) if is_told_twice else (0.1,):
                threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT)).start()
            seen: list[bool] = []
            threading.Timer(2.5, lambda: seen.append(stop.wanted)).start()
            with suppress(dist.DistError):
                store.wait(["nobody sets it"], timedelta(seconds=4))
            os._exit(0 if seen == [True] and stop.agree() and stop.reason is Reason.INTERRUPTED else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == (128 + signal.SIGINT if is_told_twice else 0)


def test_the_most_pressing_reason_wins(stop: Stop) -> None:
    assert stop.exit_code == ExitCode.DONE
    for reason in (Reason.EARLY, Reason.INTERRUPTED, Reason.REQUEUE):
        stop.request(reason)
    assert stop.agree()
    assert stop.reason is Reason.INTERRUPTED


def test_an_early_stop_is_no_failure(stop: Stop) -> None:
    stop.request(Reason.EARLY)
    assert stop.agree()
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
