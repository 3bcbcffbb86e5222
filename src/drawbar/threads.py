"""The threads of torch's CPU kernels: how they wait for one another, and whether they get a core when they need one.

OpenMP divides a kernel among threads, and at the kernel's end they wait for one another. By default libgomp's threads
spin for milliseconds before they sleep. That is right on a machine of one's own. If another program is busy, a thread
spins while it waits for another that has no core, and a step takes up to ten times as long.
"""

import os
import sys
import threading
import time
from collections.abc import MutableMapping
from pathlib import Path

SLEEP_SOON = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "10000"}
"""``passive``: threads that wait sleep (all OpenMP runtimes). But with libgomp, threads spin for about 0.1 ms first, as
waking them costs more than most waits inside a step take; ``benchmarks/busy_neighbour.py`` measures it."""
_POOL_SECONDS = 10.0
"""The longest wait for the extra thread pool of ``_spin_less``; without it threads spin longer, and nothing fails."""
_OWN_CHOICES = (*SLEEP_SOON, "KMP_BLOCKTIME", "KMP_LIBRARY")


def let_threads_sleep(environ: MutableMapping[str, str] = os.environ) -> None:
    """Set ``SLEEP_SOON`` for the OpenMP runtime that torch will load, in this process and those that it starts, unless
    the user has set one of ``_OWN_CHOICES``. The runtime reads these variables once, when it is loaded."""
    if not any(name in environ for name in _OWN_CHOICES):
        environ.update(SLEEP_SOON)
        if "torch" in sys.modules:
            _spin_less()


def _spin_less() -> None:
    """Make a libgomp that is loaded already (a script may import torch first) spin less. It does so while it
    has more threads than there are cores (``gomp_throttled_spin_count_var`` in its source): one more thread pool sees
    to that, and sleeps until the process ends. Other runtimes spin as before."""
    torch, made = sys.modules["torch"], threading.Event()  # not inside the thread: the caller may hold the import lock

    def make_a_pool() -> None:
        torch.ones(2**20).exp_()  # large enough for all threads
        made.set()
        threading.Event().wait()

    threading.Thread(target=make_a_pool, name="drawbar-spin-less", daemon=True).start()
    made.wait(_POOL_SECONDS)


class CoreWait:
    """How long this process's threads are ready to run and have no core (on Linux; elsewhere never)."""

    def __init__(self) -> None:
        self._since = time.monotonic()
        self._before = self._read()

    def share(self) -> float:
        """The share of the time since the last call (0 to 1) for which the thread that waited most had no core."""
        now, found = time.monotonic(), self._read()
        waited = max((found[name] - self._before[name] for name in found if name in self._before), default=0)
        elapsed, self._since, self._before = now - self._since, now, found
        return waited / 1e9 / elapsed if elapsed > 0 else 0.0

    def _read(self) -> dict[str, int]:
        """Nanoseconds on a run queue, by thread (https://docs.kernel.org/scheduler/sched-stats.html)."""
        found = {}
        for path in Path("/proc/self/task").glob("*/schedstat"):
            try:
                found[path.parent.name] = int(path.read_text().split()[1])
            except (OSError, IndexError):  # a thread that has ended; a kernel without these numbers
                continue
        return found
