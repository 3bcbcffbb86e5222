"""Training batches from a stream that is never held in memory, in an order that no world size changes.

The stream is read in blocks of records. Record number i of a source belongs to lane ``i % lanes`` (where the source
repeats, i counts on over all its passes), and a lane to one rank, which alone parses and encodes its records. A lane's
part of a block is shuffled (and packed) by itself; then the block's rows come in turn from all lanes. So the rows of a
block are a pure function of the data and the seed, and a position is where the block begins and how many of its rows
were used: to go on, that block is read again.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from drawbar.data.loader import Loader, MicroBatchSize, OtherRankFailed, Rows, check_fingerprint
from drawbar.data.prefetch import Batch, PlannedMicroBatch, Prefetcher, RawBatch, RawRow, StepPlan
from drawbar.data.sampler import order
from drawbar.data.sources import LocatedRecord
from drawbar.distributed.process_group import DataParallelRanks
from drawbar.errors import UserError
from drawbar.runtime.log import logger


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


LARGEST_BLOCK = 2**32
"""Upper bound on the samples of a lane in one block; used to number samples across blocks."""


@dataclass(frozen=True)
class StreamSettings:
    """Settings of a stream that decide its batches; within a run only ``code`` may change, and
    ``fingerprint`` where it differs by the value of ``data.on_bad_record`` alone (``resumable``)."""

    seed: int
    shuffle: bool
    lanes: int
    records_per_lane: int
    """Records of a lane in one block."""
    global_batch: int
    fingerprint: str
    """Digest of each source's ``SourceStream.quick_digests`` (its settings; size, ends and excerpts of its files), and
    of the settings that encode records and fill rows. The samples themselves are not in it."""
    resumable: Set[str] = frozenset()
    """The fingerprints under both values of ``data.on_bad_record``, which give the same samples: a position saved with
    either is resumed."""
    code: Mapping[str, str] = field(default_factory=dict)
    """What else decides the samples, and may change: digests of the user's code, by file."""


@dataclass(frozen=True)
class Cursor:
    """The position at the start of a block."""

    positions: list[int]
    """For each source, the records already read per lane; a weighted source repeats, and all its passes count."""
    source: int = 0
    """Without weights: the source that is being read."""
    block: int = 0
    """Blocks of this epoch before it."""
    epoch: int = 0


@dataclass(frozen=True)
class StreamPosition:
    """The position before the next step; stored in checkpoints."""

    cursor: Cursor
    used: int = 0
    """Rows of the block at the cursor that steps have used, over all ranks."""


@dataclass(frozen=True)
class BlockShare:
    """One rank's share of a block."""

    lanes: dict[int, Rows]
    """Its rows by lane; a lane without rows is left out."""
    ends: list[int]
    """For each source, how often this rank came to its end."""


@dataclass(frozen=True)
class PlannedRow:
    """A row of this rank, before its samples are augmented."""

    rows: Rows
    row: int
    length: int
    first_id: int
    """Added to the ids of its samples, so that no two blocks or lanes share an id."""
    epoch: int


@dataclass(frozen=True)
class Block:
    """One block of the stream, in whose rows all ranks have agreed."""

    start: Cursor
    after: Cursor
    lanes: dict[int, Rows]
    """This rank's rows."""
    ends: list[int]
    """For each source, how often it came to its end, summed over all ranks."""
    sequence: NDArray[np.int64]
    """Shape (rows, 2): each row's lane and number in that lane; all ranks' rows, in the order of training."""


