"""Batches prepared ahead of training: in a thread of this process, and in processes that it feeds."""

import io
import pickle
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any, Generic, TypeVar, cast

import torch

from drawbar.config.io.user_modules import cause
from drawbar.data.columns import Sample
from drawbar.data.worker_pool import WorkerFailed, WorkerPool, pickled
from drawbar.errors import UserError
from drawbar.runtime.log import logger
from drawbar.runtime.seed import note_host_generators, rng_bytes

Batch = TypeVar("Batch")
Collate = Callable[[list[Sample]], Batch]
Augment = Callable[[Sample, int], Sample]
"""(sample, epoch) → the sample as this epoch sees it."""
Join = Callable[[list[Sample]], Sample]
"""The augmented samples of a row → the row."""

ACTIVITY = "preparing batches"
TELL_SECONDS = 60.0
"""How often the log says that training waits for its batches."""
CLOSE_SECONDS = 60.0
"""The longest wait for the micro-batch that is being made when training ends."""


@dataclass(frozen=True)
class RawRow:
    """The samples of a row as they were encoded."""

    samples: list[Sample]
    join: Join


@dataclass(frozen=True)
class RawBatch:
    """The rows of a micro-batch: what is read in this process, and may be sent to a worker."""

    rows: list[RawRow]
    epoch: int


def unchanged(sample: Sample, epoch: int) -> Sample:
    """The ``Augment`` of samples that are the same in every epoch."""
    return sample


@dataclass(frozen=True)
class BatchMaker(Generic[Batch]):
    """The work that may be done in another process: augment, join and collate. It pickles if its parts do."""

    collate: Collate[Batch]
    augment: Augment = unchanged

    def __call__(self, raw: RawBatch) -> Batch:
        return self.collate([self._row(row, raw.epoch) for row in raw.rows])

    def _row(self, row: RawRow, epoch: int) -> Sample:
        return row.join([self.augment(sample, epoch) for sample in row.samples])


@dataclass(frozen=True)
class PlannedMicroBatch:
    """Which rows a micro-batch has; they are not read yet."""

    read: Callable[[], RawBatch]
    """May be called in another thread."""
    is_filler: bool = False


@dataclass(frozen=True)
class MicroBatch(Generic[Batch]):
    """One forward on one rank."""

    batch: Batch
    is_filler: bool = False
    """Whether a rank runs this only because it has no rows left and others have; its loss is left out."""


@dataclass(frozen=True)
class StepPlan:
    """What one rank computes in a step, the tokens of its own share, and the position after the step."""

    micro_batches: list[PlannedMicroBatch]
    tokens: int
    after: Any
    """The loader's position once this step is made."""


@dataclass(frozen=True)
class PreparedStep(Generic[Batch]):
    plan: StepPlan
    micro_batches: list[MicroBatch[Batch]]
    waited: float
    """Seconds for which training waited for this step's batches."""


