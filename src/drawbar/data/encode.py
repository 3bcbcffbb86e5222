"""Encodes records to columns of samples, in this process or in worker processes."""

import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from multiprocessing import resource_tracker
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from drawbar.config.io.user_modules import cause
from drawbar.data.columns import FieldKinds, Piece, Sample, describe_kind_mismatch, field_kinds, number_dtype, stack
from drawbar.data.readers import Record
from drawbar.data.sources import NumberedRecord, Reading
from drawbar.distributed.interrupt import INTERRUPT_SIGNALS, REQUEUE_SIGNALS
from drawbar.errors import ExitCode, UserError
from drawbar.runtime.log import logger
from drawbar.threads import usable_cores


class WorkerFailed(Exception):
    """A call failed in a worker process, which can still handle further calls."""


class WorkerPool:
    """A pool of spawned processes for one function. They exit when this process exits, even if it is killed.

    Args:
        function: the function to call, as returned by ``pickled``.
        count: number of processes.
        timeout: maximum wait for a result, in seconds.
        activity: what the processes do, for messages, such as ``encoding records``.
    """

    def __init__(self, function: bytes, count: int, *, timeout: float, activity: str) -> None:
        self.count = count
        self._timeout = timeout
        self._activity = activity
        self._others = set(multiprocessing.active_children())
        _start_tracker()
        # Spawned, not forked: a fork would copy locks held by torch's and gloo's threads, which no one could release.
        self._executor = ProcessPoolExecutor(
            count, multiprocessing.get_context("spawn"), initializer=_start_worker, initargs=(function,)
        )

    def start(self) -> list[Future[None]]:
        """Start all processes now; each future completes when a process is ready. Otherwise processes start on first
        use."""
        return [self._executor.submit(_do_nothing) for _ in range(self.count)]

    def submit(self, *arguments: Any) -> Future[Any]:
        """Call the function in one of the processes. Thread-safe."""
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
        """The error for a process that died (BrokenProcessPool) or returned no result in time."""
        died = isinstance(error, BrokenProcessPool)
        fewer = f"where memory ran out, use fewer processes (data.workers={self.count // 2}); "
        return UserError(
            f"a process for {self._activity} was killed, or could not start"
            if died
            else f"a process for {self._activity} returned no result for {self._timeout:.0f} s",
            where="data.workers",
            remedy=f"{fewer if self.count > 1 else ''}a script that starts training must do so under "
            '`if __name__ == "__main__":`; data.workers=0 uses a single process and shows what happens; to wait '
            "longer, raise launch.limits.start (encoding) or launch.timeout (batches)",
            exit_code=ExitCode.FAILED,
        )

    def finish(self) -> None:
        """Wait for the processes to finish all submitted calls and exit."""
        self._executor.shutdown()

    def close(self) -> None:
        """End the processes at once: pending results are not needed, and a process may be stuck."""
        for worker in set(multiprocessing.active_children()) - self._others:
            worker.kill()
        self._executor.shutdown(cancel_futures=True)


def pickled(function: Callable[..., Any], activity: str, *examples: Any) -> bytes | None:
    """Pickle the function for a ``WorkerPool``; None, with a warning, if it cannot be sent to other processes.

    Args:
        examples: example arguments of a call, which are pickled as a test.
    """
    try:
        found = pickle.dumps(function)
        pickle.dumps(examples)
    except Exception as error:  # noqa: BLE001 - pickling runs the code of any class, which may raise anything
        logger.warning(
            "%s in this process only: the task or its records cannot be sent to others (%s)", activity, error
        )
        return None
    if b"__main__" in found and not hasattr(sys.modules["__main__"], "__file__"):  # a worker could not import it
        logger.warning("%s in this process only: the task is defined in a notebook or console, not in a file", activity)
        return None
    return found


def _start_tracker() -> None:
    """Start multiprocessing's resource tracker, which removes the semaphores of a pool whose owner was killed, without
    its warning, which is meant for programmers."""
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
"""In a worker: the function that it calls."""


def _start_worker(function: bytes) -> None:
    # all processes of a terminal or job receive these signals; the parent ends its workers
    for number in (*INTERRUPT_SIGNALS, *REQUEUE_SIGNALS):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")  # one process per core is enough
    global _function
    try:
        _function = pickle.loads(function)
    except Exception as error:  # noqa: BLE001 - loading builds the task, by the user's code
        _function = partial(_refuse, f"{type(error).__name__}: {error}")
    if "torch" in sys.modules:  # the script may have imported torch before the variable was set
        sys.modules["torch"].set_num_threads(1)


def _end_with_parent() -> None:
    """Exit with the parent: a killed parent cannot end its workers, and they would wait for work forever."""
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
    """Runs once a worker has started."""


