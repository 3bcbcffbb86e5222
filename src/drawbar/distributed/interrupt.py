"""Signals before a run has anything to save: the process exits at once."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from drawbar.distributed.watchdog import LAUNCHER
from drawbar.errors import ExitCode

Handler = Callable[[int, FrameType | None], Any]

REQUEUE_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""Signals by which a scheduler preempts a job."""
INTERRUPT_SIGNALS = (signal.SIGINT, signal.SIGHUP)
"""Signals of Ctrl-C and of a closed terminal."""
ECHO_SECONDS = 2.0
"""Signals this close together count as one: a scheduler signals launcher and ranks, then the launcher the ranks;
or the scheduler signals Apptainer and the launcher inside, and Apptainer, without a terminal, passes the signal on."""


def handle(handler: Handler, *numbers: signal.Signals) -> dict[signal.Signals, Any]:
    """Install ``handler`` for these signals, except those that this process was told to ignore, as by nohup.

    Returns:
        The previous handlers.
    """
    heard = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    return {number: signal.signal(number, handler) for number in heard}


@contextmanager
def exit_on_signal() -> Iterator[None]:
    """Context where a scheduler's signal ends the process with code 75, a person's with 130, as after a save."""
    before = handle(exit_now, *REQUEUE_SIGNALS, *INTERRUPT_SIGNALS)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def exit_now(number: int, frame: FrameType | None) -> None:
    """End this process at once. It prints why, unless drawbar's launcher started it: then the launcher alone does."""
    received = signal.Signals(number)
    if LAUNCHER not in os.environ or os.environ[LAUNCHER] == str(os.getpid()):
        print(exit_message(received), file=sys.stderr, flush=True)
    os._exit(exit_code_of(received))


def exit_code_of(received: signal.Signals) -> ExitCode:
    """The exit code of a run that this signal has ended."""
    return ExitCode.REQUEUE if received in REQUEUE_SIGNALS else ExitCode.INTERRUPTED


def exit_message(received: signal.Signals, trains: bool = True) -> str:
    """What is printed of a command that a signal has ended.

    Args:
        trains: whether it trains a run; other commands keep nothing of what they have done.
    """
    if not trains:
        return f"{received.name} came before the command was done, and nothing of it is kept; give it again"
    return (
        f"{received.name} came when there was nothing to save; the same command goes on from the last checkpoint, "
        "or starts the run where there is none"
    )
