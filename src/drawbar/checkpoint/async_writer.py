"""Write in the background while training goes on."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from traceback import clear_frames


class AsyncWriter:
    """One background thread that writes one checkpoint at a time.

    Call ``wait()`` before the next copy of the state, so that host memory never holds two snapshots::

        writer.wait()
        snapshot = Snapshot(step, host_copies(model), …)
        writer.submit(partial(directory.write, snapshot))

    A process that ends finishes its last write; a process that is killed leaves a ``.tmp`` folder.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint-writer")
        self._pending: Future[None] | None = None
        self._error: BaseException | None = None

    def submit(self, write: Callable[[], None]) -> None:
        """Start a write once the one before it has ended."""
        self.wait()
        self._pending = self._thread.submit(write)

    def submit_after_success(self, write: Callable[[], None]) -> None:
        """Queue a write to run if the one before it succeeds, without waiting for that; ``write`` must not hold a
        snapshot."""
        before = self._pending

        def in_turn() -> None:
            if before is not None:
                before.result()
            write()

        self._pending = self._thread.submit(in_turn)

    def is_writing(self) -> bool:
        """Any thread may ask."""
        pending = self._pending
        return pending is not None and not pending.done()

    def wait(self) -> None:
        """Wait until nothing is being written. A failed write does not raise here: see ``pop_error``."""
        if self._pending is None:
            return
        # Forget the write only when it has ended: Ctrl-C may break the waiting, and its error must not be lost.
        wait_for([self._pending])
        ended, self._pending = self._pending, None
        error = ended.exception()
        if error is not None:
            _drop_snapshot(error)
            self._error = self._error or error

    def pop_error(self, kind: type[BaseException] = BaseException) -> BaseException | None:
        """Return and clear the error of the first failed write, if it is of that kind, else None."""
        if not isinstance(self._error, kind):
            return None
        error, self._error = self._error, None
        return error

    def close(self) -> None:
        """Wait for the last write, then end the thread."""
        self.wait()
        self._thread.shutdown()


def _drop_snapshot(error: BaseException | None) -> None:
    """Clear the frames of a failed write: they hold its snapshot, and the next one needs that memory. A closure would
    keep the snapshot nevertheless: so ``submit`` is given a ``partial``.
    """
    while error is not None:
        clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
