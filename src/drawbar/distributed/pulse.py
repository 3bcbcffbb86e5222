"""The pulse of a rank: what it is doing, in a file that drawbar's launcher reads even if the rank hangs or is dead.

Beside it is a file for stacks. ``faulthandler`` writes to it without the interpreter: after a crash, and when the
launcher sends :data:`DUMP_SIGNAL`, even if the main thread is inside C code that holds the GIL.
"""

import faulthandler
import json
import os
import signal
import threading
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import IO, TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # a rank writes its first pulse before it has imported pydantic
    from drawbar.config.schema.run_config import LimitsSection

PULSE = "DRAWBAR_PULSE_FILE"
"""Environment variable: the file for this rank's pulse."""
DUMP_SIGNAL = signal.SIGRTMIN + 7 if hasattr(signal, "SIGRTMIN") else None
"""The signal at which a rank writes the stacks of its threads; None where there are no real-time signals (macOS)."""
_PULSE_BYTES = 2048
"""Size of the pulse in the file; the numbers of collectives follow."""
_LONGEST_ACTIVITY = 200
_LONGEST_COLLECTIVE = 60
_opened: list[IO[bytes]] = []


class Kind(StrEnum):
    """Which limit applies to a rank's activity: see ``launch.limits``."""

    START = "start"
    """Anything before the first step has been made."""
    STEP = "step"
    SAVE = "save"
    CALLBACK = "callback"
    """A callback or other long work on one rank, such as scoring."""
    WAITING = "waiting"
    """Waiting for the other ranks, which has no limit of its own."""
    ENDED = "ended"
    """The run has ended well on this rank; a script may go on."""


def limit_of(kind: Kind, limits: "LimitsSection", timeout: float) -> float:
    """The seconds that a rank may go without progress; ``timeout`` is ``launch.timeout``."""
    return getattr(limits, Kind.START if kind is Kind.ENDED else kind, None) or timeout


class Pulse(NamedTuple):
    """What a rank is doing."""

    changes: int = 0
    """Number of changes of activity so far."""
    kind: Kind = Kind.START
    step: int = 0
    """The step that it is making or has just made; 0 before the first."""
    activity: str = "starting"

    def __str__(self) -> str:
        return f"step {self.step}, {self.activity}" if self.step else self.activity

    @staticmethod
    def read(path: Path) -> "Pulse | None":
        """The pulse in a file; None if there is none, or while it is being written."""
        with suppress(OSError, ValueError, TypeError):
            with path.open("rb") as file:
                changes, kind, step, activity = json.loads(file.read(_PULSE_BYTES))
            return Pulse(changes, Kind(kind), step, activity)
        return None

    def write(self) -> None:
        """Write it to this rank's file, if a launcher of drawbar's reads that."""
        _write([self.changes, self.kind, self.step, self.activity[:_LONGEST_ACTIVITY]], offset=0)


def begin() -> None:
    """Make this rank's files, and write stacks from here on. Without drawbar's launcher, a crash writes its stacks to
    standard error."""
    path = os.environ.pop(PULSE, None)  # for this process, and not for those that it starts
    if path is None:
        if not faulthandler.is_enabled():
            with suppress(OSError, ValueError, AttributeError):  # a notebook's standard error is no file
                faulthandler.enable()
        return
    with suppress(OSError):  # the launcher may be gone with its folder, or the disk full
        stacks, file = (open(name, "wb", buffering=0) for name in (stacks_beside(Path(path)), path))  # noqa: SIM115
        stacks.write(f"main thread: 0x{threading.main_thread().ident or 0:016x}\n".encode())
        faulthandler.enable(stacks)
        if DUMP_SIGNAL is not None:
            faulthandler.register(DUMP_SIGNAL, stacks)
        _opened[:] = [file, stacks]
        Pulse().write()  # last: who has a pulse understands the signal


def stacks_beside(pulse: Path) -> Path:
    return pulse.with_suffix(".stacks")


Collectives = dict[str, tuple[int, str]]
"""For each process group, the number of collectives that a rank has begun, and what the newest one is, if known."""


def write_collectives(begun: Collectives) -> None:
    """Write the collectives that this rank has begun."""
    shown = {group: (number, newest[:_LONGEST_COLLECTIVE]) for group, (number, newest) in begun.items()}
    _write(shown, offset=_PULSE_BYTES)


def read_collectives(path: Path) -> Collectives:
    """What ``write_collectives`` wrote last; empty if that is unknown."""
    with suppress(OSError, ValueError), path.open("rb") as file:
        file.seek(_PULSE_BYTES)
        return {group: (number, newest) for group, (number, newest) in json.loads(file.read(_PULSE_BYTES)).items()}
    return {}


def _write(value: object, offset: int) -> None:
    if _opened and len(content := json.dumps(value).encode().ljust(_PULSE_BYTES)) == _PULSE_BYTES:
        with suppress(OSError):
            os.pwrite(_opened[0].fileno(), content, offset)