class Prefetcher(Generic[Batch]):
    """Prepares the batches of the next steps while a step is trained.

    A thread reads the samples of a micro-batch. The thread makes the batch itself or, with ``processes``, has a process
    make it. The batch is the same either way. Ahead of the step that is trained, whole steps are begun until they
    have two micro-batches or more for each process (without processes, two or more), which bounds the memory.

    With ``processes``, augment and collate may be a user's, and may draw from the generators of Python, NumPy or
    torch, which checkpoints hold and dropout uses. So in this process augment and collate run in the training thread
    alone, each batch when its step is due, until a process has started. A process's first batch is also made here.
    If the two differ, or a process fails later or draws from such a generator, nothing is made ahead from then on.

    Args:
        maker: what makes a batch.
        ahead: False to make each batch only when its step is due.
        processes: how many make batches; 0 for none besides this one.
        finish: called in this process with each batch that was made ahead, such as to pin its memory.
        timeout: longest wait for a process, in seconds.
    """

    def __init__(
        self,
        maker: BatchMaker[Batch],
        *,
        ahead: bool = True,
        processes: int = 0,
        finish: Callable[[Batch], Batch] | None = None,
        timeout: float = threading.TIMEOUT_MAX,
    ) -> None:
        self._maker = maker
        self._processes = processes
        self._finish = finish or _given
        self._timeout = timeout
        self._ahead = 2 * max(1, processes) if ahead else 0
        self._is_deferred = not ahead
        """Whether batches are made at their step."""
        self._is_compared = False
        """Whether the first batch of a process has been compared with the same batch made in this process."""
        self._preparer: _Preparer[Batch] | None = None
        self._put_back_generators: Callable[[], None] | None = None
        """Undoes the newest step's random draws; None if none of its batches was made in the training thread."""

    def steps(
        self, plan: Callable[[bool], StepPlan | None], first: int, last: int
    ) -> Iterator[tuple[int, PreparedStep[Batch]]]:
        """(step, its batches) for the steps after ``first``, up to and with ``last``.

        Args:
            plan: plans the next step, in this thread; it may wait for other ranks, which all plan at the same
                moments. Its argument says whether an earlier step is still to be trained. If so, it may return None
                instead of raising an error: it is called again after that step, and raises at the step that fails.
        """
        planned = deque[tuple[StepPlan, list[Callable[[], Batch]]]]()
        try:
            for step in range(first + 1, last + 1):
                began = time.perf_counter()
                while step + len(planned) <= last and (not planned or self._count_ahead(planned) < self._ahead):
                    found = plan(bool(planned))
                    if found is None:
                        break
                    planned.append((found, self._begin(found)))
                now, results = planned.popleft()
                self._put_back_generators = None
                each = zip(results, now.micro_batches, strict=True)
                micro_batches = [MicroBatch(result(), micro.is_filler) for result, micro in each]
                yield step, PreparedStep(now, micro_batches, time.perf_counter() - began)
        finally:
            self.close()

    @staticmethod
    def _count_ahead(planned: deque[tuple[StepPlan, list[Callable[[], Batch]]]]) -> int:
        """Micro-batches of the steps after the next one."""
        return sum(len(results) for _, results in planned) - len(planned[0][1])

    def _begin(self, plan: StepPlan) -> list[Callable[[], Batch]]:
        """Begin to make the batches of a step; each returned function waits for one batch, or makes it."""
        reads = [micro.read for micro in plan.micro_batches]
        preparer = self._started_preparer()
        if preparer is None:
            return [partial(self._make, read) for read in reads]
        return [partial(self._result, read, preparer.submit(read)) for read in reads]

    def _make(self, read: Callable[[], RawBatch]) -> Batch:
        self._put_back_generators = self._put_back_generators or note_host_generators()
        return self._maker(read())

    def undraw(self) -> None:
        """Put the generators of the host back to where they were before the newest step's batches were made."""
        if self._put_back_generators is not None:
            self._put_back_generators()

    def _started_preparer(self) -> "_Preparer[Batch] | None":
        """The preparer of batches; None as long as no batch is made ahead."""
        if self._preparer is None and not self._is_deferred:
            function = pickled(_WorkerMaker(self._maker), ACTIVITY) if self._processes else None
            if self._processes and function is None:
                self._is_deferred = True
                return None
            pool = function and WorkerPool(function, self._processes, timeout=self._timeout, activity=ACTIVITY)
            self._preparer = _Preparer(self._maker, self._finish, pool or None)
        return self._preparer if self._preparer is not None and self._preparer.has_started else None

    def _result(self, read: Callable[[], RawBatch], future: Future[Batch]) -> Batch:
        """The batch that was begun; made here if a process failed."""
        if self._preparer is None:
            return self._make(read)
        failure: str | None = None
        try:
            batch = self._preparer.result(future)
        except Exception as error:  # noqa: BLE001 - if it comes up in this process, too, _make raises it
            batch, failure = self._make(read), str(error)
        if failure is None and self._processes and not self._is_compared:
            given, batch, self._is_compared = batch, self._make(read), True
            if _values(given) != _values(batch):
                failure = (
                    "a process makes another batch than this one, of the same samples: augment and collate may depend "
                    "on nothing that is set after the task's __init__, nor on what they change, such as a generator"
                )
        if failure is not None:
            logger.warning("from now on each batch is made at its step, and not ahead: %s", failure)
            self._is_deferred = True
            self.close()
        return batch

    def close(self) -> None:
        """End the thread and the processes. The end of ``steps`` does so, too, but late where an exception's traceback
        keeps the generator alive. Batches that were made ahead are lost; positions do not count them."""
        if self._preparer is not None:
            self._preparer.close()
            self._preparer = None


def _given(batch: Batch) -> Batch:
    return batch


