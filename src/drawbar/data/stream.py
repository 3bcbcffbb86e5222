"""Training batches from a stream that is never held in memory, in an order that no world size changes.

The stream is read in blocks of records. Record number i of a source belongs to lane ``i % lanes``, and a lane to one
rank, which alone parses and encodes its records. A lane's part of a block is shuffled (and packed) by itself; then the
block's rows come in turn from all lanes. So the rows of a block are a pure function of the data and the seed, and a
position is where the block begins and how many of its rows were used: to go on, that block is read again.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from drawbar.data.dataset import Sample
from drawbar.data.loader import Batch, Collate, Loader, MicroBatch, MicroBatchSize, Rows, Vary, check_fingerprint
from drawbar.data.order import order
from drawbar.data.sources import Located
from drawbar.errors import UserError
from drawbar.runtime.dist import World

LARGEST_BLOCK = 2**32
"""More samples than a lane has in one block: numbers samples across blocks."""


class Stream(Protocol):
    """One source that can be read from anywhere; see ``SourceStream``."""

    weight: float | None

    def read(self, lane: int, lanes: int, first: int) -> Iterator[Located]: ...


@dataclass(frozen=True)
class StreamSettings:
    """How a stream becomes batches; none of it may change while a run lasts."""

    seed: int
    shuffle: bool
    lanes: int
    records: int
    """Records of a lane in one block."""
    global_batch: int
    fingerprint: str


@dataclass(frozen=True)
class Cursor:
    """Where a block begins."""

    positions: list[int]
    """For each source, the number of its next record among those of one lane."""
    source: int = 0
    """Without weights: the source that is being read."""
    block: int = 0
    """Blocks of this epoch before it."""
    epoch: int = 0


@dataclass(frozen=True)
class Part:
    """What one rank read of a block."""

    lanes: dict[int, Rows]
    """Its rows by lane; a lane without rows is left out."""
    more: list[int]
    """For each source that was read, 1 where this rank has more of it, else 0."""


@dataclass(frozen=True)
class Block:
    start: Cursor
    after: Cursor
    lanes: dict[int, Rows]
    """This rank's rows."""
    ended: list[bool]
    """For each source, whether it came to its end in this block."""
    sequence: NDArray[np.int64]
    """Shape (rows, 2): lane and number of all ranks' rows, in the order of training."""