Encode = Callable[[Record], Any]
"""record → a sample, a list of samples, or None to drop the record."""
OnProgress = Callable[[int, int], None]
"""Called with (records done, total records) from time to time."""

RESERVED_FIELDS = ("id", "ids", "segment_ids", "decoder_segment_ids")
CHUNK_RECORDS = 256
CHUNK_SECONDS = 0.5
TRIAL_SECONDS = 2.0
MIN_WORK_SECONDS = 15.0  # less remaining work is not worth starting workers, which import all that the task imports
MOST_WORKERS = 16
ACTIVITY = "encoding records"


@dataclass
class Chunk:
    """The samples of some consecutive records."""

    records: int = 0
    seconds: float = 0.0
    pieces: dict[str, Piece] = field(default_factory=dict)
    record_of: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    """For each sample, the number of its record."""
    dropped: int = 0
    """Number of records for which encode returned no sample."""
    truncated: int = 0
    """Number of samples that encode truncated."""
    where: str = ""
    """File and line of the first record that gave samples."""
    skipped: list[UserError] = field(default_factory=list)
    """The errors of skipped bad records, each with the record's location."""
    fatal: UserError | None = None
    """The error that ends encoding; the chunk has the records before the failing one."""


def encode_chunk(encode: Encode, numbered: Iterator[NumberedRecord], skip: bool, seconds: float) -> Chunk:
    """Encode records until there are no more, ``seconds`` have passed, or a record is fatal: see ``Chunk.fatal``."""
    chunk = Chunk()
    started = time.monotonic()
    samples: list[Sample] = []
    record_of: list[int] = []
    kinds: FieldKinds | None = None
    for index, where, record in numbered:
        chunk.records += 1
        try:
            encoded = _encode_one(record, encode)
        except UserError as error:
            error.where = error.where or where
            if not skip:
                chunk.fatal = error
                break
            chunk.skipped.append(error)
            continue
        chunk.dropped += not encoded
        chunk.truncated += sum(bool(sample.pop("truncated", False)) for sample in encoded)
        found_kinds = [field_kinds(sample) for sample in encoded]
        kinds = kinds or next(iter(found_kinds), None)
        faults = [describe_kind_mismatch(kinds, found) for found in found_kinds if kinds and found != kinds]
        if faults:
            chunk.fatal = field_kinds_error(faults[0], where)
            break
        chunk.where = chunk.where or (where if encoded else "")
        samples += encoded
        record_of += [index] * len(encoded)
        if time.monotonic() - started > seconds:
            break
    chunk.pieces = stack(samples)
    chunk.record_of = np.array(record_of, dtype=np.int64)
    chunk.seconds = time.monotonic() - started
    return chunk


def field_kinds_error(fault: str, where: str) -> UserError:
    return UserError(
        fault,
        where=where,
        remedy="let the task's encode return the same fields for all samples, "
        "each always a number, always a text, or always an array of the same number of dims",
    )


def _encode_one(record: Record, encode: Encode) -> list[Sample]:
    """The samples of one record. Every failure is a UserError, which may not name the record's location yet."""
    try:
        encoded = encode(record)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise UserError(
            f"the task's encode failed on a record: {cause(error)}",
            remedy="fix the record, or let encode return None to drop it",
        ) from error
    if encoded is None:
        return []
    return [_compact(sample) for sample in (encoded if isinstance(encoded, list) else [encoded])]


def _compact(sample: Any) -> Sample:
    """The sample with its lists and tensors converted to numpy arrays."""
    if not isinstance(sample, Mapping):  # a tokenizer's BatchEncoding is a mapping, but no dict
        raise UserError(
            f"the task's encode returned {type(sample).__name__}",
            remedy="return a dict of arrays, a list of such dicts, or None to drop the record",
        )
    taken = [name for name in RESERVED_FIELDS if name in sample]
    if taken:
        raise UserError(
            f"a sample has a field {taken[0]!r}, a name reserved by drawbar",
            remedy="give the field another name in the task's encode",
        )
    compact = {str(name): _field_or_user_error(name, value) for name, value in sample.items()}
    tokens = compact.get("input_ids")
    if tokens is not None and (not isinstance(tokens, np.ndarray) or tokens.ndim != 1 or not len(tokens)):
        raise UserError(
            "the input_ids of a sample are not a list of one or more token numbers",
            remedy="let the task's encode return one sample without padding, or None if there are no tokens",
        )
    if not isinstance(compact.get("truncated", False), bool | int):
        raise UserError(
            "the field 'truncated' of a sample is neither true nor false",
            remedy="set it to whether encode truncated the sample, or give the field another name",
        )
    return compact


def _field_or_user_error(name: str, value: Any) -> Any:
    try:
        return _field(name, value)
    except UserError:
        raise
    except Exception as error:  # converting a user's object to an array may raise anything
        raise UserError(
            f"the field {name!r} of a sample cannot be stored: {cause(error)}",
            remedy="return numbers of at most 64 bits, texts, or arrays of numbers with rows of equal length",
        ) from error


