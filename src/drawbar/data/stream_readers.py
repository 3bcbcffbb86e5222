"""Readers of one rank's records of a stream, one after another."""

from collections.abc import Iterator
from typing import Protocol

from drawbar.data.sources import LocatedRecord
from drawbar.distributed.process_group import DataParallelRanks


class Stream(Protocol):
    """One source that can be read from anywhere; see ``SourceStream``."""

    weight: float | None
    size: int | None
    """How many records it has, those that are left out included; None before it was read to its end."""

    def read(self, share: int, shares: int, first: int) -> Iterator[LocatedRecord]: ...


class RankReader:
    """Reads this rank's records of one source sequentially; seeks only when the position jumps."""

    def __init__(self, stream: Stream, ranks: DataParallelRanks) -> None:
        self.stream = stream
        self.rank, self.ranks = ranks.rank, ranks.size
        self.ends = 0
        """How often a reader that repeats its source has come to the end; 0 in this one, which does not."""
        self._records: Iterator[tuple[int, LocatedRecord]] = iter(())
        self._pending: tuple[int, LocatedRecord] | None = None
        self._stop = -1

    def take(self, first: int, stop: int) -> tuple[list[tuple[int, LocatedRecord]], int]:
        """This rank's (number, record) pairs, numbered within its share, for ``first`` <= number < ``stop``, and how
        often the source ended.

        An exhausted source reports its end again in every call.
        """
        ends = self.ends
        goes_on, self._stop = first == self._stop, -1  # after an error, the next call seeks
        if not goes_on:
            self._records = self.read_from(first)
            self._pending = next(self._records, None)
        found = []
        while self._pending is not None and self._pending[0] < stop:
            found.append(self._pending)
            self._pending = next(self._records, None)
        self._stop = stop
        return found, self.ends - ends if self._pending is not None else 1

    def read_from(self, first: int) -> Iterator[tuple[int, LocatedRecord]]:
        """(number within this rank's share, record), from a number on."""
        for located in self.stream.read(self.rank, self.ranks, first):
            yield located.position, located


class EndlessRankReader(RankReader):
    """Repeats a source endlessly. Visit u, counted over all ranks, gives record ``u % size`` to rank ``u % ranks``."""

    def read_from(self, first: int) -> Iterator[tuple[int, LocatedRecord]]:
        visit, empty_passes = self.rank + self.ranks * first, 0
        while empty_passes < self.ranks:  # in so many passes, a rank gets at least one record
            size = self.stream.size
            turn, place = divmod(visit, size) if size else (0, visit)
            start, share = visit - place, place % self.ranks
            empty_passes += size is not None  # a pass that began before the size was known proves nothing
            for located in self.stream.read(share, self.ranks, place // self.ranks):
                empty_passes = 0
                yield (start + share + self.ranks * located.position) // self.ranks, located
            assert self.stream.size is not None
            self.ends += 1
            after = (turn + 1) * self.stream.size
            visit = max(visit, after + (self.rank - after) % self.ranks)
