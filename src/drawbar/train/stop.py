"""Stops all ranks at the same step: for a signal, an early stop, or a callback's request."""

import os
import signal
import threading
import time
from enum import IntEnum
from types import FrameType, TracebackType
from typing import Any, Self

from drawbar.distributed.interrupt import ECHO_SECONDS, INTERRUPT_SIGNALS, REQUEUE_SIGNALS, exit_now, handle
from drawbar.distributed.process_group import Distributed
from drawbar.distributed.rank_info import has_launcher
from drawbar.errors import ExitCode, UserError
from drawbar.runtime.log import logger


class Reason(IntEnum):
    """Why a run stops before its last step; if ranks differ, the largest wins."""

    NONE = 0
    SAVE = 1
    """Not a stop: a callback requested a checkpoint."""
    NO_BATCH = 2
    """A rank could not make its batches; the run saves, and ends with that error. Any other reason takes precedence, as
    a signal may also have ended a worker."""
    EARLY = 3
    """The score stopped improving."""
    CALLBACK = 4
    """A callback requested it."""
    REQUEUE = 5
    """The scheduler wants the machine back (SIGTERM, SIGUSR1)."""
    INTERRUPTED = 6
    """Ctrl-C (SIGINT), or the terminal was closed (SIGHUP)."""
    FAILED = 7
    """An evaluation or a callback failed, or another process took over the run's folder in the object store: see
    ``Stop.fail``."""
    UNSAVED = 8
    """A save failed."""


_EXIT_CODES = {
    Reason.REQUEUE: ExitCode.REQUEUE,
    Reason.INTERRUPTED: ExitCode.INTERRUPTED,
    Reason.NO_BATCH: ExitCode.FAILED,
    Reason.FAILED: ExitCode.FAILED,
    Reason.UNSAVED: ExitCode.FAILED,
}
_REASONS = dict.fromkeys(REQUEUE_SIGNALS, Reason.REQUEUE) | dict.fromkeys(INTERRUPT_SIGNALS, Reason.INTERRUPTED)


class Stop:
    """Agrees on a stop with all ranks. Within this context manager, a first signal requests a stop; a second one ends
    the process.

    The run stops after the step. Before :meth:`begin`, with nothing to save, the first signal already ends the process.
    """

    def __init__(self, world: Distributed) -> None:
        self._world = world
        self._wanted = [Reason.NONE]
        self.reason = Reason.NONE
        """What all ranks agreed on."""
        self._error: UserError | None = None
        self._before: dict[signal.Signals, Any] = {}
        self._first_signal_time: float | None = None
        """Time of the first signal."""
        self._unheard: set[int] = set()
        """Signals that a thread has handled, but whose handler the main thread has yet to run."""

    @property
    def exit_code(self) -> ExitCode:
        return _EXIT_CODES.get(self.reason, ExitCode.DONE)

    @property
    def wanted(self) -> bool:
        """Whether this rank wants to stop; the others may not know yet."""
        return max(self._wanted) > Reason.SAVE

    def fail(self, error: UserError, exit_code: ExitCode = ExitCode.FAILED) -> None:
        """Stop with an error, once this step is saved. Only the first error is kept.

        Args:
            exit_code: defaults to FAILED instead of the error's own, as settings are valid once training has started.
        """
        error.exit_code = exit_code
        error.origin = error.origin or self._world.describe()
        self._error = self._error or error
        self.request(Reason.FAILED)

    def failure(self) -> UserError | None:
        """The error to raise once the run is saved; if any rank has one, all ranks receive one. Collective."""
        others = self._world.all_gather(self._error)
        return self._error or next((error for error in others if error is not None), None)

    def request(self, reason: Reason) -> None:
        """Request a stop or a save. May be called from any thread or signal handler."""
        self._wanted.append(reason)  # atomic: a signal handler cannot interrupt it and lose a request

    def agree(self) -> bool:
        """Agree with all ranks on whether to stop: all do if any wants to. Collective, at the same step."""
        self.agree_and_sum()
        return self.has_agreed

    @property
    def has_agreed(self) -> bool:
        """Whether the ranks have agreed to stop."""
        return self.reason > Reason.SAVE

    def agree_and_sum(self, *values: float) -> list[float]:
        """Find out whether any rank wants to stop, and sum some numbers over the data-parallel ranks, in one
        collective. Every rank must call it at the same step."""
        wanted = list(self._wanted)  # a copy: a save requested meanwhile by another thread is for the next step
        own = max(wanted)
        for _ in range(wanted.count(Reason.SAVE)):
            self._wanted.remove(Reason.SAVE)
        counted = values if self._world.dp_ranks.is_dp_leader else (0.0,) * len(values)
        wishes = [float(reason is own) for reason in Reason]
        sums = self._world.sum_all([*counted, *wishes])
        self.reason = max(reason for reason, count in zip(Reason, sums[len(values) :], strict=True) if count)
        return sums[: len(values)]

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # elsewhere Python refuses signal handlers
            self._before = handle(exit_now, *_REASONS, deaf=exit_now)
        return self

    def begin(self) -> None:
        """Call before the first step: from here on, a first signal only requests a stop."""
        if self._before:
            handle(self._on_signal, *_REASONS, deaf=self._on_unheard_signal)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number in self._unheard:  # Python held it back until now
            self._unheard.discard(number)
        elif self._leaves_at_once(signal.Signals(number)):
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _on_unheard_signal(self, number: int, frame: FrameType | None) -> None:
        """As ``_on_signal``, on another thread: the main thread is blocked by a long step or a rank that hangs."""
        self._unheard.add(number)
        if self._leaves_at_once(signal.Signals(number)):
            os._exit(128 + number)

    def _leaves_at_once(self, received: signal.Signals) -> bool:
        """Register a signal; return whether the process must end at once rather than after its step."""
        now, is_first = time.monotonic(), self._first_signal_time is None
        # an echo is the same signal by a second route, such as first from the scheduler and then from the launcher;
        # without either, a person has pressed Ctrl-C twice on purpose
        may_echo = has_launcher() or received in REQUEUE_SIGNALS
        is_echo = may_echo and self._first_signal_time is not None and now - self._first_signal_time < ECHO_SECONDS
        # after a rank has died, the signal is not the scheduler's but the launcher's, which ends the other ranks
        lost_a_rank = self._world.lost_a_rank()
        if (lost_a_rank and not self._world.is_busy()) or not (is_first or is_echo):
            return True
        if is_first:
            self._first_signal_time = now
            if lost_a_rank:
                logger.warning("another rank is gone: this one finishes its current checkpoint, and ends")
                return False
            self.request(_REASONS[received])
            logger.warning("%s: saving at the end of this step; a second one exits at once", received.name)
        return False
