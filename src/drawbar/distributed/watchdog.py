"""Ends this rank when its launcher is gone, or when another rank of the same launcher is gone."""

import os
import sys
import threading
from collections.abc import Callable, Iterable

from drawbar.util.processes import process_exists

NODE = "DRAWBAR_NODE"
"""Environment variable: what the launcher calls this node."""
LAUNCHER = "DRAWBAR_LAUNCHER"
"""Environment variable: the process id of drawbar's own launcher."""

ProcessId = tuple[str, int, int]
"""Identifies a rank: its machine, its launcher's process id, its own process id."""


class Watchdog:
    """Watches the launcher of this rank, and the other ranks that this launcher started.

    torch's launcher puts every rank in a session of its own, so a SIGKILL of the launcher's process group would
    leave the ranks running: writing to a run that its owner has started again. And the launcher waits 30 s for a rank
    that does not heed its SIGTERM, such as one whose GPU waits for a rank that is gone.
    """

    def __init__(self) -> None:
        self._launcher = int(os.environ.get(LAUNCHER, os.getppid()))  # it may be gone before anybody looks
        self._beside: list[int] = []
        self.is_busy: Callable[[], bool] = lambda: False
        """Whether this rank must finish something, such as a checkpoint, before it ends because another is gone."""
        self._stopped = threading.Event()

    @property
    def process_id(self) -> ProcessId:
        return os.uname().nodename, os.getppid(), os.getpid()

    def watch_ranks(self, ranks: Iterable[ProcessId]) -> None:
        """Watch those of ``ranks`` that are on this machine and of the same launcher."""
        machine, launcher, own = self.process_id
        self._beside = [pid for host, parent, pid in ranks if (host, parent) == (machine, launcher) and pid != own]

    def start(self, period: float = 0.25, patience: float = 3.0) -> None:
        """Look every ``period`` seconds. A lost rank makes the next collective fail, with a clearer error: so this rank
        gets ``patience`` seconds to end by itself."""

        def watch() -> None:
            while not self._stopped.wait(period):
                if os.getppid() != self._launcher:
                    _end_process("the launcher is gone")
                if self.lost_a_rank() and not self._stopped.wait(patience) and not self.is_busy():
                    _end_process("another rank is gone")

        threading.Thread(target=watch, name="watchdog", daemon=True).start()

    def lost_a_rank(self) -> bool:
        """Whether a rank beside this one is gone."""
        return not all(process_exists(pid) for pid in self._beside)

    def stop(self) -> None:
        """Stop watching: the run has ended well, and ranks may exit in any order."""
        self._stopped.set()


def _end_process(reason: str) -> None:
    print(f"drawbar: {reason}; this rank ends", file=sys.stderr, flush=True)
    os._exit(1)
