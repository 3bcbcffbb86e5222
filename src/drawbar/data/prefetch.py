"""``Prefetcher``: builds batches ahead of training, in a thread of this process or in worker processes."""

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
from drawbar.data.encode import WorkerFailed, WorkerPool, pickled
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
LOG_SECONDS = 60.0
"""Seconds between log lines about training waiting for its batches."""
CLOSE_SECONDS = 60.0
"""Maximum wait for the micro-batch being built when training ends."""


@dataclass(frozen=True)
class RawRow:
    """The encoded samples of a row."""

    samples: list[Sample]
    join: Join


@dataclass(frozen=True)
class RawBatch:
    """The rows of a micro-batch, read in this process and possibly sent to a worker."""

    rows: list[RawRow]
    epoch: int


def unchanged(sample: Sample, epoch: int) -> Sample:
    """The ``Augment`` of samples that are the same in every epoch."""
    return sample


@dataclass(frozen=True)
class BatchMaker(Generic[Batch]):
    """Builds a batch from raw rows: augment, join and collate. Can run in another process; picklable if its members
    are."""

    collate: Collate[Batch]
    augment: Augment = unchanged

    def __call__(self, raw: RawBatch) -> Batch:
        return self.collate([self._row(row, raw.epoch) for row in raw.rows])

    def _row(self, row: RawRow, epoch: int) -> Sample:
        return row.join([self.augment(sample, epoch) for sample in row.samples])


@dataclass(frozen=True)
class PlannedMicroBatch:
    """The rows of a micro-batch that are not read yet."""

    read: Callable[[], RawBatch]
    """May be called in another thread."""
    is_padding: bool = False


@dataclass(frozen=True)
class MicroBatch(Generic[Batch]):
    """One forward on one rank."""

    batch: Batch
    is_padding: bool = False
    """Whether a rank runs this only because it has no rows left while others do; its loss is ignored."""


@dataclass(frozen=True)
class StepPlan:
    """One rank's micro-batches in a step, the tokens of its share, and the position after the step."""

    micro_batches: list[PlannedMicroBatch]
    tokens: int
    after: Any
    """The loader's position after this step."""


@dataclass(frozen=True)
class PreparedStep(Generic[Batch]):
    plan: StepPlan
    micro_batches: list[MicroBatch[Batch]]
    waited: float
    """Seconds that training waited for this step's batches."""


class Prefetcher(Generic[Batch]):
    """Builds the batches of the next steps while a step is trained. A thread reads the samples of a micro-batch, and
    builds the batch itself or, with ``workers``, sends them to a worker process. The batch is the same either way. To
    bound memory, whole steps are prefetched only until there are at least two micro-batches per worker (without
    workers, at least two).

    A user's augment and collate may draw from the generators of Python, NumPy or torch, which checkpoints store and
    dropout uses. In another thread of this process, they would do so at arbitrary times. So without ``workers``,
    callers pass ``prefetch=False`` if augment or collate is user-defined. With ``workers``, each batch is built in the
    training thread, when its step is due, until a worker has started. The first batch built by any worker is also built
    in this process: if the two differ, or a worker later fails or draws from such a generator, prefetching stops.

    Args:
        maker: builds a batch.
        prefetch: False to build each batch only when its step is due.
        workers: number of worker processes; 0 to use only this process.
        finish: called in this process with each prefetched batch, for example to pin its memory.
        timeout: maximum wait for a process, in seconds.
    """

    def __init__(
        self,
        maker: BatchMaker[Batch],
        *,
        prefetch: bool = True,
        workers: int = 0,
        finish: Callable[[Batch], Batch] | None = None,
        timeout: float = threading.TIMEOUT_MAX,
    ) -> None:
        self._maker = maker
        self._workers = workers
        self._finish = finish or _as_it_is
        self._timeout = timeout
        self._prefetch_count = 2 * max(1, workers) if prefetch else 0
        self._is_deferred = not prefetch
        """Whether each batch is built only when its step is due."""
        self._is_compared = False
        """Whether the workers' first batch has been compared with the same batch built in this process."""
        self._preparer: _Preparer[Batch] | None = None
        self._restore_generators: Callable[[], None] | None = None
        """Undoes the latest step's random draws; None if none of its batches was built in the training thread."""

    def steps(
        self, plan: Callable[[bool], StepPlan | None], first: int, last: int
    ) -> Iterator[tuple[int, PreparedStep[Batch]]]:
        """Yield (step, its batches) for the steps after ``first``, up to and including ``last``.

        Args:
            plan: plans the next step, in this thread; may wait for other ranks, which plan at the same points. Its
                argument is whether an earlier step is still to be trained. If so, it may return None instead of raising
                an error, and is called again after that step, so that it raises at the step that fails.
        """
        planned = deque[tuple[StepPlan, list[Callable[[], Batch]]]]()
        try:
            for step in range(first + 1, last + 1):
                began = time.perf_counter()
                self._restore_generators = None  # if planning fails, keep the draws of the previous step
                while step + len(planned) <= last and (
                    not planned or self._count_prefetched(planned) < self._prefetch_count
                ):
                    found = plan(bool(planned))
                    if found is None:
                        break
                    planned.append((found, self._start_step(found)))
                now, results = planned.popleft()
                each = zip(results, now.micro_batches, strict=True)
                micro_batches = [MicroBatch(result(), micro.is_padding) for result, micro in each]
                yield step, PreparedStep(now, micro_batches, time.perf_counter() - began)
        finally:
            self.close()

    @staticmethod
    def _count_prefetched(planned: deque[tuple[StepPlan, list[Callable[[], Batch]]]]) -> int:
        """Number of micro-batches prefetched beyond the next step."""
        return sum(len(results) for _, results in planned) - len(planned[0][1])

    def _start_step(self, plan: StepPlan) -> list[Callable[[], Batch]]:
        """Start building the batches of a step; each returned function waits for one batch, or builds it."""
        reads = [micro.read for micro in plan.micro_batches]
        preparer = self._started_preparer()
        if preparer is None:
            return [partial(self._make, read) for read in reads]
        return [partial(self._result_or_made_here, read, preparer.submit(read)) for read in reads]

    def _make(self, read: Callable[[], RawBatch]) -> Batch:
        self._restore_generators = self._restore_generators or note_host_generators()
        return self._maker(read())

    def restore_generators(self) -> None:
        """Restore the host's random generators to their state before the latest step's batches were built."""
        if self._restore_generators is not None:
            self._restore_generators()

    def _started_preparer(self) -> "_Preparer[Batch] | None":
        """The preparer of batches; None while there is no prefetching."""
        if self._preparer is None and not self._is_deferred:
            function = pickled(_WorkerMaker(self._maker), ACTIVITY) if self._workers else None
            if self._workers and function is None:
                self._is_deferred = True
                return None
            pool = function and WorkerPool(function, self._workers, timeout=self._timeout, activity=ACTIVITY)
            self._preparer = _Preparer(self._maker, self._finish, pool or None)
        return self._preparer if self._preparer is not None and self._preparer.has_started else None

    def _result_or_made_here(self, read: Callable[[], RawBatch], future: Future[Batch]) -> Batch:
        """Wait for a batch; build it in this process if a worker failed."""
        if self._preparer is None:
            return self._make(read)
        failure: str | None = None
        try:
            batch = self._preparer.result(future)
        except Exception as error:  # noqa: BLE001 - if it also occurs in this process, _make raises it
            batch, failure = self._make(read), str(error)
        if failure is None and self._workers and not self._is_compared:
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
        """End the thread and the workers. The end of ``steps`` also does so, but late if an exception's traceback keeps
        the generator alive. Prefetched batches are discarded; positions do not count them."""
        if self._preparer is not None:
            self._preparer.close()
            self._preparer = None


