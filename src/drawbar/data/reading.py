"""``Reading``: one pass over the records of a split for encoding, in order and numbered, without keeping them."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

from drawbar.data.readers import BadRecord, Record

KEPT_MESSAGES = 1000


class ReadResult(NamedTuple):
    """A record of a split, or the error of one that cannot be read."""

    source: int
    """The index of the source that it comes from."""
    where: str
    """File and line, for messages."""
    record: Record | BadRecord


class NumberedRecord(NamedTuple):
    """A record of a split that can be read."""

    number: int
    """From 0, over all sources; bad records have none."""
    where: str
    record: Record


class Reading:
    """Iterates over the records of a split, once, and knows what it has come across so far.

    Args:
        found: in the order of the sources.
        sources: how many there are.
        count: counts the records that are found, bad ones included.
    """

    def __init__(self, found: Iterable[ReadResult], sources: int, count: Callable[[], int]) -> None:
        self.counts = [0] * sources
        """Records of each source."""
        self.bad: list[str] = []
        """What is wrong with the bad records that were left out, after their file and line: the first 1000 messages."""
        self.bad_count = 0
        self.first: str | None = None
        """Where the first record is."""
        self._found = found
        self._count = count

    @cached_property
    def total(self) -> int:
        """How many records there are, bad ones included. They are counted when somebody wants to know."""
        return self._count()

    def __iter__(self) -> Iterator[NumberedRecord]:
        number = 0
        for source, where, record in self._found:
            if isinstance(record, BadRecord):
                self.bad_count += 1
                if len(self.bad) < KEPT_MESSAGES:
                    self.bad.append(f"{record.where}: {record.what}")
                continue
            self.first = self.first or where
            self.counts[source] += 1
            yield NumberedRecord(number, where, record)
            number += 1


def read_list(records: Sequence[Record], describe: Callable[[int], str]) -> Reading:
    """A pass over records in memory.

    Args:
        describe: says where record i came from, for messages.
    """
    found = (ReadResult(0, describe(number), record) for number, record in enumerate(records))
    return Reading(found, sources=1, count=records.__len__)
