"""Micro-batches for one data-parallel rank, from a sample order that no world size changes."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from drawbar.data.dataset import EncodedDataset, Sample
from drawbar.data.sampler import Sampler
from drawbar.errors import UserError

Batch = TypeVar("Batch")
Collate = Callable[[list[Sample]], Batch]
Augment = Callable[[Sample, int], Sample]
"""(sample, epoch) → the sample as this epoch sees it."""


class Rows(Protocol):
    """What a loader reads: rows by number, their lengths in tokens, and a digest of all of them."""

    @property
    def samples(self) -> EncodedDataset: ...
    @property
    def fingerprint(self) -> str: ...
    @property
    def lengths(self) -> NDArray[np.int64]: ...
    def __len__(self) -> int: ...
    def row(self, index: int, augment: Callable[[Sample], Sample]) -> Sample: ...


class SampleRows:
    """One sample a row."""

    def __init__(self, samples: EncodedDataset) -> None:
        self.samples = samples
        self.lengths = samples.lengths
        if "decoder_input_ids" in samples.fields:  # a batch is as long as its longer side
            self.lengths = np.maximum(self.lengths, samples.field_lengths("decoder_input_ids"))
        self.fingerprint = samples.fingerprint

    def __len__(self) -> int:
        return len(self.samples)

    def row(self, index: int, augment: Callable[[Sample], Sample]) -> Sample:
        return augment(self.samples[index])


@dataclass(frozen=True)
class MicroBatchSize:
    """How much one forward takes: at most so many rows, and so many tokens, padding included (one row always fits)."""

    rows: int | None = None
    tokens: int | None = None

    def split(self, rows: NDArray[np.int64], lengths: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        """The rows in micro-batches, longest first, so that rows of similar length share one.

        Args:
            rows: numbers of rows.
            lengths: shape (all rows,): tokens of each.
        """
        decreasing = rows[np.argsort(-lengths[rows], kind="stable")]
        batches, start = [], 0
        while start < len(decreasing):
            fitting = len(decreasing)
            if self.tokens is not None:
                fitting = max(1, self.tokens // max(1, int(lengths[decreasing[start]])))
            stop = start + min(fitting, self.rows or fitting)
            batches.append(decreasing[start:stop])
            start = stop
        return batches


@dataclass(frozen=True)
class MicroBatch(Generic[Batch]):
    """One forward on one rank."""

    batch: Batch
    is_filler: bool = False
    """A rank without rows runs it, so that all ranks run equally often; its loss is left out."""


@dataclass(frozen=True)
class DataState:
    """Where the data stands: valid at any world size and micro-batch size."""

    epoch: int
    consumed: int
    """Rows of this epoch that steps have used, over all ranks; less than the epoch's size."""
    fingerprint: str


