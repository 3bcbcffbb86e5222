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
from typing import Any

SLEEP_SOON = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "10000"}
"""``passive``: threads that wait sleep (all OpenMP runtimes). But with libgomp, threads spin for about 0.1 ms first, as
waking them costs more than most waits inside a step take; ``benchmarks/busy_neighbour.py`` measures it."""
_POOL_SECONDS = 10.0
"""The longest wait for the extra thread pool of ``SleepAtOnce``; without it threads spin longer, and nothing fails."""
_OWN_CHOICES = (*SLEEP_SOON, "KMP_BLOCKTIME", "KMP_LIBRARY")


def usable_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def let_threads_sleep(environ: MutableMapping[str, str] = os.environ) -> None:
    """Set ``SLEEP_SOON`` for the OpenMP runtime that torch will load, in this process and those that it starts, unless
    the user has set one of ``_OWN_CHOICES``. The runtime reads these variables once, when it is loaded."""
    if not any(name in environ for name in _OWN_CHOICES):
        environ.update(SLEEP_SOON)
        if "torch" in sys.modules:
            SleepAtOnce().begin()


class SleepAtOnce:
    """Lets libgomp's threads sleep as soon as they wait, from :meth:`begin` to :meth:`end`.

    libgomp does so while it has more threads than there are cores (``gomp_throttled_spin_count_var`` in its source, 0
    with ``OMP_WAIT_POLICY=passive``): one more thread pool, which sleeps, sees to that. What is computed, and by how
    many threads, stays the same, to the last bit. Other runtimes wait as before.
    """

    def __init__(self) -> None:
        self._ended: threading.Event | None = None

    def begin(self) -> None:
        if self._ended is not None or not SLEEP_SOON.items() <= os.environ.items():  # as the user has chosen
            return
        torch, made, self._ended = sys.modules["torch"], threading.Event(), threading.Event()
        arguments = (torch, made, self._ended)  # imported not inside: the caller may hold the import lock
        threading.Thread(target=_keep_a_pool, args=arguments, name="drawbar-sleep-at-once", daemon=True).start()
        made.wait(_POOL_SECONDS)

    def end(self) -> None:
        if self._ended is not None:
            self._ended.set()
            self._ended = None


def _keep_a_pool(torch: Any, made: threading.Event, ended: threading.Event) -> None:
    torch.ones(2**20).exp_()  # large enough for all threads
    made.set()
    ended.wait()  # the pool ends with this thread


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
