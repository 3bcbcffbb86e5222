"""Following jobs: files that grow, and how often to look."""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

POLL_SECONDS = 0.5
"""Between two looks at the files."""
ASK_SECONDS = 5.0
"""Between two questions to a scheduler, whose controller serves all users."""
PATIENCE = 300.0
"""Seconds that a scheduler may be out of reach while somebody follows a job."""


@dataclass
class Follower:
    """Reads what was appended to a file since the last read. The file may not exist yet; if it shrinks, it is read
    again from the start."""

    path: Path
    _stream: BinaryIO | None = field(default=None, repr=False)

    def read(self) -> bytes:
        try:
            if self._stream is None:
                self._stream = self.path.open("rb")
            elif self.path.stat().st_size < self._stream.tell():
                self._stream.seek(0)
        except OSError:
            return b""
        return self._stream.read()


@dataclass
class Output:
    """Several files, one after another, each piece under its key in ``files``, as ``tail -f`` prints file names."""

    files: dict[str, Follower]
    _last: str | None = None

    def show(self, name: str) -> bool:
        """Print what is new in a file. Returns whether there was anything new."""
        text = self.files[name].read()
        if not text:
            return False
        if len(self.files) > 1 and self._last != name:
            print(f"==> {name} <==" if self._last is None else f"\n==> {name} <==", flush=True)
        self._last = name
        sys.stdout.buffer.write(text)
        sys.stdout.flush()
        return True
