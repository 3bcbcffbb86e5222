"""Training batches from a stream that is never held in memory, in an order that no world size changes.

The stream is read in blocks of records. Record number i of a source belongs to lane ``i % lanes``, and a lane to one
rank, which alone parses and encodes its records. A lane's part of a block is shuffled (and packed) by itself; then the
block's rows come in turn from all lanes. So the rows of a block are a pure function of the data and the seed, and a
position is where the block begins and how many of its rows were used: to go on, that block is read again.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from drawbar.data.dataset import Sample
from drawbar.data.loader import Augment, Batch, Collate, Loader, MicroBatch, MicroBatchSize, Rows, check_fingerprint
from drawbar.data.order import order
from drawbar.data.sources import LocatedRecord
from drawbar.distributed.process_group import DataParallelGroup
from drawbar.errors import UserError
from drawbar.runtime.log import logger

LARGEST_BLOCK = 2**32
"""Upper bound on the samples of a lane in one block; used to number samples across blocks."""


class Stream(Protocol):
    """One source that can be read from anywhere; see ``SourceStream``."""

    weight: float | None
    size: int | None
    """How many records it has, those that are left out included; None before it was read to its end."""

    def read(self, lane: int, lanes: int, first: int) -> Iterator[LocatedRecord]: ...


@dataclass(frozen=True)
class StreamSettings:
    """How a stream becomes batches; none of it may change while a run lasts."""

    seed: int
    shuffle: bool
    lanes: int
    records_per_lane: int
    """Records of a lane in one block."""
    global_batch: int
    fingerprint: str
    """Of the data, and of the settings that encode it."""
    code: Mapping[str, str] = field(default_factory=dict)
    """What else decides the samples, and may change: digests of the user's code, by file."""


@dataclass(frozen=True)
class Cursor:
    """Where a block begins."""

    positions: list[int]
    """For each source, the records already read per lane; a weighted source restarts at its end."""
    source: int = 0
    """Without weights: the source that is being read."""
    block: int = 0
    """Blocks of this epoch before it."""
    epoch: int = 0


@dataclass(frozen=True)
class Part:
    """One rank's share of a block."""

    lanes: dict[int, Rows]
    """Its rows by lane; a lane without rows is left out."""
    ends: list[int]
    """For each source, how often this rank came to its end."""


@dataclass(frozen=True)
class Block:
    start: Cursor
    after: Cursor
    lanes: dict[int, Rows]
    """This rank's rows."""
    ends: list[int]
    """For each source, how often it came to its end, summed over all ranks."""
    sequence: NDArray[np.int64]
    """Shape (rows, 2): lane and number of all ranks' rows, in the order of training."""


