"""From a configuration to batches (records, samples, rows, loader) for training, evaluation and prediction."""

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch

from drawbar.config.rules.rule_table import MICRO_BATCH_TOKENS, resolve_micro_batch
from drawbar.config.schema.run_config import RunConfig
from drawbar.data.cache import (
    DigestCache,
    content_key,
    digest_for_all,
    encode_cached,
    explain_cache_miss,
    file_digest,
    is_cached,
    records_digest,
    remove_cached,
)
from drawbar.data.dataset import EncodedDataset, NoSamples, Sample, encode_in_memory
from drawbar.data.loader import Loader, MicroBatchSize, Rows, SampleRows, TrainLoader
from drawbar.data.packing import (
    CACHED_FROM,
    LabelPlacement,
    PackedRows,
    Plan,
    cached_plan_of_sources,
    packed_lengths,
    plan_sources,
)
from drawbar.data.prefetch import Augment, BatchMaker, Collate, Prefetcher, unchanged
from drawbar.data.sampler import Grouped, InOrder, Mixed, Sampler, Shuffled
from drawbar.data.sources import LocatedRecord, NumberedRecord, Reading, Record, Records, read_list
from drawbar.data.stream import StreamLoader, StreamSettings
from drawbar.distributed.process_group import Distributed
from drawbar.errors import ExitCode, UserError
from drawbar.evaluation.scoring import Split, parts_of
from drawbar.runtime.log import logger
from drawbar.tasks.batch import Batch
from drawbar.tasks.encoder import TaskEncoder, cache_inputs, code_of, settings_of
from drawbar.tasks.method_errors import is_user_defined, method_error
from drawbar.tasks.padding import train_collate
from drawbar.tasks.task import Task, records_of
from drawbar.tasks.user_methods import name_failing_method
from drawbar.tracking.console import Console
from drawbar.train.validation_share import warn_of_same_files, warn_of_share


def make_augment(task: Task, config: RunConfig, train: bool) -> Augment:
    """``task.augment`` with a generator that is a pure function of seed, epoch and sample."""
    return TaskAugment(task, config.run.seed, train) if task.augments else unchanged


@dataclass(frozen=True)
class TaskAugment:
    """See ``make_augment``. Picklable, as tasks are."""

    task: Task
    seed: int
    train: bool

    def __call__(self, sample: Sample, epoch: int) -> Sample:
        # a counter-based generator: no two samples or epochs share a random stream
        rng = np.random.Generator(np.random.Philox(key=[self.seed, epoch], counter=[0, 0, sample["id"], 0]))
        with name_failing_method(self.task):
            augmented = self.task.augment(sample, self.train, rng)
        if not isinstance(augmented, dict):
            raise method_error(
                self.task, "augment", f"returns {type(augmented).__name__}", "return the sample as a dict"
            )
        return {**augmented, "id": sample["id"], "ids": sample["ids"]}


@dataclass(frozen=True)
class _NamedCollate:
    """Wraps ``collate`` so that errors name the task's method. Picklable, as tasks are."""

    task: Task
    collate: Collate[Batch]

    def __call__(self, samples: list[Sample]) -> Batch:
        with name_failing_method(self.task):
            return self.collate(samples)


def batch_maker(task: Task, config: RunConfig) -> BatchMaker[Batch]:
    """The ``BatchMaker`` of training batches: the task's augment and collate."""
    return BatchMaker(_NamedCollate(task, train_collate(task, config)), make_augment(task, config, train=True))


def make_prefetcher(task: Task, config: RunConfig, device: torch.device, prefetch: bool) -> Prefetcher[Batch]:
    """The ``Prefetcher`` of training batches for ``data.workers``. ``auto`` prefetches in a thread, unless ``augment``
    or ``collate`` is user-defined: these may draw from the global random generators, as the step does.

    Args:
        prefetch: False to build each batch at its step, regardless of ``data.workers``.
    """
    workers = config.data.workers
    return Prefetcher(
        batch_maker(task, config),
        prefetch=prefetch and (not is_user_defined(task, "augment", "collate") if workers == "auto" else workers != 0),
        workers=0 if workers == "auto" else workers,
        finish=_Pinned(device) if device.type == "cuda" else None,
        timeout=config.launch.timeout,
    )


@dataclass(frozen=True)
class _Pinned:
    """Moves batches to pinned memory, from any thread."""

    device: torch.device

    def __call__(self, batch: Batch) -> Batch:
        with torch.cuda.device(self.device):  # else a new thread would make a CUDA context on device 0
            return batch.pin_memory()


