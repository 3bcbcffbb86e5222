"""Stopping at a step that every rank agrees on: a signal, or an early stop."""

import os
import signal
import threading
from enum import IntEnum
from types import FrameType, TracebackType
from typing import Any, Self

from drawbar.errors import ExitCode
from drawbar.runtime.dist import World
from drawbar.runtime.log import logger


class Reason(IntEnum):
    """Why a run stops before its last step; where ranks differ, the largest wins."""

    NONE = 0
    EARLY = 1
    """The score stopped getting better."""
    REQUEUE = 2
    """The scheduler wants the machine back (SIGTERM, SIGUSR1)."""
    INTERRUPTED = 3
    """Ctrl-C (SIGINT)."""


_EXIT_CODES = {Reason.REQUEUE: ExitCode.REQUEUE, Reason.INTERRUPTED: ExitCode.INTERRUPTED}
_SIGNALS = {
    signal.SIGTERM: Reason.REQUEUE,
    signal.SIGUSR1: Reason.REQUEUE,
    signal.SIGINT: Reason.INTERRUPTED,
}


class Stop:
    """While it is entered, a first signal asks for a stop after this step; a second one ends the process at once."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._wanted = Reason.NONE
        self.reason = Reason.NONE
        """What all ranks agreed on."""
        self._before: dict[signal.Signals, Any] = {}

    @property
    def exit_code(self) -> ExitCode:
        return _EXIT_CODES.get(self.reason, ExitCode.DONE)

    def request(self, reason: Reason) -> None:
        self._wanted = max(self._wanted, reason)

    def agreed(self) -> bool:
        """Whether any rank wants to stop. Every rank must call it at the same step, and gets the same answer."""
        self.reason = Reason(self._world.largest(self._wanted))
        return self.reason is not Reason.NONE

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # elsewhere Python refuses signal handlers
            for number in _SIGNALS:
                self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        received = signal.Signals(number)
        signal.signal(received, signal.SIG_DFL)
        if self._world.lost_a_rank():  # not the scheduler's: the launcher ends what is left of a failed run
            os.kill(os.getpid(), received)
        self.request(_SIGNALS[received])
        logger.warning("%s: saving at the end of this step; a second one leaves at once", received.name)