class StreamLoader(Loader[Batch]):
    """The micro-batches of each step for one rank, from a stream; how, see the top of this file.

    Without weights the sources are read one after the other, and an epoch ends with the last. With weights, each gives
    its part of every block and begins again at its end, so that there is one epoch without end.

    Args:
        encode: a lane's records of one block → its rows, or None where they give none. Called in a thread, ahead of
            training.
        ranks: those that share the stream.
        micro_batch, collate, augment: as for ``TrainLoader``.

    """

    steps_per_epoch = None

    def __init__(
        self,
        streams: Sequence[Stream],
        settings: StreamSettings,
        encode: Callable[[list[LocatedRecord]], Rows | None],
        *,
        ranks: DataParallelGroup,
        micro_batch: MicroBatchSize,
        collate: Collate[Batch],
        augment: Augment = lambda sample, epoch: sample,
    ) -> None:
        assert settings.lanes % ranks.size == 0, "check_world refuses it"
        self.settings = settings
        self.ranks = ranks
        self.micro_batch = micro_batch
        self.collate = collate
        self.augment = augment
        self._weights = [stream.weight for stream in streams]
        readers = [_Reader if stream.weight is None else _EndlessReader for stream in streams]
        self._readers = [make(stream, ranks) for make, stream in zip(readers, streams, strict=True)]
        self._encode = encode
        self._cursor = Cursor([0] * len(streams))
        self._used = 0
        self._block: Block | None = None
        self._ahead: tuple[Cursor, Future[Part]] | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="drawbar-stream")
        self._filler: Sample | None = None

    @property
    def epoch(self) -> float:
        return self._cursor.epoch

    def state(self) -> dict[str, Any]:
        kept = {"fingerprint": self.settings.fingerprint, "code": dict(self.settings.code)}
        dealt = {"lanes": self.settings.lanes, "records": self.settings.records_per_lane}
        return {"cursor": asdict(self._cursor), "used": self._used, **dealt, **kept}

    def load(self, state: dict[str, Any]) -> None:
        self._check(state)
        self._cursor, self._used = self._position_from(state)
        self._block = self._ahead = None

    def _position_from(self, state: dict[str, Any]) -> tuple[Cursor, int]:
        """The position; for a fork with other lanes or blocks, the nearest one before the block that was in use."""
        cursor, used, settings = Cursor(**state["cursor"]), state["used"], self.settings
        lanes, records = state.get("lanes", settings.lanes), state.get("records", settings.records_per_lane)
        if (lanes, records) == (settings.lanes, settings.records_per_lane):
            return cursor, used
        logger.warning(
            "the stream is dealt into other lanes or blocks than before: it goes on where a block of %d records began, "
            "of whose rows %d come a second time",
            lanes * records,
            used,
        )
        return replace(cursor, positions=[place * lanes // settings.lanes for place in cursor.positions]), 0

    def _check(self, state: dict[str, Any]) -> None:
        """Check that a saved position belongs to this data; warn where that cannot be decided.

        Raises:
            OtherData: it is not.
        """
        is_older = "cursor" in state and "code" not in state
        if is_older and len(state["cursor"]["positions"]) == len(self._readers):
            logger.warning("an older drawbar wrote the position in the stream: see that its data have not changed")
            return
        check_fingerprint(state["fingerprint"], self.settings.fingerprint)
        before, now = state.get("code", {}), self.settings.code
        changed = [name for name in sorted({*before, *now}) if before.get(name) != now.get(name)]
        if changed:
            logger.warning(
                "changed since the checkpoint was written: %s; if other samples come of that, the position in the "
                "stream is not exact",
                ", ".join(changed),
            )

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
            return self.augment({**sample, "id": number, "ids": [number]}, block.start.epoch)

        rows = block.lanes[lane]
        return rows.row(row, renumber), int(rows.lengths[row])

    def _micro_batches(self, rows: list[tuple[Sample, int]]) -> list[MicroBatch[Batch]]:
        """The rows as micro-batches: equally many on every rank, with fillers where this one has fewer."""
        lengths = np.array([length for _, length in rows], dtype=np.int64)
        batches = [
            MicroBatch(self.collate([rows[index][0] for index in chosen.tolist()]))
            for chosen in self.micro_batch.split(np.arange(len(rows)), lengths)
        ]
        fillers = self.ranks.max(len(batches)) - len(batches)
        self.tokens = int(self.ranks.sum_of_leaders(lengths.sum()))
        if fillers:
            filler = rows[0][0] if rows else self._any_row()
            batches += [MicroBatch(self.collate([filler]), is_filler=True) for _ in range(fillers)]
        return batches

    def _any_row(self) -> Sample:
        """A row for a rank that has none in a step: the same in every process, as dropout draws for fillers, too."""
        if self._filler is None:
            self._filler = self._any_rows().row(0, lambda sample: self.augment(sample, 0))
        return self._filler

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
            with self.ranks.working("reading the stream"):
                part = self._part(self._cursor)
            block = self._agree(self._cursor, part)
            self._ahead = block.after, self._thread.submit(self._read, block.after)
            if len(block.sequence):
                self._block = block
            else:
                self._cursor = block.after
            ends += block.ends
            if ends.min() > 2 * self.ranks.size and self._block is None:  # each rank has seen all of each source
                raise _no_samples()
        return self._block

    def _part(self, cursor: Cursor) -> Part:
        if self._ahead is not None and self._ahead[0] == cursor:
            return self._ahead[1].result()
        return self._thread.submit(self._read, cursor).result()

    def _read(self, cursor: Cursor) -> Part:
        """Read and encode this rank's records of the block at ``cursor``. Runs in the thread, one block at a time."""
        mine = self.settings.lanes // self.ranks.size
        records: list[list[LocatedRecord]] = [[] for _ in range(mine)]
        ends = []
        for reader, first, count in zip(self._readers, cursor.positions, self._counts(cursor), strict=True):
            found, ended = reader.take(first * mine, (first + count) * mine) if count else ([], 0)
            ends.append(ended)
            for visit, located in found:
                records[visit % mine].append(located)
        lanes = {}
        for index, of_lane in enumerate(records):
            rows = self._encode(of_lane) if of_lane else None
            if rows is not None:
                lanes[self.ranks.rank + index * self.ranks.size] = rows
        return Part(lanes, ends)

    def _counts(self, cursor: Cursor) -> list[int]:
        """Records of a lane that each source gives to a block."""
        size = self.settings.records_per_lane
        if None in self._weights:
            return [size if source == cursor.source else 0 for source in range(len(self._weights))]
        shares = np.array(self._weights, dtype=np.float64) / sum(weight or 0.0 for weight in self._weights)
        before, after = (np.floor(shares * size * block + 0.5) for block in (cursor.block, cursor.block + 1))
        return (after - before).astype(int).tolist()

    def _agree(self, start: Cursor, part: Part) -> Block:
        """What all ranks read together: every rank learns how many rows each lane has, and where sources ended."""
        rows = np.zeros(self.settings.lanes, dtype=np.int64)
        for lane, found in part.lanes.items():
            rows[lane] = len(found)
        together = self.ranks.sum_counts([*rows.tolist(), *part.ends])
        counts, ends = together[: len(rows)], together[len(rows) :]
        return Block(start, self._after(start, ends), part.lanes, ends, self._sequence(start, counts))

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

    def _after(self, start: Cursor, ends: list[int]) -> Cursor:
        """Where the next block begins."""
        positions = [position + count for position, count in zip(start.positions, self._counts(start), strict=True)]
        following = replace(start, positions=positions, block=start.block + 1)
        if None not in self._weights or ends[start.source] < self.ranks.size:
            return following
        if start.source + 1 < len(positions):
            return replace(following, source=start.source + 1)
        return Cursor([0] * len(positions), epoch=start.epoch + 1)


class _Reader:
    """Reads this rank's records of one source sequentially; seeks only when the position jumps."""

    def __init__(self, stream: Stream, ranks: DataParallelGroup) -> None:
        self.stream = stream
        self.rank, self.ranks = ranks.rank, ranks.size
        self.ends = 0
        """How often the end was reached."""
        self._visits: Iterator[tuple[int, LocatedRecord]] = iter(())
        self._pending: tuple[int, LocatedRecord] | None = None
        self._stop = -1

    def take(self, first: int, stop: int) -> tuple[list[tuple[int, LocatedRecord]], int]:
        """This rank's (index, record) pairs for ``first`` <= index < ``stop``, and how often the source ended.

        An exhausted source reports its end again in every call.
        """
        ends = self.ends
        if first != self._stop:
            self._visits = self.visits(first)
            self._pending = next(self._visits, None)
        found = []
        while self._pending is not None and self._pending[0] < stop:
            found.append(self._pending)
            self._pending = next(self._visits, None)
        self._stop = stop
        return found, self.ends - ends if self._pending is not None else 1

    def visits(self, first: int) -> Iterator[tuple[int, LocatedRecord]]:
        """(index, record) of this rank's records from index ``first`` on; see ``take``."""
        for located in self.stream.read(self.rank, self.ranks, first):
            yield located.position, located


class _EndlessReader(_Reader):
    """An endlessly repeated source: read u is record ``u % size``, and number ``u // ranks`` of rank ``u % ranks``."""

    def visits(self, first: int) -> Iterator[tuple[int, LocatedRecord]]:
        visit, turns_without = self.rank + self.ranks * first, 0
        while turns_without < self.ranks:  # in this many passes, a rank is assigned some record of any source
            size = self.stream.size
            turn, place = divmod(visit, size) if size else (0, visit)
            start, lane = visit - place, place % self.ranks
            turns_without += size is not None  # else this turn may only have found out the size
            for located in self.stream.read(lane, self.ranks, place // self.ranks):
                turns_without = 0
                yield (start + lane + self.ranks * located.position) // self.ranks, located
            assert self.stream.size is not None
            self.ends += 1
            after = (turn + 1) * self.stream.size
            visit = max(visit, after + (self.rank - after) % self.ranks)


def _no_samples() -> UserError:
    return UserError(
        "no samples: the task's encode left out all records of the stream",
        where="data.train",
        remedy="check that the records hold what the task expects, and that they are long enough",
    )
