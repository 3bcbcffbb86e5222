"""Encode a run's data before training, and print statistics about it."""

from collections.abc import Sequence
from itertools import islice
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from drawbar.commands.show_rows import show_rows
from drawbar.config.schema.data_section import DataSection
from drawbar.config.schema.run_config import RunConfig
from drawbar.data.loader import MicroBatchSize
from drawbar.data.sampler import Sampler
from drawbar.distributed.process_group import Distributed
from drawbar.distributed.rank_info import RankInfo, choose_device
from drawbar.errors import UserError
from drawbar.evaluation.scoring import Split
from drawbar.runtime.log import logger, start_logging
from drawbar.tasks.task import Task
from drawbar.tasks.task_registry import task_class
from drawbar.tasks.user_methods import check_signatures
from drawbar.tracking.console import Console, make_console
from drawbar.tracking.table import print_histogram, print_table
from drawbar.train.batches import FIRST_RECORDS, load_split, log_unread_columns, order_and_rows, train_micro_batch
from drawbar.train.initial_model import temporary_initial_model
from drawbar.train.setup import build_task
from drawbar.train.validation_share import warn_of_share
from drawbar.util.byte_sizes import bytes_below, readable

ROWS_AT_A_TIME = 2**16
"""Rows of an epoch whose order is computed at once, rounded up to whole global batches."""


def prepare_run(config: RunConfig, task_type: type[Task] | None, show: int = 0) -> None:
    """Encode every split except a streamed one into the cache, and print statistics. No model is built.

    Args:
        show: number of training rows to print as text.

    Raises:
        UserError: as for the run itself; or there is nothing to prepare.
    """
    if show and config.data.streaming:
        raise UserError(
            "--show prints rows of prepared data, and streamed data is encoded while it is read",
            where="data.streaming",
            remedy="add data.streaming=false and data.limit.train=1000 to this command",
        )
    rank_info = RankInfo()
    console = make_console(rank_info.is_rank0)
    start_logging(rank_info.rank, console.logging_handler())
    found = task_type or task_class(config.task.type)
    check_signatures(found)
    with (
        Distributed(rank_info, choose_device(config.device, rank_info), config.launch.timeout) as world,
        temporary_initial_model(config) as initial_model,
    ):
        try:
            names = _splits(config, console)
            task = build_task(found, config, world, config.run_dir, initial_model=initial_model)
            splits = [_load(task, name, config, world, console) for name in names]
            if names[:2] == ["train", "validation"]:
                warn_of_share(config.data, *splits[:2])
        finally:
            console.stop()  # before the tables, which would break up a live bar
        _describe(splits, config.data)
        steps = _describe_batches(task, splits[0], config, world) if splits[0].name == "train" else None
        if show and splits[0].name == "train":
            show_rows(task, splits[0], config, show)
        cache = config.cache_dir
        per_epoch = f"; {steps:,} steps per epoch" if steps is not None else ""
        console.message(f"cache: {cache}, {readable(bytes_below(cache))} in total{per_epoch}")


def _splits(config: RunConfig, console: Console) -> list[str]:
    """The splits to prepare, ``train`` first."""
    data = config.data
    wanted = {
        "train": not data.streaming,
        "validation": bool(data.validation or data.validation_share),
        "test": bool(data.test),
    }
    names = [name for name, is_wanted in wanted.items() if is_wanted]
    if not names:
        raise UserError(
            "there is nothing to prepare: streamed data is encoded while it is read",
            where="data.streaming",
            remedy="train directly, or set data.streaming=false",
        )
    if data.streaming:
        console.message("train: nothing to prepare: streamed data is encoded while it is read (data.streaming=true)")
    return names


def _load(task: Task, name: str, config: RunConfig, world: Distributed, console: Console) -> Split:
    split = load_split(task, name, config, world, console)
    if name == "train":
        log_unread_columns(task, islice(split.records, FIRST_RECORDS))
    if not split.kept:
        logger.warning(
            "%s is not cached, so every run encodes it again: the content of the task's code, its tokenizer or its "
            "records cannot be fingerprinted (as for a class in a notebook)",
            name,
        )
    return split


