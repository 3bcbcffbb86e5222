"""``RunStatus``: how far a run is, as the run itself says in its ``status.json``."""

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from drawbar.util.atomic_files import write_atomically

FILE = "status.json"
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

    @staticmethod
    def read(run_dir: Path) -> "RunStatus | None":
        """None where the run has not begun, or an older drawbar made it."""
        try:
            return RunStatus(**json.loads((run_dir / FILE).read_bytes()))
        except (OSError, ValueError, TypeError):
            return None


def write_run_status(run_dir: Path, state: RunState, step: int, total_steps: int) -> None:
    """Write ``status.json``. Raises OSError where that cannot be done."""
    status = RunStatus(state, step, total_steps, round(time.time(), 3))
    write_atomically(run_dir / FILE, json.dumps(asdict(status)).encode() + b"\n")
