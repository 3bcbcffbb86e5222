"""Write in the background while training goes on."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for


class AsyncWriter:
    """One background thread that writes one checkpoint at a time.

    Call ``wait()`` before the next copy of the state, so that host memory never holds two snapshots::

        writer.wait()
        snapshot = Snapshot(step, host_copies(model), …)
        writer.submit(lambda: directory.write(snapshot))

    A process that ends finishes its last write; a process that is killed leaves a ``.tmp`` folder.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint-writer")
        self._pending: Future[None] | None = None

    def submit(self, write: Callable[[], None]) -> None:
        """Start a write once the one before it has ended. Raises what that one raised."""
        self.wait()
        self._pending = self._thread.submit(write)

    def follow(self, write: Callable[[], None]) -> None:
        """Start a write when the one before it has succeeded, without waiting here: it must hold no snapshot."""
        before = self._pending

        def in_turn() -> None:
            if before is not None:
                before.result()
            write()

        self._pending = self._thread.submit(in_turn)

    def wait(self) -> None:
        """Return when nothing is being written. Raises, once, what the write raised."""
        if self._pending is None:
            return
        # Forget the write only when it has ended: Ctrl-C may break the waiting, and its error must not be lost.
        wait_for([self._pending])
        ended, self._pending = self._pending, None
        ended.result()

    def close(self) -> None:
        """Wait for the last write, then end the thread. Raises what the write raised."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()
