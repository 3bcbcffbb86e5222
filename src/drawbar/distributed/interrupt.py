"""Signals before a run has anything to save: the process exits at once, even if its main thread is blocked in C++, such
as torch's rendezvous, where Python runs no handlers."""

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from drawbar.distributed.watchdog import LAUNCHER
from drawbar.errors import ExitCode

Handler = Callable[[int, FrameType | None], Any]

REQUEUE_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""Signals with which a scheduler preempts a job."""
INTERRUPT_SIGNALS = (signal.SIGINT, signal.SIGHUP)
"""Signals of Ctrl-C and of a closed terminal."""
ECHO_SECONDS = 2.0
"""Signals this close together count as one: a scheduler signals launcher and ranks, and then the launcher signals the
ranks; or the scheduler signals Apptainer and the launcher inside, and Apptainer, without a terminal, forwards it."""
SIGNAL_SECONDS = "DRAWBAR_SIGNAL_SECONDS"
"""Environment variable: number of seconds before a job's time limit at which its ranks get the signal to save."""
_DEAF_SECONDS = 1.0
"""If the main thread has not run the handler this long after a signal, it counts as deaf."""
_HEARD = 0x80
"""Added to the number of a signal whose handler the main thread runs."""
_listener: list[socket.socket] = []
"""The two ends of a socket. A thread reads from the first. Python writes the number of each signal to the second, and
the main thread writes there when it runs the handler: their order shows which signals were heard, however late the
thread reads."""


def handle(handler: Handler, *numbers: signal.Signals, deaf: Handler | None = None) -> dict[signal.Signals, Any]:
    """Install ``handler`` for these signals, except those that this process ignores, as under nohup.

    Args:
        deaf: called in a thread if the main thread does not run the handler within a second.

    Returns:
        The previous handlers.
    """
    heard = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]

    def hear(number: int, frame: FrameType | None) -> Any:
        for writer in _listener[1:]:
            with suppress(BlockingIOError):
                writer.send(bytes([number + _HEARD]))
        return handler(number, frame)

    hear.deaf = deaf  # type: ignore[attr-defined]
    _listen()
    return {number: signal.signal(number, hear) for number in heard}


def _listen() -> None:
    """Start the thread that is notified of every signal, unless other code, such as asyncio, uses that mechanism."""
    if _listener:
        return
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    if before != -1:
        signal.set_wakeup_fd(before)
        return
    _listener[:] = [reader, writer]

    def read() -> None:
        unheard: list[int] = []
        while True:
            # again without waiting: the main thread may have written while this one waited for the interpreter
            numbers = _received(reader, _DEAF_SECONDS if unheard else None) or _received(reader, 0)
            for number in numbers:
                if number < _HEARD:
                    unheard.append(number)
                else:  # the handler runs once for all earlier signals
                    unheard = [other for other in unheard if other != number - _HEARD]
            while unheard and not numbers:
                number = unheard.pop(0)
                if (deaf := getattr(signal.getsignal(number), "deaf", None)) is not None:
                    deaf(number, None)

    threading.Thread(target=read, name="signals", daemon=True).start()


def _received(reader: socket.socket, seconds: float | None) -> bytes:
    reader.settimeout(seconds)
    with suppress(TimeoutError, BlockingIOError):
        return reader.recv(64)
    return b""


def _be_no_listener() -> None:
    """Stop listening in a forked process, which has no such thread: its signals do not concern its parent."""
    if _listener:
        with suppress(ValueError):  # not in the main thread, in a process forked by a thread
            signal.set_wakeup_fd(-1)
    for end in _listener:
        end.close()
    _listener.clear()


os.register_at_fork(after_in_child=_be_no_listener)


@contextmanager
def exit_on_signal() -> Iterator[None]:
    """Context manager in which a scheduler's signal ends the process with exit code 75, a person's with 130, as after a
    save."""
    before = handle(exit_now, *REQUEUE_SIGNALS, *INTERRUPT_SIGNALS, deaf=exit_now)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def heard_inside_calls() -> Iterator[None]:
    """Context manager in which a signal that Python would handle, as in a user's own script, ends the process if the
    main thread is deaf."""
    before: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():  # elsewhere Python refuses signal handlers
        for number in (*REQUEUE_SIGNALS, *INTERRUPT_SIGNALS):
            handler = signal.getsignal(number)
            if callable(handler) and not hasattr(handler, "deaf"):
                before |= handle(handler, number, deaf=exit_now)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def exit_now(number: int, frame: FrameType | None, *, trains: bool = True) -> None:
    """End this process at once, and print the reason unless drawbar's launcher, which prints it, started the process.
    ``trains`` is as for :func:`exit_message`."""
    received = signal.Signals(number)
    if LAUNCHER not in os.environ or os.environ[LAUNCHER] == str(os.getpid()):
        print(exit_message(received, trains), file=sys.stderr, flush=True)
    os._exit(exit_code_of(received))


def exit_code_of(received: signal.Signals) -> ExitCode:
    """The exit code of a run ended by this signal."""
    return ExitCode.REQUEUE if received in REQUEUE_SIGNALS else ExitCode.INTERRUPTED


def exit_message(received: signal.Signals, trains: bool = True) -> str:
    """The message for a command ended by a signal.

    Args:
        trains: whether the command trains a run; other commands keep no partial results.
    """
    if not trains:
        return f"{received.name} came before the command was done, and no results are kept; run it again"
    return (
        f"{received.name} came when there was nothing to save; the same command resumes from the last checkpoint, "
        "or starts the run if there is none"
    )