SHOWN_BAD_RECORDS = 10
FIRST_RECORDS = 8
"""Number of records that a task is tried on."""
DEFAULT_EVAL_ROWS = 32
"""Default rows per evaluation forward if samples have no length in tokens."""


@dataclass(frozen=True)
class OpenedSplit:
    """One split of the data, before it is encoded."""

    name: str
    records: Sequence[Record]
    cache_inputs: dict[str, str] | None = None
    """The inputs of the cache key, by name; None if the samples cannot be cached, or are streamed."""
    digests: DigestCache | None = None
    """The stored digests of the files; saved once encoding has succeeded."""
    identity: list[Any] | None = None
    """Metadata of the files (size, mtime, ctime, inode), taken before they were read."""

    def check_unchanged(self) -> None:
        """Check, after a second reading of the files, that they have not changed since ``cache_inputs`` was computed.

        Raises:
            UserError: they have changed.
        """
        if (
            not isinstance(self.records, Records)
            or self.cache_inputs is None
            or self.records.identity() == self.identity
        ):
            return
        if self.records.digest(file_digest) != self.cache_inputs["the records"]:  # rewritten files may be identical
            raise UserError(
                f"the {self.name} data changed while they were read",
                where=f"data.{self.name}",
                remedy="start again when no other process is writing to them",
                exit_code=ExitCode.FAILED,
            )


def open_data(task: Task, config: RunConfig, world: Distributed) -> tuple[OpenedSplit, OpenedSplit | None]:
    """Open the training data and any validation data, without encoding, so that a missing file is reported early."""
    train = open_split(task, "train", config, world)
    if config.data.validation is None and config.data.validation_share is None:
        return train, None
    validation = open_split(task, "validation", config, world)
    warn_of_same_files(config.data, train.records, validation.records)
    return train, validation


def open_split(task: Task, name: str, config: RunConfig, world: Distributed) -> OpenedSplit:
    """Open one split of the data. Nothing is encoded.

    Raises:
        UserError: it cannot be read.
    """
    with world.working(f"reading {name}"), name_failing_method(task):
        records = records_of(task, name)
        if name == "train" and config.data.streaming:
            return OpenedSplit(name, _streamed(task, records))
        if not isinstance(records, Sequence):
            records = list(records)
    digests, identity = DigestCache(config.cache_dir), records.identity() if isinstance(records, Records) else None
    return OpenedSplit(name, records, _cache_inputs(task, records, name, digests, world), digests, identity)


def first_samples(opened: OpenedSplit, task: Task, config: RunConfig, world: Distributed, console: Console) -> Split:
    """The first samples of a split, to try a task on before the whole split is encoded; if all are already in
    the cache, the cached ones.

    Raises:
        UserError: the first records cannot be read or encoded, or no record gives a sample.
    """
    inputs = opened.cache_inputs
    with world.working(f"encoding the first records of {opened.name}"):
        if inputs is not None and not config.data.rebuild and is_cached(config.cache_dir, opened.name, inputs):
            return Split(opened.name, opened.records, _encode(task, opened, config, world, console))
        encode, on_bad_record = TaskEncoder(task, opened.name == "train"), config.data.on_bad_record
        numbered = iter(_reading(opened))
        while piece := list(islice(numbered, FIRST_RECORDS)):  # files are read only as far as these records
            with suppress(NoSamples):
                samples = encode_in_memory(_read_again(piece), encode, on_bad_record=on_bad_record)
                records = [one.record for one in piece]
                if opened.name == "train":
                    log_unread_columns(task, records)
                return Split(opened.name, records, samples)
        try:
            samples = encode_in_memory(_reading(opened), encode, on_bad_record=on_bad_record)
        except NoSamples as error:
            needed = task.needed_length
            if config.data.sequence_length < needed < math.inf:
                what = f"{error.what}: their prompts leave no room for an answer"
                remedy = f"set data.sequence_length to {needed} or more, which the shortest one needs"
                raise NoSamples(what, where=error.where, remedy=remedy) from error
            raise
        return Split(opened.name, opened.records, samples)


def log_unread_columns(task: Task, records: Iterable[Record]) -> None:
    """Log which columns of these records the task does not read, so that users notice a column they expect it to."""
    read: dict[str, bool] = {}
    for record in records:
        with suppress(Exception):  # a bad record, or user code that needs a plain dict: not a reason to end a run
            for column, is_read in task.parts_read(record).items():
                read[column] = is_read or read.get(column, False)
    unread = [column for column, is_read in read.items() if not is_read]
    if unread:
        logger.info("train: columns that the task does not read: %s", ", ".join(unread))