class Loader(ABC, Generic[Batch]):
    """Training batches for one rank, and their position."""

    steps_per_epoch: int | None
    """Steps in an epoch; None where that is not known before it ends."""
    tokens: int = 0
    """Tokens of the newest step, over all ranks, without padding; samples, where they have no tokens."""

    @property
    @abstractmethod
    def epoch(self) -> float:
        """Epochs consumed, fractions included where the length of one is known."""

    @abstractmethod
    def steps(self, first: int, last: int) -> Iterator[tuple[int, list[MicroBatch[Batch]]]]:
        """(step, this rank's micro-batches) for the steps after ``first``, up to and with ``last``, across epochs."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """The position as plain values; every rank calls it. In the body of a loop over ``steps``, that loop's step
        counts as consumed."""

    @abstractmethod
    def load(self, state: dict[str, Any]) -> None:
        """Go on from a saved position.

        Raises:
            UserError: the data is not what the position was saved with.
        """


class OtherData(UserError):
    """The training data are not those of the checkpoint."""


def check_fingerprint(saved: str, now: str) -> None:
    """Refuse to go on with other data.

    Raises:
        OtherData: the two differ.
    """
    if saved != now:
        raise OtherData(
            f"the training data changed since the checkpoint was written: its fingerprint was {saved} and is now {now}",
            where="data.train",
            remedy="restore the data (and the settings that encode it), "
            "or start a new run from these weights with `--fork NEWNAME`",
        )


class TrainLoader(Loader[Batch]):
    """The micro-batches of each step for one rank, from rows that can be read in any order.

    The last global batch of an epoch may be smaller: rows are never dropped, repeated or carried over.

    Args:
        rows: the data.
        sampler: which row stands where in an epoch.
        global_batch: rows in a step, over all ranks.
        micro_batch: most that one forward takes.
        rank, world_size: this process's place among the data-parallel ranks.
        collate: rows → batch.
        augment: see ``Augment``; by default a sample is the same in every epoch.
    """

    def __init__(
        self,
        rows: Rows,
        sampler: Sampler,
        *,
        global_batch: int,
        micro_batch: MicroBatchSize,
        rank: int,
        world_size: int,
        collate: Collate[Batch],
        augment: Augment = lambda sample, epoch: sample,
    ) -> None:
        self.rows = rows
        self.sampler = sampler
        self.global_batch = global_batch
        self.micro_batch = micro_batch
        self.rank = rank
        self.world_size = world_size
        self.collate = collate
        self.augment = augment
        self.steps_per_epoch = -(-sampler.size // global_batch)
        self.position = DataState(epoch=0, consumed=0, fingerprint=rows.fingerprint)

    @property
    def epoch(self) -> float:
        return self.position.epoch + self.position.consumed / self.sampler.size

    def state(self) -> dict[str, Any]:
        return asdict(self.position)

    def load(self, state: dict[str, Any]) -> None:
        check_fingerprint(state["fingerprint"], self.rows.fingerprint)  # first: a stream's state has other fields
        self.position = DataState(**state)

    def steps(self, first: int, last: int) -> Iterator[tuple[int, list[MicroBatch[Batch]]]]:
        for step in range(first + 1, last + 1):
            epoch = self.position.epoch
            rows = self._take()
            self.tokens = int(self.rows.lengths[rows].sum())
            dealt = self._rank_micro_batches(rows)
            yield (
                step,
                [MicroBatch(self._collate(chosen, epoch), is_filler) for chosen, is_filler in dealt],
            )

    def _take(self) -> NDArray[np.int64]:
        """The next global batch. The position moves on at once: a checkpoint is taken after these rows are used."""
        epoch, start = self.position.epoch, self.position.consumed
        stop = min(start + self.global_batch, self.sampler.size)
        at_end = stop == self.sampler.size
        self.position = DataState(
            epoch=epoch + 1 if at_end else epoch,
            consumed=0 if at_end else stop,
            fingerprint=self.rows.fingerprint,
        )
        return self.sampler.rows(epoch, np.arange(start, stop))

    def _rank_micro_batches(self, rows: NDArray[np.int64]) -> list[tuple[NDArray[np.int64], bool]]:
        """This rank's share of the rows as (rows, is_filler) for each micro-batch: equally many on every rank.

        Collective operations run once a micro-batch, so a rank that ran fewer would leave the others waiting. Where a
        rank has no rows left, a filler of one row stands in.
        """
        cuts = []
        for rank in range(self.world_size):
            share = rows[rank * len(rows) // self.world_size : (rank + 1) * len(rows) // self.world_size]
            cuts.append(self.micro_batch.split(share, self.rows.lengths))
        fillers = max(map(len, cuts)) - len(cuts[self.rank])
        return [(chosen, False) for chosen in cuts[self.rank]] + [(rows[:1], True)] * fillers

    def _collate(self, chosen: NDArray[np.int64], epoch: int) -> Batch:
        return self.collate([self.rows.row(row, lambda sample: self.augment(sample, epoch)) for row in chosen.tolist()])


class EvalLoader(Generic[Batch]):
    """Every row once over all ranks. Which rows share a batch does not depend on the number of ranks.

    Batches go to ranks round-robin, equally many to each. Args: as for ``TrainLoader``. ``len`` is this rank's
    number of micro-batches, fillers included.
    """

    def __init__(
        self,
        rows: Rows,
        *,
        micro_batch: MicroBatchSize,
        rank: int,
        world_size: int,
        collate: Collate[Batch],
        augment: Augment = lambda sample, epoch: sample,
    ) -> None:
        self.rows = rows
        self.collate = collate
        self.augment = augment
        batches = micro_batch.split(np.arange(len(rows)), rows.lengths)
        mine = batches[rank::world_size]
        fillers = -(-len(batches) // world_size) - len(mine)
        self._dealt = [(chosen, False) for chosen in mine] + [(batches[-1][:1], True)] * fillers

    def __len__(self) -> int:
        return len(self._dealt)

    def __iter__(self) -> Iterator[MicroBatch[Batch]]:
        for chosen, is_filler in self._dealt:
            rows = [self.rows.row(row, lambda sample: self.augment(sample, 0)) for row in chosen.tolist()]
            yield MicroBatch(self.collate(rows), is_filler)
