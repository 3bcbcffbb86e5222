"""Whether a share of the training data came out as large as was asked for."""

from drawbar.config.schema.data_section import DataSection
from drawbar.data.sources import Records
from drawbar.evaluation.scoring import Split
from drawbar.runtime.log import logger

FEWEST_RECORDS = 20
"""With fewer, a share that is twice what was asked for is no more than chance."""
FACTOR = 2


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