def load_data(
    task: Task,
    opened: tuple[OpenedSplit, OpenedSplit | None],
    config: RunConfig,
    world: Distributed,
    console: Console,
    complete: Callable[[Split], Split],
) -> tuple[Loader[Batch], Split | None, Split | None]:
    """The training batches of this rank; the training samples (None for a stream); and the validation data, if any.

    Args:
        complete: adds to an encoded split what its samples need besides (``with_reference``).
    """
    train, validation = opened
    loader, train_split = _load_train(task, train, config, world, console, True, complete)
    if validation is None:
        return loader, train_split, None
    validation_split = complete(encode_split(task, validation, config, world, console))
    parts_of(validation_split)  # a source without samples is refused before training
    if train_split is not None:
        warn_of_share(config.data, train_split, validation_split)
    return loader, train_split, validation_split


def load_split(task: Task, name: str, config: RunConfig, world: Distributed, console: Console) -> Split:
    """``open_split``, then ``encode_split``. Raises what these raise."""
    return encode_split(task, open_split(task, name, config, world), config, world, console)


def encode_split(task: Task, opened: OpenedSplit, config: RunConfig, world: Distributed, console: Console) -> Split:
    """Encode a split, or load it from the cache.

    Raises:
        UserError: it cannot be read, has no samples, or differs between processes.
    """
    name, records = opened.name, opened.records
    if opened.cache_inputs is not None:
        _log_cache_use(name, opened.cache_inputs, config, world)
    with world.working(f"encoding {name}"):
        samples = _encode(task, opened, config, world, console)
    logger.info("%s: %s", name, describe_samples(samples))
    if samples.skipped:
        count = f"{samples.skipped_count:,} bad record{'' if samples.skipped_count == 1 else 's'}"
        logger.warning("%s: %s left out:\n  %s", name, count, "\n  ".join(samples.skipped[:SHOWN_BAD_RECORDS]))
    fingerprints = world.all_gather(samples.fingerprint)
    if len(set(fingerprints)) > 1:
        odd = next(rank for rank, found in enumerate(fingerprints) if found != fingerprints[0])
        raise UserError(
            f"rank {odd} reads other {name} data than rank 0",
            where=f"data.{name}",
            remedy="give every process the same files; task.encode() must not depend on the process or on chance",
        )
    if opened.digests is not None:
        opened.digests.save()  # only now: a start that fails leaves nothing behind
    return Split(name, records, samples, kept=opened.cache_inputs is not None)


def _cache_inputs(
    task: Task, records: Sequence[Record], name: str, digests: DigestCache, world: Distributed
) -> dict[str, str] | None:
    """Digests of everything that the samples depend on, by name; None if any of it cannot be hashed."""
    with world.working(f"reading {name}"), name_failing_method(task):
        inputs = cache_inputs(task, name == "train")
        if inputs is None:
            return None
        of_records = None if isinstance(records, Records) else records_digest(records)
    if isinstance(records, Records):
        of_records = digest_for_all(records, digests, world)
    return None if of_records is None else {"the records": of_records, **inputs}


def _encode(task: Task, opened: OpenedSplit, config: RunConfig, world: Distributed, console: Console) -> EncodedDataset:
    """The samples of one split."""

    def progress(done: int, total: int) -> None:
        console.phase(f"encoding {opened.name}", done, total)
        world.set_activity(f"encoding {opened.name}: {done:,} of {total:,}")

    encode, read = TaskEncoder(task, opened.name == "train"), partial(_reading, opened)
    on_bad_record = config.data.on_bad_record
    if opened.cache_inputs is None:
        return encode_in_memory(read(), encode, progress=progress, on_bad_record=on_bad_record)
    return encode_cached(
        read,
        encode,
        inputs=opened.cache_inputs,
        cache=config.cache_dir,
        workers=config.data.workers,
        name=opened.name,
        on_bad_record=on_bad_record,
        progress=progress,
        timeout=config.launch.limits.start,
        eager=world.rank_info.local_rank == 0,
    )


def _reading(opened: OpenedSplit) -> Reading:
    if isinstance(opened.records, Records):
        return opened.records.reading(opened.check_unchanged)
    return read_list(opened.records, getattr(opened.records, "where", lambda number: f"{opened.name} record {number}"))


def _read_again(found: Sequence[NumberedRecord] | Sequence[LocatedRecord]) -> Reading:
    """A ``Reading`` over records that have already been read."""
    return read_list([one.record for one in found], [one.where for one in found].__getitem__)


