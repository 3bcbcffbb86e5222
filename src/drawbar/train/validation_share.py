"""Warns if validation records are training records, or many more or far fewer than ``data.validation_share``."""

from collections.abc import Iterable
from math import sqrt
from pathlib import Path
from typing import Any

from drawbar.config.schema.data_section import DataSection
from drawbar.data.sources import Records
from drawbar.evaluation.scoring import Split
from drawbar.runtime.log import logger

FACTOR = 2
DEVIATIONS = 4
"""Standard deviations of the share of distinct records: a share within them may be chance."""


def warn_of_same_files(data: DataSection, train: Iterable[Any], validation: Iterable[Any]) -> None:
    """Warn if training and validation read the same file, or split of a dataset: scores then say nothing about new
    data."""
    if data.validation_share is not None:  # disjoint parts of the same files
        return
    if not (isinstance(train, Records) and isinstance(validation, Records)):  # a task's own
        return
    shared = sorted(_origins(train) & _origins(validation))
    if shared:
        more = f" and {len(shared) - 1:,} more" if len(shared) > 1 else ""
        logger.warning(
            "data.validation reads what data.train also reads: %s%s: scores on records that were trained on say "
            "little about new ones; data.validation_share=0.1 would hold out a tenth of the training records",
            *(shared[0], more),
        )


def _origins(records: Records) -> set[Path]:
    return {path.resolve() for stream in records.streams for path in stream.origins}


def warn_of_share(data: DataSection, train: Split, validation: Split) -> None:
    """Warn if the share of training data held out for validation is far from ``data.validation_share``."""
    asked, limit = data.validation_share, data.limit
    if asked is None or limit.train is not None or limit.validation is not None:
        return
    if not (isinstance(train.records, Records) and isinstance(validation.records, Records)):  # a task's own
        return
    found, total = _count(validation), _count(train) + _count(validation)
    may_be_chance = abs(found - asked * total) <= DEVIATIONS * sqrt(total * asked * (1 - asked))
    if not may_be_chance and not asked / FACTOR <= found / total <= asked * FACTOR:
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
