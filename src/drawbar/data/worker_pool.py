"""``WorkerPool``: worker processes that apply one function, which is sent to them once, to many arguments."""

import multiprocessing
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from multiprocessing import resource_tracker
from typing import Any

from drawbar.distributed.interrupt import INTERRUPT_SIGNALS, REQUEUE_SIGNALS
from drawbar.errors import ExitCode, UserError
from drawbar.runtime.log import logger


class WorkerFailed(Exception):
    """A call failed in a worker process, which can take further calls."""


class WorkerPool:
    """Spawned processes for one kind of work. They end with this process, however it ends.

    Args:
        function: what each call applies, as ``pickled`` returned it.
        count: processes.
        timeout: longest wait for a result, in seconds.
        activity: what the processes do, for messages, such as ``encoding records``.
    """

    def __init__(self, function: bytes, count: int, *, timeout: float, activity: str) -> None:
        self.count = count
        self._timeout = timeout
        self._activity = activity
        self._others = set(multiprocessing.active_children())
        _start_tracker()
        # Spawned, not forked: a fork copies locks of torch's and gloo's threads, held by nobody who could free them.
        self._executor = ProcessPoolExecutor(
            count, multiprocessing.get_context("spawn"), initializer=_start_worker, initargs=(function,)
        )

    def start(self) -> list[Future[None]]:
        """Start all processes now; a result comes when a process can work. If not called, each starts when used."""
        return [self._executor.submit(_do_nothing) for _ in range(self.count)]

    def submit(self, *arguments: Any) -> Future[Any]:
        """Call the function in one of the processes. Any thread may."""
        return self._executor.submit(_apply, *arguments)

    def result(self, future: Future[Any]) -> Any:
        """The result of a call.

        Raises:
            UserError: a process died, or gave no result for ``timeout`` seconds.
            WorkerFailed: a process could not load the function, or the function raised this.
        """
        try:
            return future.result(self._timeout)
        except (BrokenProcessPool, TimeoutError) as error:
            raise self._lost_worker(error) from error

    def _lost_worker(self, error: Exception) -> UserError:
        """What to tell the user of a process that died (BrokenProcessPool), or that gave no result in time."""
        died = isinstance(error, BrokenProcessPool)
        fewer = f"where memory ran out, use fewer processes (data.workers={self.count // 2}); "
        return UserError(
            f"a process for {self._activity} was killed, or could not start"
            if died
            else f"a process for {self._activity} gave no result for {self._timeout:.0f} s",
            where="data.workers",
            remedy=f"{fewer if self.count > 1 else ''}a script that starts training must do so under "
            '`if __name__ == "__main__":`; data.workers=0 does it in one process and shows what happens',
            exit_code=ExitCode.FAILED,
        )

    def finish(self) -> None:
        """Wait for the processes to end, once they have done all that they were given."""
        self._executor.shutdown()

    def close(self) -> None:
        """End the processes at once: the results of their present work are not needed, and one process may be stuck."""
        for worker in set(multiprocessing.active_children()) - self._others:
            worker.kill()
        self._executor.shutdown(cancel_futures=True)


def pickled(function: Callable[..., Any], activity: str, *examples: Any) -> bytes | None:
    """The function as bytes for a ``WorkerPool``; None, with a warning, where it cannot be sent to other processes.

    Args:
        examples: arguments that a call would send; they are pickled on trial.
    """
    try:
        found = pickle.dumps(function)
        pickle.dumps(examples)
    except Exception as error:  # noqa: BLE001 - pickling runs the code of any class, which may raise anything
        logger.warning(
            "%s in this process alone: the task or its records cannot be sent to others (%s)", activity, error
        )
        return None
    if b"__main__" in found and not hasattr(sys.modules["__main__"], "__file__"):  # a worker could not import it
        logger.warning(
            "%s in this process alone: the task is defined in a notebook or console, not in a file", activity
        )
        return None
    return found


def _start_tracker() -> None:
    """Start multiprocessing's resource tracker, which removes the semaphores of a pool whose owner was killed, without
    its warning, which is for programmers who forgot to remove them."""
    name, quiet = "PYTHONWARNINGS", "ignore:resource_tracker:UserWarning"
    before = os.environ.get(name)
    os.environ[name] = quiet if before is None else f"{before},{quiet}"
    try:
        resource_tracker.ensure_running()
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


_function: Callable[..., Any]
"""In a worker: the function that it applies."""


def _start_worker(function: bytes) -> None:
    # all processes of a terminal or job get these signals; the parent ends its workers
    for number in (*INTERRUPT_SIGNALS, *REQUEUE_SIGNALS):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")  # one process a core is enough
    global _function
    try:
        _function = pickle.loads(function)
    except Exception as error:  # noqa: BLE001 - loading builds the task, by the user's code
        _function = partial(_refuse, f"{type(error).__name__}: {error}")
    if "torch" in sys.modules:  # if the script imported torch, that was before the variable was set
        sys.modules["torch"].set_num_threads(1)


def _end_with_parent() -> None:
    """A parent that is killed cannot end its workers, and they would wait for work for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _apply(*arguments: Any) -> Any:
    return _function(*arguments)


def _refuse(reason: str, *arguments: Any) -> None:
    """Replaces the function in a worker that could not load it: raises the reason."""
    raise WorkerFailed(f"a process cannot build the task as this one did: {reason}")


def _do_nothing() -> None:
    """A worker comes to this once it has started."""
