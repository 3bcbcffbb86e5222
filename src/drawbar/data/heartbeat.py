"""Heartbeat, progress and error of the process that encodes, in small files for the processes that wait for it."""

import json
import os
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from drawbar.data.encode import OnProgress
from drawbar.errors import ExitCode, UserError
from drawbar.util.atomic_files import replacing

BEAT_SECONDS = 1.0


class Heartbeat:
    """Tells waiting processes which one encodes, and how far it is. Its thread beats while records are read, too."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.done = 0
        self.total = 0
        self._beats = 0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def report(self, done: int, total: int) -> None:
        self.done, self.total = done, total

    def __enter__(self) -> "Heartbeat":
        self._beat()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()
        with suppress(OSError):
            self.path.unlink(missing_ok=True)

    def _run(self) -> None:
        while not self._end.wait(BEAT_SECONDS):
            self._beat()

    def _beat(self) -> None:
        self._beats += 1
        about = {"host": socket.gethostname(), "pid": os.getpid(), "done": self.done, "total": self.total}
        with suppress(OSError):  # a full disk stops the encoding itself
            replace_text(self.path, json.dumps({**about, "beats": self._beats}))


class Watch:
    """Reads the heartbeat in a waiting process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.seen = False
        """Whether a heartbeat was ever seen: of a process that encodes, or of one that died over it."""
        self._text = ""
        self._changed = time.monotonic()
        self._about: dict[str, Any] = {}

    def look(self, progress: OnProgress | None) -> None:
        try:
            text = self.path.read_text()
        except OSError:
            return
        if text == self._text:
            return
        self.seen = True
        self._text = text
        self._changed = time.monotonic()
        with suppress(ValueError):
            self._about = json.loads(text)
        if progress and self._about.get("total"):
            progress(self._about["done"], self._about["total"])

    def __str__(self) -> str:
        if not self._about:
            return f"the process that holds {self.path.with_suffix('.lock')}"
        return f"process {self._about['pid']} on host {self._about['host']}, which encodes the data"

    def raise_if_silent(self, timeout: float) -> None:
        if time.monotonic() - self._changed <= timeout:
            return
        about = {"pid": "?", "host": "?", "done": 0, "total": 0, **self._about}
        raise UserError(
            f"process {about['pid']} on host {about['host']} encodes the data, and sent no heartbeat for "
            f"{timeout:.0f} s (it had done {about['done']} of {about['total']} records)",
            where=str(self.path.with_suffix(".lock")),
            remedy=f"look at that process, end it (on {about['host']}: `kill -9 {about['pid']}`), and start again",
            exit_code=ExitCode.FAILED,
        )


class Failure:
    """Why encoding failed: told to the processes that wait, which would only fail again, maybe hours later.

    A failure that was there before this process began to wait is an older attempt's, and does not count.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._old = self._read()

    def _read(self) -> str:
        try:
            return self.path.read_text()
        except OSError:
            return ""

    def write(self, error: UserError) -> None:
        about = {"what": error.what, "where": error.where, "remedy": error.remedy, "exit_code": int(error.exit_code)}
        with suppress(OSError):
            replace_text(self.path, json.dumps({**about, "attempt": f"{os.getpid()} {time.time_ns()}"}))

    def raise_if_new(self) -> None:
        text = self._read()
        if text and text != self._old:
            about = json.loads(text)
            raise UserError(
                about["what"],
                where=about["where"],
                remedy=about["remedy"],
                exit_code=ExitCode(about["exit_code"]),
            )


def replace_text(path: Path, text: str) -> None:
    """Write a text atomically: readers see the old or the new content, never a part."""
    with replacing(path, one_writer=False, durable=False) as file:
        file.write(text.encode())