def _log_cache_use(name: str, inputs: dict[str, str], config: RunConfig, world: Distributed) -> None:
    """Log whether the cache is used, and if not, why; with ``data.rebuild``, delete the cached samples first."""
    cache = config.cache_dir
    if config.data.rebuild:
        with world.barrier_after(f"removing encoded {name} data"):
            if world.rank_info.local_rank == 0:
                remove_cached(cache, name, inputs)
        logger.info("%s: encoding anew, as data.rebuild says", name)
    elif is_cached(cache, name, inputs):
        logger.info("%s: taken from the cache: nothing that it depends on has changed", name)
    else:
        why = explain_cache_miss(cache, name, inputs)
        logger.info("%s: encoding%s", name, f"; {why}" if why else "")


def describe_samples(samples: EncodedDataset) -> str:
    """Human-readable counts: ``4,012 samples of 655 records (3 dropped, 17 truncated), 1,980,312 tokens``."""
    left_out = [(samples.dropped, "dropped"), (samples.truncated, "truncated"), (samples.skipped_count, "bad")]
    notes = ", ".join(f"{count:,} {what}" for count, what in left_out if count)
    text = f"{len(samples):,} samples of {samples.records:,} records" + (f" ({notes})" if notes else "")
    return f"{text}, {samples.tokens:,} tokens" if "input_ids" in samples.fields else text


def make_loader(task: Task, config: RunConfig, world: Distributed, console: Console) -> Loader[Batch]:
    """The training batches of this rank, from encoded samples or from a stream, without prefetching."""
    opened = open_split(task, "train", config, world)
    return _load_train(task, opened, config, world, console, False, lambda split: split)[0]


def _load_train(
    task: Task,
    opened: OpenedSplit,
    config: RunConfig,
    world: Distributed,
    console: Console,
    prefetch: bool,
    complete: Callable[[Split], Split],
) -> tuple[Loader[Batch], Split | None]:
    """The training batches, and the samples they are built from (None for a stream)."""
    if isinstance(opened.records, Records) and config.data.streaming:
        return _stream_loader(task, opened.records, config, world, prefetch), None
    split = complete(encode_split(task, opened, config, world, console))
    with world.working("planning the rows"):
        sampler, rows = order_and_rows(task, split, config)
    loader = TrainLoader(
        rows,
        sampler,
        global_batch=config.train.global_batch,
        micro_batch=train_micro_batch(config, world, has_tokens="input_ids" in split.samples.fields),
        ranks=world.dp_ranks,
        prefetcher=make_prefetcher(task, config, world.device, prefetch),
    )
    return loader, split


def order_and_rows(task: Task, split: Split, config: RunConfig) -> tuple[Sampler, Rows]:
    """The sampler of a split, and the rows that it puts in order."""
    seed, samples = config.run.seed, split.samples
    weights = [source.weight for source in getattr(split.records, "streams", [])]
    mixed = bool(weights) and None not in weights
    sizes = samples.samples_of_sources.tolist() if mixed else [len(samples)]
    rows: Rows = SampleRows(samples)
    if config.data.batching == "packed":
        plan, sizes = _plan(task, samples, sizes, config)
        rows = PackedRows(samples, plan, _label_placement(task))
        logger.info("packed: %d samples in %d rows", len(samples), len(rows))
    sampler: Sampler = Shuffled(len(rows), seed) if config.data.shuffle else InOrder(len(rows))
    if mixed:
        sampler = Mixed(sizes, [weight for weight in weights if weight is not None], seed)
    if config.data.batching == "grouped":
        sampler = Grouped(sampler, rows.lengths, config.train.global_batch, seed)
    return sampler, rows


def _plan(task: Task, samples: EncodedDataset, sizes: list[int], config: RunConfig) -> tuple[Plan, list[int]]:
    """Which samples share a row (only samples of one source, so that sources can be mixed), and the row count of each
    source.

    Args:
        sizes: number of samples of each source.
    """
    placement = _label_placement(task)
    lengths = partial(packed_lengths, samples, placement)
    capacity, seed = task.row_length, config.run.seed
    if len(samples) < CACHED_FROM:
        return plan_sources(lengths(), sizes, capacity, seed)
    return cached_plan_of_sources(
        lengths, sizes, capacity, seed,
        of_samples=samples.fingerprint, placement=placement, cache=config.cache_dir, timeout=config.launch.timeout,
    )  # fmt: skip