class _Preparer(Generic[Batch]):
    """A thread that makes batches in the order in which they were asked for, or has them made in the processes of a
    pool."""

    def __init__(
        self, make: Callable[[RawBatch], Batch], finish: Callable[[Batch], Batch], pool: WorkerPool | None
    ) -> None:
        self._make = make
        self._finish = finish
        self._pool = pool
        self._started = pool.start() if pool else []
        self._queue = SimpleQueue[tuple[Callable[[], RawBatch], Future[Batch]] | None]()
        self._is_closed = False
        self._has_one_core = threading.Event()
        self._thread = threading.Thread(target=self._run, name="drawbar-batches", daemon=True)
        threads = torch.get_num_threads()
        self._thread.start()
        self._has_one_core.wait()
        torch.set_num_threads(threads)  # without this, threads that start later would get the 1 of _run

    @property
    def has_started(self) -> bool:
        """Whether a batch that is asked for now is begun at once: a process takes seconds to start."""
        return self._pool is None or any(started.done() for started in self._started)

    def submit(self, read: Callable[[], RawBatch]) -> Future[Batch]:
        future = Future[Batch]()
        self._queue.put((read, future))
        return future

    def result(self, future: Future[Batch]) -> Batch:
        """The batch, or the error that came up in making it.

        Raises:
            WorkerFailed: making it failed in a process.
            UserError: a process died, or gave no result in time.
        """
        if self._pool is not None:
            return cast(Batch, self._pool.result(future))
        began = time.monotonic()
        while not wait_for([future], TELL_SECONDS).done:
            logger.info("training waits for its next batch: %s (%.0f s)", ACTIVITY, time.monotonic() - began)
        return future.result()

    def close(self) -> None:
        self._is_closed = True
        self._queue.put(None)
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            logger.warning("the thread for %s has not ended after %.0f s, and is left running", ACTIVITY, CLOSE_SECONDS)
        if self._pool is not None:
            self._pool.close()

    def _run(self) -> None:
        torch.set_num_threads(1)  # for this thread alone: the other cores are for the step
        torch.get_num_threads()  # without this, the first operation would take the number that any thread set last
        self._has_one_core.set()
        while (asked := self._queue.get()) is not None:
            read, future = asked
            if self._is_closed:
                continue
            try:
                self._prepare(read(), future)
            except BaseException as error:  # noqa: BLE001 - training raises it, at its step
                future.set_exception(error)

    def _prepare(self, raw: RawBatch, future: Future[Batch]) -> None:
        if self._pool is None:
            future.set_result(self._finish(self._make(raw)))
        else:
            self._pool.submit(raw).add_done_callback(partial(self._receive, future))

    def _receive(self, future: Future[Batch], sent: Future[bytes]) -> None:
        """Runs in a thread of the pool."""
        try:
            future.set_result(self._finish(pickle.loads(sent.result())))
        except BaseException as error:  # noqa: BLE001 - training raises it, at its step
            future.set_exception(error)


@dataclass(frozen=True)
class _WorkerMaker(Generic[Batch]):
    """Makes batches in a worker process, and gives them as bytes.

    Raises:
        WorkerFailed: making the batch failed, or drew random numbers that would differ from process to process.
    """

    make: BatchMaker[Batch]

    def __call__(self, raw: RawBatch) -> bytes:
        before = rng_bytes()
        try:
            made = _pickle(self.make(raw))
        except Exception as error:  # noqa: BLE001 - the training process makes the batch anew, and raises it
            what = error.what.partition("\n")[0] if isinstance(error, UserError) else cause(error)
            raise WorkerFailed(
                f"in a worker process, but not in this one, {what}; a worker builds its own task, with what __init__ "
                "sets, and nothing that is set later"
            ) from None
        if rng_bytes() != before:
            raise WorkerFailed(
                "the task's augment or collate draws from a generator that checkpoints hold (of torch, numpy or "
                "random): let augment draw from its rng"
            )
        return made


class _Pickler(pickle.Pickler):
    """Pickles a tensor's values as plain bytes. Torch sends tensors between processes in shared memory, of
    which containers have little, and which a killed process leaves behind."""

    def reducer_override(self, found: Any) -> Any:
        if type(found) is not torch.Tensor or found.device.type != "cpu" or not found.is_contiguous():
            return NotImplemented
        values = pickle.PickleBuffer(found.detach().reshape(-1).view(torch.uint8).numpy())
        return _tensor, (values, found.dtype, found.shape)


def _tensor(values: bytearray, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
    return torch.frombuffer(values, dtype=dtype).reshape(shape) if len(values) else torch.empty(shape, dtype=dtype)


class _ValuesPickler(pickle.Pickler):
    """Gives equal bytes for equal values, whatever objects hold them, and however tensors lie in memory."""

    def reducer_override(self, found: Any) -> Any:
        if not isinstance(found, torch.Tensor):
            return NotImplemented
        values = found.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return _tensor, (values, found.dtype, found.shape)


def _values(batch: Any) -> bytes:
    room = io.BytesIO()
    pickler = _ValuesPickler(room, protocol=5)
    pickler.fast = True  # objects that are used twice are written twice
    pickler.dump(batch)
    return room.getvalue()


def _pickle(batch: Any) -> bytes:
    room = io.BytesIO()
    _Pickler(room, protocol=5).dump(batch)
    return room.getvalue()
