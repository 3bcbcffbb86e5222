"""Standard output and error of a run: it goes on when nobody reads them any more, as behind ``| head``."""

import errno
import io
import logging
import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, TextIO

from drawbar.runtime.log import log_to_file

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_NAMES = {1: "standard output", 2: "standard error"}


def ignore_output_errors() -> None:
    """From now on, what is written to standard output or error cannot fail, whoever writes it: the user's code, too.

    Streams that are no longer those of the process, as in a notebook, stay as they are.
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
    """Drops what cannot be written, and says so once: in the log file, and on the other of the two streams."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream.fileno(), "w", closefd=False)
        self._replaced = stream  # kept alive: once it is collected, the descriptor is closed
        self._failed = False

    def write(self, data: "ReadableBuffer", /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            self._drop(error)
            return memoryview(data).nbytes

    def _drop(self, error: OSError) -> None:
        if error.errno == errno.EPIPE:  # nobody reads it any more: drop all, also from children and C libraries
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())
            os.close(null)
        if self._failed:
            return
        self._failed = True
        text = f"{_NAMES[self.fileno()]} cannot be written ({error.strerror}): the run goes on without it"
        log_to_file(text, logging.WARNING)
        with suppress(OSError):  # not through the other stream's object, which may be busy
            os.write(2 if self.fileno() == 1 else 1, f"warning: {text}\n".encode())