def _label_placement(task: Task) -> LabelPlacement:
    if task.label_placement is None:
        raise UserError(
            f"{type(task).__name__} does not say where its labels are, so its samples cannot be packed",
            where="data.batching",
            remedy="set `label_placement` in the class (next_token, token, sample, decoder), or data.batching=grouped",
        )
    return task.label_placement


def _streamed(task: Task, records: Iterable[Record]) -> Records:
    if task.uses_reference:
        raise UserError(
            "the reference model is asked about every sample before training, and a stream has no end",
            where="data.streaming",
            remedy="set data.streaming=false",
        )
    if isinstance(records, Records):
        return records
    raise UserError(
        f"{type(task).__name__}.records returns records of its own, which cannot be streamed",
        where="data.streaming",
        remedy="name files in data.train, or set data.streaming=false",
    )


def _stream_loader(
    task: Task, records: Records, config: RunConfig, world: Distributed, prefetch: bool
) -> StreamLoader[Batch]:
    encode = TaskEncoder(task, train=True)
    # a stream's fingerprint covers files and settings, not user code: changing a metric there must not block a resume
    settings_by_name, fingerprints = settings_of(task, train=True), {}
    for mode in ("error", "skip"):
        of_files = [stream.quick_digests[mode] for stream in records.streams]
        of_settings = settings_by_name and {**settings_by_name, "data.on_bad_record": mode}
        fingerprints[mode] = content_key(of_files, of_settings, config.data.batching)

    def rows_of(located: list[LocatedRecord]) -> Rows | None:
        try:
            samples = encode_in_memory(_read_again(located), encode, on_bad_record=config.data.on_bad_record)
        except NoSamples:
            return None
        if config.data.batching != "packed":
            return SampleRows(samples)
        plan, _ = _plan(task, samples, [len(samples)], config)
        return PackedRows(samples, plan, _label_placement(task))

    settings = StreamSettings(
        seed=config.run.seed,
        shuffle=config.data.shuffle,
        lanes=config.data.stream_lanes,
        records_per_lane=config.data.records_per_lane,
        global_batch=config.train.global_batch,
        fingerprint=fingerprints[config.data.on_bad_record],
        resumable=frozenset(fingerprints.values()),
        code=code_of(task) or {},
    )
    return StreamLoader(
        records.streams,
        settings,
        rows_of,
        ranks=world.dp_ranks,
        micro_batch=train_micro_batch(config, world, has_tokens=task.tokenizer is not None),
        prefetcher=make_prefetcher(task, config, world.device, prefetch),
    )


def train_micro_batch(config: RunConfig, world: Distributed, has_tokens: bool) -> MicroBatchSize:
    """The maximum training micro-batch (one forward) of one process.

    Args:
        has_tokens: whether samples have a length in tokens.
    """
    if config.train.micro_batch_tokens is not None:
        return MicroBatchSize(tokens=config.train.micro_batch_tokens)
    if config.train.micro_batch == "auto" and has_tokens:
        return MicroBatchSize(rows=_rows_for_stages(config, world), tokens=MICRO_BATCH_TOKENS)
    return MicroBatchSize(rows=resolve_micro_batch(config, world.dp_ranks.size))


def _rows_for_stages(config: RunConfig, world: Distributed) -> int | None:
    """The most rows per micro-batch that still give a pipeline four micro-batches per stage: it idles at most 20%."""
    stages = config.parallel.pipeline
    return max(1, config.train.global_batch // world.dp_ranks.size // (4 * stages)) if stages > 1 else None


def eval_batching(task: Task, split: Split, config: RunConfig) -> tuple[MicroBatchSize, Augment]:
    """How an evaluation or a prediction batches and augments a split."""
    micro_batch = eval_micro_batch(config, has_tokens="input_ids" in split.samples.fields)
    return micro_batch, make_augment(task, config, train=False)


def eval_micro_batch(config: RunConfig, has_tokens: bool) -> MicroBatchSize:
    """The maximum evaluation micro-batch of one process, independent of the number of processes."""
    if config.eval.micro_batch is not None:
        return MicroBatchSize(rows=config.eval.micro_batch)
    if config.train.micro_batch_tokens is not None:
        return MicroBatchSize(tokens=config.train.micro_batch_tokens)
    if config.train.micro_batch == "auto":
        return MicroBatchSize(tokens=MICRO_BATCH_TOKENS) if has_tokens else MicroBatchSize(rows=DEFAULT_EVAL_ROWS)
    return MicroBatchSize(rows=config.train.micro_batch)
