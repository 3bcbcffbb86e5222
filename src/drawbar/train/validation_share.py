"""Warns where validation records are training records, or many more or far fewer than ``data.validation_share``."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from drawbar.config.schema.data_section import DataSection
from drawbar.data.sources import Records
from drawbar.evaluation.scoring import Split
from drawbar.runtime.log import logger

FEWEST_RECORDS = 20
"""With fewer records, twice the share may be chance."""
FACTOR = 2


def warn_of_same_files(data: DataSection, train: Iterable[Any], validation: Iterable[Any]) -> None:
    """Warn where training and validation read the same file: scores then say nothing of new data."""
    if data.validation_share is not None:  # two parts of the same files
        return
    if not (isinstance(train, Records) and isinstance(validation, Records)):  # a task's own
        return
    shared = sorted(_files(train) & _files(validation))
    if shared:
        more = f" and {len(shared) - 1:,} more" if len(shared) > 1 else ""
        logger.warning(
            "data.validation reads a file that data.train reads, too: %s%s: scores of records that were trained on say "
            "little of new ones; data.validation_share=0.1 would hold a tenth of the training records back",
            *(shared[0], more),
        )


def _files(records: Records) -> set[Path]:
    return {path.resolve() for stream in records.streams for path in stream.files}


def warn_of_share(data: DataSection, train: Split, validation: Split) -> None:
    """Warn where much more, or much less, of the training data is for validation than ``data.validation_share``."""
    asked, limit = data.validation_share, data.limit
    if asked is None or limit.train is not None or limit.validation is not None:
        return
    if not (isinstance(train.records, Records) and isinstance(validation.records, Records)):  # a task's own
        return
    found, total = _count(validation), _count(train) + _count(validation)
    if total >= FEWEST_RECORDS and not asked / FACTOR <= found / total <= asked * FACTOR:
        logger.warning(
            "data.validation_share=%g, but %s of %s records (%s) are for validation: on which side a record is "
            "depends on its content alone, so that equal ones stay together, and few records here are distinct; "
            "data.validation=FILE says itself which are for validation",
            asked,
            f"{found:,}",
            f"{total:,}",
            f"{found / total:.1%}",
        )


def _count(split: Split) -> int:
    return split.samples.records + split.samples.skipped_count