class StreamLoader(Loader[Batch]):
    """The micro-batches of each step for one rank, from a stream; how, see the top of this file.

    Without weights the sources are read one after the other, and an epoch ends with the last. With weights, each gives
    its part of every block and begins again at its end, so that there is one epoch without end.

    Args:
        encode: a lane's records of one block → its rows, or None where they give none. Called in a thread, ahead of
            training.
        world: the ranks that share the stream.
        micro_batch, collate, vary: as for ``TrainLoader``.

    Raises:
        UserError: the lanes cannot be dealt evenly to the ranks.
    """

    steps_per_epoch = None

    def __init__(
        self,
        streams: Sequence[Stream],
        settings: StreamSettings,
        encode: Callable[[list[Located]], Rows | None],
        *,
        world: World,
        micro_batch: MicroBatchSize,
        collate: Collate[Batch],
        vary: Vary = lambda sample, epoch: sample,
    ) -> None:
        if settings.lanes % world.size:
            raise UserError(
                f"{world.size} processes cannot share data.stream_lanes={settings.lanes} evenly",
                where="data.stream_lanes",
                remedy="start a number of processes that divides it, or begin a new run with a multiple of theirs",
            )
        self.settings = settings
        self.world = world
        self.micro_batch = micro_batch
        self.collate = collate
        self.vary = vary
        self._weights = [stream.weight for stream in streams]
        self._readers = [_Reader(stream, world.rank, world.size) for stream in streams]
        self._encode = encode
        self._cursor = Cursor([0] * len(streams))
        self._used = 0
        self._block: Block | None = None
        self._ahead: tuple[Cursor, Future[Part]] | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="drawbar-stream")
        self._filler: Sample | None = None

    def example(self) -> Sample:
        return self.vary(self._any_rows().samples[0], 0)

    @property
    def epoch(self) -> float:
        return self._cursor.epoch

    def state(self) -> dict[str, Any]:
        return {"cursor": asdict(self._cursor), "used": self._used, "fingerprint": self.settings.fingerprint}

    def load(self, state: dict[str, Any]) -> None:
        check_fingerprint(state["fingerprint"], self.settings.fingerprint)
        self._cursor, self._used = Cursor(**state["cursor"]), state["used"]
        self._block = self._ahead = None

    def steps(self, first: int, last: int) -> Iterator[tuple[int, list[MicroBatch[Batch]]]]:
        for step in range(first + 1, last + 1):
            yield step, self._micro_batches(self._take())

    def _take(self) -> list[tuple[Sample, int]]:
        """This rank's rows of the next global batch, and their lengths; the position moves on at once."""
        mine: list[tuple[Sample, int]] = []
        taken, epoch = 0, self._cursor.epoch
        while taken < self.settings.global_batch:
            block = self._open()
            if taken and block.start.epoch != epoch:  # rows never carry over into the next epoch
                break
            epoch = block.start.epoch
            chosen = block.sequence[self._used : self._used + self.settings.global_batch - taken]
            mine += [self._row(block, lane, row) for lane, row in chosen.tolist() if lane in block.lanes]
            taken += len(chosen)
            self._used += len(chosen)
            if self._used == len(block.sequence):
                self._cursor, self._used, self._block = block.after, 0, None
        return mine

    def _row(self, block: Block, lane: int, row: int) -> tuple[Sample, int]:
        start = (block.start.block * self.settings.lanes + lane) * LARGEST_BLOCK

        def renumber(sample: Sample) -> Sample:
            number = start + sample["id"]
            return self.vary({**sample, "id": number, "ids": [number]}, block.start.epoch)

        rows = block.lanes[lane]
        return rows.row(row, renumber), int(rows.lengths[row])

    def _micro_batches(self, rows: list[tuple[Sample, int]]) -> list[MicroBatch[Batch]]:
        """The rows as micro-batches: equally many on every rank, with fillers where this one has fewer."""
        lengths = np.array([length for _, length in rows], dtype=np.int64)
        batches = [
            MicroBatch(self.collate([rows[index][0] for index in chosen.tolist()]), True)
            for chosen in self.micro_batch.cut(np.arange(len(rows)), lengths)
        ]
        fillers = self.world.largest(len(batches)) - len(batches)
        self.tokens = int(self.world.sum(lengths.sum()))
        if rows:
            self._filler = rows[0][0]
        for _ in range(fillers):
            if self._filler is None:  # this rank has had no row of its own yet
                self._filler = self._any_rows().row(0, lambda sample: self.vary(sample, 0))
            batches.append(MicroBatch(self.collate([self._filler]), False))
        return batches

    def _any_rows(self) -> Rows:
        """The rows of the first record that gives any; encoded in the thread, as tokenizers serve one thread alone."""
        return self._thread.submit(self._first_rows).result()

    def _first_rows(self) -> Rows:
        for reader in self._readers:
            for located in reader.stream.read(0, 1, 0):
                rows = self._encode([located])
                if rows is not None:
                    return rows
        raise _no_samples()

    def _open(self) -> Block:
        """The block that the position is in; it has at least one row left.

        Raises:
            UserError: all sources were read, and gave no row.
        """
        ends = np.zeros(len(self._readers), dtype=np.int64)
        while self._block is None:
            block = self._agree(self._cursor, self._part(self._cursor))
            self._ahead = block.after, self._thread.submit(self._read, block.after)
            if len(block.sequence):
                self._block = block
            else:
                self._cursor = block.after
            ends += block.ended
            if ends.min() > 1 and self._block is None:  # once may have been the rest of a source alone
                raise _no_samples()
        return self._block

    def _part(self, cursor: Cursor) -> Part:
        if self._ahead is not None and self._ahead[0] == cursor:
            return self._ahead[1].result()
        return self._thread.submit(self._read, cursor).result()

    def _read(self, cursor: Cursor) -> Part:
        """Read and encode this rank's records of the block at ``cursor``. Runs in the thread, one block at a time."""
        mine = self.settings.lanes // self.world.size
        records: list[list[Located]] = [[] for _ in range(mine)]
        more = []
        for source, count in enumerate(self._counts(cursor)):
            first = cursor.positions[source]
            found, rest = self._readers[source].take(first * mine, (first + count) * mine) if count else ([], True)
            more.append(int(rest))
            for located in found:
                records[located.position % mine].append(located)
        lanes = {}
        for index, of_lane in enumerate(records):
            rows = self._encode(of_lane) if of_lane else None
            if rows is not None:
                lanes[self.world.rank + index * self.world.size] = rows
        return Part(lanes, more)

    def _counts(self, cursor: Cursor) -> list[int]:
        """Records of a lane that each source gives to a block."""
        size = self.settings.records
        if None in self._weights:
            return [size if source == cursor.source else 0 for source in range(len(self._weights))]
        shares = np.array(self._weights, dtype=np.float64) / sum(weight or 0.0 for weight in self._weights)
        before, after = (np.floor(shares * size * block + 0.5) for block in (cursor.block, cursor.block + 1))
        return (after - before).astype(int).tolist()

    def _agree(self, start: Cursor, part: Part) -> Block:
        """What all ranks read together: every rank learns how many rows each lane has, and which sources ended."""
        rows = np.zeros(self.settings.lanes, dtype=np.int64)
        for lane, found in part.lanes.items():
            rows[lane] = len(found)
        together = self.world.sum_counts([*rows.tolist(), *part.more])
        counts, more = together[: len(rows)], together[len(rows) :]
        ended = [not rest for rest in more]
        return Block(start, self._after(start, more), part.lanes, ended, self._sequence(start, counts))

    def _sequence(self, start: Cursor, counts: list[int]) -> NDArray[np.int64]:
        """A row of each lane in turn, as long as it has any."""
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

    def _after(self, start: Cursor, more: list[int]) -> Cursor:
        """Where the next block begins."""
        counts = self._counts(start)
        following = replace(
            start,
            positions=[
                position + count if rest else 0
                for position, count, rest in zip(start.positions, counts, more, strict=True)
            ],
            block=start.block + 1,
        )
        if None not in self._weights or more[start.source]:
            return following
        if start.source + 1 < len(counts):
            return replace(following, source=start.source + 1)
        return Cursor([0] * len(counts), epoch=start.epoch + 1)


class _Reader:
    """One source, read onwards; it starts anew only where the position jumps."""

    def __init__(self, stream: Stream, rank: int, world_size: int) -> None:
        self.stream = stream
        self._share = (rank, world_size)
        self._iterator: Iterator[Located] = iter(())
        self._pending: Located | None = None
        self._stop = -1

    def take(self, first: int, stop: int) -> tuple[list[Located], bool]:
        """This rank's records from number ``first`` to before ``stop``, and whether there are more."""
        if first != self._stop:
            self._iterator = self.stream.read(*self._share, first)
            self._pending = next(self._iterator, None)
        found = []
        while self._pending is not None and self._pending.position < stop:
            found.append(self._pending)
            self._pending = next(self._iterator, None)
        self._stop = stop
        return found, self._pending is not None


def _no_samples() -> UserError:
    return UserError(
        "no samples: the task's encode left out all records of the stream",
        where="data.train",
        remedy="check that the records hold what the task expects, and that they are long enough",
    )