def _has_tokens(split: Split) -> bool:
    return "input_ids" in split.samples.fields


def _describe(splits: Sequence[Split], data: DataSection) -> None:
    """Print a table of all splits, and a histogram of each."""
    columns = [_counts(split) for split in splits]
    names = list(dict.fromkeys(name for column in columns for name in column))
    rows = [[name, *(column.get(name, "") for column in columns)] for name in names]
    print_table("Encoded data", ["", *(split.name for split in splits)], rows)
    for split in splits:
        if _has_tokens(split):
            title = f"\n{split.name}: samples by their length in tokens"
            print_histogram(title, split.samples.lengths, {"data.sequence_length": data.sequence_length})


def _counts(split: Split) -> dict[str, str]:
    """A split's column in the table: the name of a row → its value."""
    samples = split.samples
    counts = {
        "records": f"{samples.records + samples.skipped_count:,}",
        "bad records": f"{samples.skipped_count:,}",
        "dropped records": f"{samples.dropped:,}",
        "samples": f"{len(samples):,}",
    }
    if not _has_tokens(split):
        return counts
    lengths = samples.lengths
    return {
        **counts,
        "truncated samples": f"{samples.truncated:,} ({samples.truncated / len(samples):.1%})",
        "tokens": f"{int(lengths.sum()):,}",
        "mean length": f"{lengths.mean():,.1f}",
        "median length": f"{np.median(lengths):,.0f}",
        "95th percentile": f"{np.percentile(lengths, 95, method='higher'):,.0f}",
        "longest": f"{lengths.max():,}",
    }


def _describe_batches(task: Task, split: Split, config: RunConfig, world: Distributed) -> int:
    """If samples have lengths, print a table of the cost of each way of batching.

    Returns:
        Steps per epoch with the configured way of batching.
    """
    if not _has_tokens(split):
        return _steps(order_and_rows(task, split, config)[0], config)
    micro_batch = train_micro_batch(config, world, has_tokens=True)
    steps: dict[str, int] = {}
    table = []
    for batching in get_args(DataSection.model_fields["batching"].annotation):
        changed = config.model_copy(update={"data": config.data.model_copy(update={"batching": batching})})
        try:
            sampler, rows = order_and_rows(task, split, changed)
        except UserError as error:
            if batching == config.data.batching:
                raise
            logger.info("data.batching=%s is not possible: %s", batching, error.what)
            continue
        steps[batching] = _steps(sampler, config)
        share = padding_share(sampler, rows.lengths[:], config.train.global_batch, micro_batch)
        table.append([batching, f"{len(rows):,}", f"{steps[batching]:,}", f"{share:.1%}"])
    title = f"\nBatches of {config.train.global_batch} rows; data.batching is {config.data.batching}"
    print_table(title, ["data.batching", "rows", "steps per epoch", "padding"], table)
    print(flush=True)
    return steps[config.data.batching]


def _steps(sampler: Sampler, config: RunConfig) -> int:
    return -(-sampler.size // config.train.global_batch)


def padding_share(
    sampler: Sampler, lengths: NDArray[np.int64], global_batch: int, micro_batch: MicroBatchSize
) -> float:
    """The share of padding among all tokens of the first epoch, if a single process trains the run.

    Args:
        lengths: shape (rows,): tokens of each row.
        global_batch: rows per step.
        micro_batch: maximum size of one forward; its rows are padded to the longest of them.
    """
    together = global_batch * -(-ROWS_AT_A_TIME // global_batch)
    used = computed = 0
    for first in range(0, sampler.size, together):
        rows = sampler.rows(0, np.arange(first, min(first + together, sampler.size)))
        for start in range(0, len(rows), global_batch):
            for part in micro_batch.split(rows[start : start + global_batch], lengths):
                used += int(lengths[part].sum())
                computed += len(part) * int(lengths[part].max())
    return 1 - used / computed
