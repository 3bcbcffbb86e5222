"""Threads sleep at once while they wait for cores, and spin again when it is quiet; a person is told once."""

import threading

import pytest
import torch

from drawbar.train.callbacks import core_wait
from runs import Fit

POOL = "drawbar-sleep-at-once"


def pools() -> int:
    return sum(thread.name == POOL for thread in threading.enumerate())


@pytest.fixture(autouse=True)
def _windows_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_wait, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(core_wait, "WARN_SECONDS", 0.0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)


@pytest.mark.parametrize(("share", "told"), [(0.6, 1), (0.05, 0)])
def test_a_run_says_once_that_its_threads_wait(
    share: float, told: int, fit: Fit, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = pools()
    monkeypatch.setattr(core_wait.CoreWait, "share", lambda self: share)
    fit()
    assert capfd.readouterr().err.count("one of them for 60% of the time") == told
    assert pools() == before


@pytest.mark.exhaustive
def test_threads_sleep_at_once_until_it_is_quiet_again(monkeypatch: pytest.MonkeyPatch) -> None:
    shares = iter([0.01, 0.5, 0.4, *[0.01] * core_wait.QUIET_WINDOWS, 0.01])
    monkeypatch.setattr(core_wait.CoreWait, "share", lambda self: next(shares))
    callback, sleeping = core_wait.CoreWaitCallback(), []
    before = pools()
    for _ in range(3 + core_wait.QUIET_WINDOWS):
        callback.on_step(None, None)  # type: ignore[arg-type] # it looks at neither
        sleeping.append(callback._sleep._ended is not None)
    assert sleeping == [False, *[True] * (1 + core_wait.QUIET_WINDOWS), False]
    for thread in threading.enumerate():
        if thread.name == POOL and pools() > before:
            thread.join(10)
    assert pools() == before
