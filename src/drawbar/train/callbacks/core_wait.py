"""Lets the threads of a CPU run sleep at once while they share their cores with other programs; warns of it, too."""

import time

import torch

from drawbar.runtime.log import logger
from drawbar.threads import CoreWait, SleepAtOnce
from drawbar.train.callback import Callback, RunHandle
from drawbar.train.step import StepInfo

LOOK_SECONDS = 1.0
"""The length of a measuring window; a step may be longer."""
LARGE_SHARE = 0.1
"""The fraction of a window spent waiting for a core above which threads had better sleep than spin; on an idle machine
it is about 0.01."""
QUIET_WINDOWS = 5
"""Windows below that fraction, one after another, after which threads spin again."""
WARN_SECONDS = 30.0
"""How long it lasts until a person is told."""


class CoreWaitCallback(Callback):
    """For CPU runs with several threads: there, one delayed thread holds up all others. Warns once.

    Threads that wait by spinning are the fastest on a machine of one's own, and several times slower beside another
    program, which then waits for their core as they wait for its: which of both it is shows while the run trains.
    """

    def __init__(self) -> None:
        self._wait, self._sleep = CoreWait(), SleepAtOnce()
        self._next = time.monotonic() + LOOK_SECONDS
        self._quiet = 0
        self._busy_since: float | None = None
        self._warned = False

    def on_step(self, run: RunHandle, info: StepInfo) -> None:
        now = time.monotonic()
        if now < self._next:
            return
        share = self._wait.share()
        self._next = now + LOOK_SECONDS
        if share > LARGE_SHARE:
            self._quiet = 0
            self._sleep.begin()
            self._busy_since = self._busy_since or now
            if now - self._busy_since >= WARN_SECONDS and not self._warned:
                self._warned = True
                _warn(share)
            return
        self._quiet += 1
        if self._quiet == QUIET_WINDOWS:
            self._busy_since = None
            self._sleep.end()

    def on_train_end(self, run: RunHandle) -> None:
        self._sleep.end()


def _warn(share: float) -> None:
    logger.warning(
        "for %.0f s, threads of this process have waited for cores (one of them for %.0f%% of the time), and others "
        "for them: other programs or ranks use the cores of this machine. This process has %d threads; fewer may be "
        "faster: OMP_NUM_THREADS=%d",
        WARN_SECONDS, 100 * share, torch.get_num_threads(), max(1, torch.get_num_threads() // 2),
    )  # fmt: skip
