"""Lets the threads of a CPU run sleep instead of spin while they share cores with other programs, and warns of it."""

import time

import torch

from drawbar.runtime.log import logger
from drawbar.threads import CoreWait, SleepAtOnce
from drawbar.train.callback import Callback, RunHandle
from drawbar.train.step import StepInfo

LOOK_SECONDS = 1.0
"""Length of a measuring window; a step may be longer."""
LARGE_SHARE = 0.1
"""Fraction of a window spent waiting for a core above which threads should sleep rather than spin; about 0.01 on an
idle machine."""
QUIET_WINDOWS = 5
"""Number of consecutive windows below that fraction after which threads spin again."""
WARN_SECONDS = 30.0
"""How long the contention must last before a warning."""


class CoreWaitCallback(Callback):
    """For CPU runs with several threads, where one delayed thread holds up all others. Warns once.

    Spinning is the fastest way to wait on an otherwise idle machine, and several times slower beside another program,
    since each then waits for the other's core. Which case applies only shows during training.
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
        "for %.0f s, threads of this process have been waiting for cores (one of them for %.0f%% of the time) and "
        "delaying others: other programs or ranks use this machine's cores. This process has %d threads; fewer may be "
        "faster: OMP_NUM_THREADS=%d",
        WARN_SECONDS, 100 * share, torch.get_num_threads(), max(1, torch.get_num_threads() // 2),
    )  # fmt: skip
