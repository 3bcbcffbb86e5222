"""``RunStatus``: how far a run is, as the run itself says in its ``status.json``; and which process trains it now."""

import fcntl
import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, get_args

from drawbar.util.atomic_files import write_atomically
from drawbar.util.run_dir import LOCK_FILE, STATUS_FILE

RunState = Literal["training", "complete", "stopped", "failed"]


@dataclass(frozen=True)
class RunStatus:
    """The state of a run, as it last wrote it. A killed run stays at ``training``, with an old ``time``."""

    state: RunState
    """``complete``: all steps are made, or early stopping has ended it. ``stopped``: it has saved, and can go on."""
    step: int
    total_steps: int
    time: float
    """In seconds since 1970."""
    started: float
    """When the process that wrote this began to train."""

    @staticmethod
    def read(run_dir: Path) -> "RunStatus | None":
        """None where the run has not begun."""
        try:
            status = RunStatus(**json.loads((run_dir / STATUS_FILE).read_bytes()))
        except (OSError, ValueError, TypeError):
            return None
        return status if status.state in get_args(RunState) else None


def write_run_status(run_dir: Path, state: RunState, step: int, total_steps: int, started: float) -> None:
    """Write ``status.json``. Raises OSError where that cannot be done."""
    status = RunStatus(state, step, total_steps, round(time.time(), 3), started)
    write_atomically(run_dir / STATUS_FILE, json.dumps(asdict(status)).encode() + b"\n")


def is_locked(run_dir: Path) -> bool:
    """Whether a process holds the run directory. On some file systems, locks are not seen by other hosts."""
    try:
        with (run_dir / LOCK_FILE).open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def is_gone(run_dir: Path) -> bool:
    """Whether the process that trained the run last is known to have ended: it ran on this host, and is there no more.
    Other hosts' processes, and those of a container's own numbering, are not known."""
    process, host = _last_process(run_dir)
    return host == os.uname().nodename and Path("/proc/self").exists() and not Path(f"/proc/{process}").exists()


def last_host(run_dir: Path) -> str | None:
    """The host whose process was the last to train the run; None where none has."""
    return _last_process(run_dir)[1]


def _last_process(run_dir: Path) -> tuple[str, str | None]:
    """Number and host, as the lock file says: ``process 12 on gpu7``."""
    try:
        text = (run_dir / LOCK_FILE).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "", None
    process, _, host = text.strip().rpartition(" on ")
    return process.removeprefix("process "), host or None
