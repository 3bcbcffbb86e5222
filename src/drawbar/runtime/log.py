"""The logger ``drawbar``: the console of rank 0, and one file per rank, appended to when a run resumes; and the
standard streams of a run, which continues when nobody reads them any more, as behind ``| head``.

The run directory is created only when everything is ready to train, so records are kept in memory until
:func:`open_log_file` gives them a file.
"""

import errno
import io
import logging
import logging.handlers
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from drawbar.errors import UserError, visible

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


def _without_control_characters(record: logging.LogRecord) -> bool:
    record.msg, record.args = visible(record.getMessage()), None
    return True


logger = logging.getLogger("drawbar")
logger.addFilter(_without_control_characters)
_early = logging.handlers.MemoryHandler(capacity=10_000, flushLevel=logging.CRITICAL + 1)


class _LogFile(logging.FileHandler):
    """A log file that warns once if it cannot be written: a full disk must not end a run over its log."""

    _failed = False

    def handleError(self, record: logging.LogRecord) -> None:
        if not self._failed:
            self._failed = True
            print(f"warning: {self.baseFilename} cannot be written: {sys.exception()}", file=sys.stderr, flush=True)


def start_logging(rank: int, console: logging.Handler) -> None:
    """Log to ``console`` on rank 0, and keep all records for the log file."""
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.handlers.clear()
    _early.setTarget(None)
    _early.buffer.clear()
    logger.addHandler(_early)
    if rank == 0:
        logger.addHandler(console)


@contextmanager
def told_while_waiting(
    whom: str | Callable[[], str], after: float = 1.0, say: Callable[[str], object] = logger.info
) -> Iterator[None]:
    """Context for a wait: if it takes longer than ``after`` seconds, a thread says what this process waits for, and
    repeats that every minute. If ``whom`` is a function, it is called each time."""
    over, began = threading.Event(), time.monotonic()

    def tell() -> None:
        pause = after
        while not over.wait(pause):
            say(f"waits for {whom if isinstance(whom, str) else whom()} ({time.monotonic() - began:.0f} s)")
            pause = 60.0

    threading.Thread(target=tell, name="waiting", daemon=True).start()
    try:
        yield
    finally:
        over.set()


def log_to_file(text: str, level: int = logging.ERROR) -> None:
    """Write a text to the log file only: one that the console cannot show, or shows by itself."""
    record = logger.makeRecord(logger.name, level, __file__, 0, visible(text), (), None)
    for handler in logger.handlers:
        if isinstance(handler, (logging.FileHandler, logging.handlers.MemoryHandler)):
            handler.emit(record)


@contextmanager
def errors_in_log() -> Iterator[None]:
    """Write the error that ends this block to the log file, no matter who shows it to the user."""
    try:
        yield
    except Exception as error:
        log_to_file(f"error: {error}" if isinstance(error, UserError) else traceback.format_exc().rstrip())
        raise


def open_log_file(run_dir: Path, rank: int) -> None:
    """Append to ``logs/rank-0003.log`` from now on, beginning with what was logged before it existed."""
    if _early not in logger.handlers:  # the run starts again in this process: ``train.on_spike``
        return
    folder = run_dir / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    handler = _LogFile(folder / f"rank-{rank:04d}.log", mode="a", encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    _early.setTarget(handler)
    _early.flush()
    logger.removeHandler(_early)
    logger.addHandler(handler)


_NAMES = {1: "standard output", 2: "standard error"}


def ignore_output_errors() -> None:
    """From now on, writing to standard output or error cannot fail, not even in the user's code.

    Streams that are no longer those of the process, as in a notebook, are left unchanged.
    """
    sys.stdout, sys.stderr = _surviving(sys.stdout, 1), _surviving(sys.stderr, 2)


def _surviving(stream: TextIO, descriptor: int) -> TextIO:
    if not isinstance(stream, io.TextIOWrapper) or _descriptor_of(stream) != descriptor:
        return stream
    is_buffered = isinstance(stream.buffer, io.BufferedWriter)  # not so with `python -u`
    if isinstance(stream.buffer.raw if is_buffered else stream.buffer, _Surviving):
        return stream
    stream.flush()
    raw = _Surviving(stream)
    return io.TextIOWrapper(
        io.BufferedWriter(raw) if is_buffered else raw,
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def _descriptor_of(stream: TextIO) -> int | None:
    try:
        return stream.fileno()
    except (OSError, ValueError):  # it has none, or is closed
        return None


class _Surviving(io.FileIO):
    """Drops what cannot be written, and warns once: in the log file, and on the other of the two streams."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream.fileno(), "w", closefd=False)
        self._replaced = stream  # kept alive: its collection would close the descriptor
        self._failed = False

    def write(self, data: "ReadableBuffer", /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            self._drop(error)
            return memoryview(data).nbytes

    def _drop(self, error: OSError) -> None:
        if error.errno == errno.EPIPE:  # nobody reads it any more: drop everything, also from children and C libraries
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())
            os.close(null)
        if self._failed:
            return
        self._failed = True
        text = f"{_NAMES[self.fileno()]} cannot be written ({error.strerror}): the run continues without it"
        log_to_file(text, logging.WARNING)
        with suppress(OSError):  # not through the other stream's object, which may be busy
            os.write(2 if self.fileno() == 1 else 1, f"warning: {text}\n".encode())
