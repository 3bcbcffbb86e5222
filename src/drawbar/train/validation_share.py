"""Warns if validation records are training records, or many more or far fewer than ``data.validation_share``."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from drawbar.config.schema.data_section import DataSection
from drawbar.data.sources import Records
from drawbar.evaluation.scoring import Split
from drawbar.runtime.log import logger

FEWEST_RECORDS = 20
"""Minimum number of records; with fewer, even twice the share may be chance."""
FACTOR = 2


def warn_of_same_files(data: DataSection, train: Iterable[Any], validation: Iterable[Any]) -> None:
    """Warn if training and validation read the same file: scores then say nothing about new data."""
    if data.validation_share is not None:  # disjoint parts of the same files
        return
    if not (isinstance(train, Records) and isinstance(validation, Records)):  # a task's own
        return
    shared = sorted(_files(train) & _files(validation))
    if shared:
        more = f" and {len(shared) - 1:,} more" if len(shared) > 1 else ""
        logger.warning(
            "data.validation reads a file that data.train also reads: %s%s: scores on records that were trained on say "
            "little about new ones; data.validation_share=0.1 would hold out a tenth of the training records",
            *(shared[0], more),
        )


def _files(records: Records) -> set[Path]:
    return {path.resolve() for stream in records.streams for path in stream.files}


def warn_of_share(data: DataSection, train: Split, validation: Split) -> None:
    """Warn if the share of training data held out for validation is far from ``data.validation_share``."""
    asked, limit = data.validation_share, data.limit
    if asked is None or limit.train is not None or limit.validation is not None:
        return
    if not (isinstance(train.records, Records) and isinstance(validation.records, Records)):  # a task's own
        return
    found, total = _count(validation), _count(train) + _count(validation)
    if total >= FEWEST_RECORDS and not asked / FACTOR <= found / total <= asked * FACTOR:
        logger.warning(
            "data.validation_share=%g, but %s of %s records (%s) are for validation: records are split by content, so "
            "that equal ones stay together, and few records here are distinct; use data.validation=FILE to choose "
            "validation records yourself",
            asked,
            f"{found:,}",
            f"{total:,}",
            f"{found / total:.1%}",
        )


def _count(split: Split) -> int:
    return split.samples.records + split.samples.skipped_count
