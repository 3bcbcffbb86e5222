"""``HostOutput``: what the hosts print, each line with its host's name, on our own streams and in the job's log."""

import asyncio
import sys
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO


class HostOutput:
    """One for all hosts of a job."""

    def __init__(self) -> None:
        self._log: BinaryIO | None = None

    def open_log(self, path: Path) -> None:
        """Write to this file, too, from now on. Raises OSError where it cannot be written."""
        self._log = path.open("ab")

    def close(self) -> None:
        with suppress(OSError):
            if self._log is not None:
                self._log.close()

    async def write(self, descriptor: int, host: str, line: bytes) -> None:
        """Write in a thread: a terminal or a pager may block, and the hosts must not wait for it."""
        await asyncio.to_thread(self._write, descriptor, host.encode() + b": " + line + b"\n")

    def _write(self, descriptor: int, text: bytes) -> None:
        stream = (sys.stdout if descriptor == 1 else sys.stderr).buffer
        stream.write(text)  # a buffered stream has a lock: lines stay whole
        stream.flush()
        if self._log is not None:
            with suppress(OSError):  # a full disk on this machine must not end the run on the hosts
                self._log.write(text)
                self._log.flush()