def _field(name: str, value: Any) -> Any:
    """A plain scalar unchanged; else an array, with 32 bits for a list of floats, or for integers that fit."""
    if isinstance(value, bool | float | str):
        return value
    if isinstance(value, int):
        np.array(value, dtype=number_dtype(value))  # raises OverflowError if no column can hold the value
        return value
    array = np.asarray(value)
    if array.ndim == 0 and array.dtype.kind in "biufU":
        return _field(name, array.item())
    if array.dtype.kind not in "biuf":
        what = "a list of texts" if array.dtype.kind == "U" else f"{type(value).__name__}, and not of numbers"
        raise UserError(
            f"the field {name!r} of a sample is {what}",
            remedy="return numbers, a text, or lists and arrays of numbers; leave other values in the record",
        )
    return _narrow(array) if isinstance(value, list | tuple) else array


def _narrow(array: NDArray[Any]) -> NDArray[Any]:
    if not array.size:
        return array.astype(np.bool_)  # an empty list has no dtype: bool can be promoted to any other
    if array.dtype == np.float64:
        return array.astype(np.float32)
    limits = np.iinfo(np.int32)
    fits = array.dtype == np.int64 and limits.min <= array.min() and array.max() <= limits.max
    return array.astype(np.int32) if fits else array


def encode_chunks(
    reading: Reading, encode: Encode, *, skip: bool, workers: int | Literal["auto"], timeout: float
) -> Generator[Chunk, None, None]:
    """Chunks of samples, in the order of the records. The caller must close the generator: it ends the workers.

    Args:
        reading: iterated only in this process, just far enough ahead that no worker waits for records.
        skip: collect the errors of bad records in ``Chunk.skipped``, and continue.
        workers: number of processes. ``auto``: none if this process is fast enough, else one per core, at most 16.
        timeout: maximum wait for a worker, in seconds.

    Raises:
        UserError: a worker died, or did not answer within ``timeout``.
    """
    numbered = iter(reading)
    if workers == "auto":
        done, seconds = yield from _encode_here(encode, numbered, skip, TRIAL_SECONDS)
        cores = usable_cores()
        worth = cores > 1 and done and seconds / done * (reading.total - done) > MIN_WORK_SECONDS
        count = min(cores, MOST_WORKERS) if worth else 0
    else:
        count = min(workers, reading.total) if workers else 0
    first = next(numbered, None)
    if first is None:
        return
    numbered = chain([first], numbered)
    encoder = pickled(_ChunkEncoder(encode, skip), ACTIVITY, first) if count else None
    if encoder is None:
        yield from _encode_here(encode, numbered, skip, float("inf"))
    else:
        yield from _encode_in_workers(encoder, numbered, count, timeout)


def _encode_here(
    encode: Encode, numbered: Iterator[NumberedRecord], skip: bool, seconds: float
) -> Generator[Chunk, None, tuple[int, float]]:
    """Encode in this process, for ``seconds`` or to the end; returns (records encoded, seconds spent)."""
    done, spent = 0, 0.0
    while spent < seconds:
        chunk = encode_chunk(encode, islice(numbered, CHUNK_RECORDS), skip, CHUNK_SECONDS)
        if not chunk.records:
            break
        done += chunk.records
        spent += chunk.seconds
        yield chunk
    return done, spent


def _encode_in_workers(
    encoder: bytes, numbered: Iterator[NumberedRecord], count: int, timeout: float
) -> Iterator[Chunk]:
    pool = WorkerPool(encoder, count, timeout=timeout, activity=ACTIVITY)
    pending: deque[Future[Chunk]] = deque()
    done, seconds = 0, 0.0
    try:
        while True:
            while len(pending) < 2 * count:  # bounds the memory, and keeps all workers busy
                size = max(1, min(CHUNK_RECORDS, round(CHUNK_SECONDS * done / seconds))) if seconds else 1
                records = list(islice(numbered, size))
                if not records:
                    break
                pending.append(pool.submit(records))
            if not pending:
                pool.finish()
                return
            try:
                chunk = pool.result(pending.popleft())
            except WorkerFailed as error:
                remedy = "let the task's __init__ use only its TaskContext; or encode in this process: data.workers=0"
                raise UserError(str(error), where="data.workers", remedy=remedy) from error
            done += chunk.records
            seconds += chunk.seconds
            yield chunk
    finally:
        pool.close()


@dataclass(frozen=True)
class _ChunkEncoder:
    """Encodes a chunk of records in a worker."""

    encode: Encode
    skip: bool

    def __call__(self, numbered: list[NumberedRecord]) -> Chunk:
        return encode_chunk(self.encode, iter(numbered), self.skip, float("inf"))
