"""Warns when the threads of a CPU run share their cores with other programs."""

import time

import torch

from drawbar.runtime.log import logger
from drawbar.threads import CoreWait
from drawbar.train.callback import Callback, RunHandle
from drawbar.train.step import StepInfo

SECONDS = 30.0
"""The length of the measuring window: contention of a few seconds does not matter."""
LARGE_SHARE = 0.2
"""The fraction of time spent waiting for a core above which to warn; on an idle machine it is about 0.01."""


class CoreWaitCallback(Callback):
    """Warns once. For CPU runs with several threads: there, one delayed thread holds up all others."""

    def __init__(self) -> None:
        self._wait = CoreWait()
        self._next = time.monotonic() + SECONDS

    def on_step(self, run: RunHandle, info: StepInfo) -> None:
        if time.monotonic() < self._next:
            return
        share = self._wait.share()
        self._next = time.monotonic() + SECONDS
        if share > LARGE_SHARE:
            self._next = float("inf")
            logger.warning(
                "a thread of this process waited for a core for %.0f%% of the last %.0f s, and its other threads for "
                "that thread: other programs or ranks use the cores of this machine. This process has %d threads; "
                "fewer may be faster: OMP_NUM_THREADS=%d",
                100 * share, SECONDS, torch.get_num_threads(), max(1, torch.get_num_threads() // 2),
            )  # fmt: skip