class StreamLoader(Loader[Batch]):
    """The micro-batches of each step for one rank, from a stream; how, see the top of this file.

    Without weights the sources are read one after the other, and an epoch ends with the last. With weights, each gives
    its part of every block and begins again at its end, so that there is one epoch without end.

    Args:
        encode: a lane's records of one block → its rows, or None where they give none. Called in a thread, ahead of
            training.
        ranks: those that share the stream.
        micro_batch, prefetcher: as for ``TrainLoader``.
    """

    steps_per_epoch = None

    def __init__(
        self,
        streams: Sequence[Stream],
        settings: StreamSettings,
        encode: Callable[[list[LocatedRecord]], Rows | None],
        *,
        ranks: DataParallelRanks,
        micro_batch: MicroBatchSize,
        prefetcher: Prefetcher[Batch],
    ) -> None:
        assert settings.lanes % ranks.size == 0, "check_world refuses lanes that the ranks cannot share equally"
        super().__init__(ranks, micro_batch, prefetcher)
        self.settings = settings
        self._weights = [stream.weight for stream in streams]
        readers = [RankReader if stream.weight is None else EndlessRankReader for stream in streams]
        self._readers = [make(stream, ranks) for make, stream in zip(readers, streams, strict=True)]
        self._encode = encode
        self.position = StreamPosition(Cursor([0] * len(streams)))
        self._planned = self.position
        self._block: Block | None = None
        """The block of ``_planned``, once it is read."""
        self._ahead: tuple[Cursor, Future[BlockShare]] | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="drawbar-stream")
        self._is_closed = False
        self._padding: Rows | None = None

    @property
    def epoch(self) -> float:
        return self.position.cursor.epoch

    def state(self) -> dict[str, Any]:
        kept = {"fingerprint": self.settings.fingerprint, "code": dict(self.settings.code)}
        dealt = {"lanes": self.settings.lanes, "records": self.settings.records_per_lane}
        return {**asdict(self.position), **dealt, **kept}

    def load(self, state: dict[str, Any]) -> None:
        self._check(state)
        self.position = self._position_from(state)

    def _position_from(self, state: dict[str, Any]) -> StreamPosition:
        """The saved position. For a fork with other lanes or blocks: the start of the block that was in use, or the
        nearest position before it that the new lanes can have."""
        cursor, used, settings = Cursor(**state["cursor"]), state["used"], self.settings
        lanes, records = state["lanes"], state["records"]
        if (lanes, records) == (settings.lanes, settings.records_per_lane):
            return StreamPosition(cursor, used)
        logger.warning(
            "the stream is dealt into other lanes or blocks than before: it goes on where a block of %d records began, "
            "and trains on %d rows of that block a second time",
            lanes * records,
            used,
        )
        return StreamPosition(
            replace(cursor, positions=[place * lanes // settings.lanes for place in cursor.positions])
        )

    def _check(self, state: dict[str, Any]) -> None:
        """Check that a saved position belongs to this data; warn where that cannot be decided.

        Raises:
            OtherData: it belongs to other data.
        """
        if state["fingerprint"] not in self.settings.resumable:
            check_fingerprint(state["fingerprint"], self.settings.fingerprint)
        before, now = state["code"], self.settings.code
        changed = [name for name in sorted({*before, *now}) if before.get(name) != now.get(name)]
        if changed:
            logger.warning(
                "changed since the checkpoint was written: %s; if that changes the samples, the position in the "
                "stream is not exact",
                ", ".join(changed),
            )

    def close(self) -> None:
        super().close()
        self._is_closed = True
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _plan_from(self, position: StreamPosition) -> None:
        """Let the next plan start at this position."""
        if position.cursor != self._planned.cursor:
            self._block = None
        self._planned = position

    def _plan(self, may_defer_error: bool) -> StepPlan | None:
        """This rank's share of the next global batch; with ``may_defer_error``, None where a rank cannot read: the
        error is raised when this batch is planned again, once its step is due."""
        before = self._planned
        rows = self._next_rows(may_defer_error)
        if rows is None:
            self._plan_from(before)
            return None
        lengths = np.array([row.length for row in rows], dtype=np.int64)
        micro_batches = [
            PlannedMicroBatch(partial(_raw_batch, [rows[place] for place in chosen.tolist()]))
            for chosen in self.micro_batch.split(np.arange(len(rows)), lengths)
        ]
        missing = self._max_over_ranks(len(micro_batches)) - len(micro_batches)
        if missing:
            read = partial(_raw_batch, rows[:1]) if rows else self._padding_batch
            micro_batches += [PlannedMicroBatch(read, is_padding=True)] * missing
        return StepPlan(micro_batches, int(lengths.sum()), after=self._planned)

    def _next_rows(self, may_defer_error: bool) -> list[PlannedRow] | None:
        """This rank's rows of the next global batch; None as for ``_plan``."""
        mine: list[PlannedRow] = []
        taken, epoch = 0, self._planned.cursor.epoch
        while taken < self.settings.global_batch:
            block = self._current_block(may_defer_error)
            if block is None:
                return None
            if taken and block.start.epoch != epoch:  # rows never carry over into the next epoch
                break
            epoch = block.start.epoch
            used = self._planned.used
            chosen = block.sequence[used : used + self.settings.global_batch - taken]
            mine += [self._row(block, lane, row) for lane, row in chosen.tolist() if lane in block.lanes]
            taken += len(chosen)
            if used + len(chosen) == len(block.sequence):
                self._plan_from(StreamPosition(block.after))
            else:
                self._planned = StreamPosition(block.start, used + len(chosen))
        return mine

    def _row(self, block: Block, lane: int, row: int) -> PlannedRow:
        first_id = (block.start.block * self.settings.lanes + lane) * LARGEST_BLOCK
        rows = block.lanes[lane]
        return PlannedRow(rows, row, int(rows.lengths[row : row + 1][0]), first_id, block.start.epoch)

    def _padding_batch(self) -> RawBatch:
        """A micro-batch of one row, for a rank that has no rows in a step. It is always the first row of the data, so
        that a resumed run draws the same dropout."""
        if self._padding is None:
            self._padding = self._padding_rows()
        return RawBatch([RawRow(self._padding.read(0), self._padding.join)], epoch=0)

    def _padding_rows(self) -> Rows:
        """The rows of the first record that gives any; encoded in the thread, as tokenizers serve one thread alone."""
        return self._thread.submit(self._first_rows).result()

    def _first_rows(self) -> Rows:
        for reader in self._readers:
            for located in reader.stream.read(0, 1, 0):
                rows = self._encode([located])
                if rows is not None:
                    return rows
        raise _no_samples()

    def _current_block(self, may_defer_error: bool) -> Block | None:
        """The current block, which has at least one unused row. None as for ``_plan``.

        Raises:
            UserError: all sources were read, and gave no row.
        """
        ends = np.zeros(len(self._readers), dtype=np.int64)
        while self._block is None:
            cursor = self._planned.cursor
            with self.ranks.working("reading the stream"):
                part = self._block_share(cursor)
            block = self._merge_shares(cursor, part)
            if block is None and may_defer_error:
                return None
            if block is None:
                raise part if isinstance(part, Exception) else OtherRankFailed
            self._ahead = block.after, self._thread.submit(self._read, block.after)
            if len(block.sequence):
                self._block = block
            else:
                self._planned = StreamPosition(block.after)
            ends += block.ends
            # each rank has then come to the end of its lanes of every source twice (ranks differ by one end at most),
            # and has read all of them in between
            if ends.min() > 2 * self.ranks.size and self._block is None:
                if may_defer_error:
                    return None
                raise _no_samples()
        return self._block

    def _block_share(self, cursor: Cursor) -> BlockShare | Exception:
        """This rank's share of the block at ``cursor``, or why it could not be read."""
        if self._ahead is None or self._ahead[0] != cursor:
            self._ahead = cursor, self._thread.submit(self._read, cursor)
        try:
            return self._ahead[1].result()
        except Exception as error:  # noqa: BLE001 - raised once all ranks know
            return error

    def _read(self, cursor: Cursor) -> BlockShare:
        """Read and encode this rank's records of the block at ``cursor``. Runs in the thread, one block at a time."""
        mine = self.settings.lanes // self.ranks.size
        records: list[list[LocatedRecord]] = [[] for _ in range(mine)]
        ends = []
        for reader, first, count in zip(
            self._readers, cursor.positions, self._records_of_lane_by_source(cursor), strict=True
        ):
            found, ended = reader.take(first * mine, (first + count) * mine) if count else ([], 0)
            ends.append(ended)
            for number, located in found:
                records[number % mine].append(located)
        lanes = {}
        for index, of_lane in enumerate(records):
            if self._is_closed:
                raise CancelledError
            rows = self._encode(of_lane) if of_lane else None
            if rows is not None:
                lanes[self.ranks.rank + index * self.ranks.size] = rows
        return BlockShare(lanes, ends)

    def _records_of_lane_by_source(self, cursor: Cursor) -> list[int]:
        """For each source, the number of records that a lane has in the block at the cursor."""
        size = self.settings.records_per_lane
        if None in self._weights:
            return [size if source == cursor.source else 0 for source in range(len(self._weights))]
        shares = np.array(self._weights, dtype=np.float64) / sum(weight or 0.0 for weight in self._weights)
        before, after = (np.floor(shares * size * block + 0.5) for block in (cursor.block, cursor.block + 1))
        return (after - before).astype(int).tolist()

    def _merge_shares(self, start: Cursor, part: BlockShare | Exception) -> Block | None:
        """Merge the shares of all ranks: every rank learns how many rows each lane has, and where sources ended. None
        if a rank could not read its share."""
        if self.ranks.max(int(isinstance(part, Exception))) or isinstance(part, Exception):
            return None
        rows = np.zeros(self.settings.lanes, dtype=np.int64)
        for lane, found in part.lanes.items():
            rows[lane] = len(found)
        together = self.ranks.sum_counts([*rows.tolist(), *part.ends])
        counts, ends = together[: len(rows)], together[len(rows) :]
        return Block(start, self._after(start, ends), part.lanes, ends, self._sequence(start, counts))

    def _sequence(self, start: Cursor, counts: list[int]) -> NDArray[np.int64]:
        """The order of a block's rows: round-robin over the lanes that still have rows; each lane shuffled if set."""
        lanes = np.repeat(np.arange(len(counts)), counts)
        turns = np.concatenate([np.arange(count) for count in counts])
        places = np.lexsort((lanes, turns))
        numbers = turns
        if self.settings.shuffle:
            keys = (start.epoch * 2**20 + start.block) * self.settings.lanes
            numbers = np.concatenate(
                [order(self.settings.seed, keys + lane, np.arange(count), count) for lane, count in enumerate(counts)]
            )
        return np.stack([lanes[places], numbers[places]], axis=1).astype(np.int64)

    def _after(self, start: Cursor, ends: list[int]) -> Cursor:
        """Where the next block begins."""
        positions = [
            position + count
            for position, count in zip(start.positions, self._records_of_lane_by_source(start), strict=True)
        ]
        following = replace(start, positions=positions, block=start.block + 1)
        if None not in self._weights or ends[start.source] < self.ranks.size:
            return following
        if start.source + 1 < len(positions):
            return replace(following, source=start.source + 1)
        return Cursor([0] * len(positions), epoch=start.epoch + 1)


def _raw_batch(planned: list[PlannedRow]) -> RawBatch:
    """A micro-batch of rows of one epoch."""
    rows = []
    for one in planned:
        samples = one.rows.read(one.row)
        for sample in samples:
            sample["id"] += one.first_id
            sample["ids"] = [sample["id"]]
        rows.append(RawRow(samples, one.rows.join))
    return RawBatch(rows, planned[0].epoch)


def _no_samples() -> UserError:
    return UserError(
        "no samples: the task's encode dropped all records of the stream",
        where="data.train",
        remedy="check that the records hold what the task expects, that they are long enough, and that "
        "data.sequence_length has room for a prompt and the first token of its answer",
    )