def _as_it_is(batch: Batch) -> Batch:
    return batch


class _Preparer(Generic[Batch]):
    """A thread that builds batches in the order of the requests, or has them built in a worker pool."""

    def __init__(
        self, make: Callable[[RawBatch], Batch], finish: Callable[[Batch], Batch], pool: WorkerPool | None
    ) -> None:
        self._make = make
        self._finish = finish
        self._pool = pool
        self._started = pool.start() if pool else []
        self._queue = SimpleQueue[tuple[Callable[[], RawBatch], Future[Batch]] | None]()
        self._is_closed = False
        self._is_single_threaded = threading.Event()
        self._thread = threading.Thread(target=self._run, name="drawbar-batches", daemon=True)
        threads = torch.get_num_threads()
        self._thread.start()
        self._is_single_threaded.wait()
        torch.set_num_threads(threads)  # later threads would inherit the 1 that _run sets

    @property
    def has_started(self) -> bool:
        """Whether a batch can be started at once: with workers, once the first has started, which takes seconds."""
        return self._pool is None or any(started.done() for started in self._started)

    def submit(self, read: Callable[[], RawBatch]) -> Future[Batch]:
        future = Future[Batch]()
        self._queue.put((read, future))
        return future

    def result(self, future: Future[Batch]) -> Batch:
        """Wait for a batch; raises the error that occurred while building it.

        Raises:
            WorkerFailed: building it failed in a process.
            UserError: a process died, or returned no result in time.
        """
        if self._pool is not None:
            return cast(Batch, self._pool.result(future))
        began = time.monotonic()
        while not wait_for([future], LOG_SECONDS).done:
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
        torch.set_num_threads(1)  # for this thread only: the other cores are for the step
        torch.get_num_threads()  # otherwise the first operation would use the number that any thread set last
        self._is_single_threaded.set()
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
    """Builds batches in a worker process, and returns them pickled.

    Raises:
        WorkerFailed: building the batch failed, or drew random numbers that would differ between processes.
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
    """Pickles a tensor's values as plain bytes. torch would send tensors between workers in shared memory, which is
    small in containers, and left behind by killed processes."""

    def reducer_override(self, found: Any) -> Any:
        if type(found) is not torch.Tensor or found.device.type != "cpu" or not found.is_contiguous():
            return NotImplemented
        values = pickle.PickleBuffer(found.detach().reshape(-1).view(torch.uint8).numpy())
        return _tensor, (values, found.dtype, found.shape)


def _tensor(values: bytearray, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
    return torch.frombuffer(values, dtype=dtype).reshape(shape) if len(values) else torch.empty(shape, dtype=dtype)


class _ValuesPickler(pickle.Pickler):
    """Gives equal bytes for equal values, regardless of object identity and of the tensors' memory layout."""

    def reducer_override(self, found: Any) -> Any:
        if not isinstance(found, torch.Tensor):
            return NotImplemented
        values = found.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return _tensor, (values, found.dtype, found.shape)


def _values(batch: Any) -> bytes:
    buffer = io.BytesIO()
    pickler = _ValuesPickler(buffer, protocol=5)
    pickler.fast = True  # objects that are used twice are written twice
    pickler.dump(batch)
    return buffer.getvalue()


def _pickle(batch: Any) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=5).dump(batch)
    return buffer.getvalue()
