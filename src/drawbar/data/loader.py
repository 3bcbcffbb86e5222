"""Micro-batches for one data-parallel rank, from a sample order that no world size changes."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from drawbar.data.dataset import Sample
from drawbar.data.order import order
from drawbar.errors import UserError

Batch = TypeVar("Batch")
Collate = Callable[[list[Sample]], Batch]


class RowDataset(Protocol):
    """What a loader reads: rows by number, and a digest of all of them."""

    @property
    def fingerprint(self) -> str: ...
    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Sample: ...


@dataclass(frozen=True)
class MicroBatch(Generic[Batch]):
    """One forward on one rank."""

    batch: Batch
    counts: bool
    """False for a filler: a rank without rows runs it, so that all ranks run equally often; its loss is left out."""


@dataclass(frozen=True)
class DataState:
    """Where the data stands: valid at any world size and batch size."""

    epoch: int
    consumed: int
    """Rows of this epoch that steps have used, over all ranks; less than the dataset's length."""
    fingerprint: str


class TrainLoader(Generic[Batch]):
    """The micro-batches of each step for one rank.

    The last global batch of an epoch may be smaller: rows are never dropped, repeated or carried over.

    Args:
        dataset: the rows.
        seed: decides the order of each epoch.
        global_batch: rows in a step, over all ranks.
        micro_batch: most rows in one micro-batch.
        rank, world_size: this process's place among the data-parallel ranks.
        shuffle: visit the rows in a new random order every epoch, or always in their own.
        collate: rows → batch.
    """

    def __init__(
        self,
        dataset: RowDataset,
        *,
        seed: int,
        global_batch: int,
        micro_batch: int,
        rank: int,
        world_size: int,
        shuffle: bool,
        collate: Collate[Batch],
    ) -> None:
        self.dataset = dataset
        self.seed = seed
        self.global_batch = global_batch
        self.micro_batch = micro_batch
        self.rank = rank
        self.world_size = world_size
        self.shuffle = shuffle
        self.collate = collate
        self.position = DataState(epoch=0, consumed=0, fingerprint=dataset.fingerprint)

    @property
    def steps_per_epoch(self) -> int:
        return -(-len(self.dataset) // self.global_batch)

    def state(self) -> dict[str, Any]:
        """The data state as plain values. In the body of a loop over ``steps``, that loop's step counts as consumed."""
        return asdict(self.position)

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a saved state.

        Raises:
            UserError: the rows are not the ones that the state was saved with.
        """
        saved = DataState(**state)
        if saved.fingerprint != self.dataset.fingerprint:
            raise UserError(
                "the training data changed since the checkpoint was written: "
                f"its fingerprint was {saved.fingerprint} and is now {self.dataset.fingerprint}",
                where="data.train",
                remedy="restore the data (and the settings that encode it), "
                "or start a new run from these weights with `--fork NEWNAME`",
            )
        self.position = saved

    def steps(self, first: int, last: int) -> Iterator[tuple[int, list[MicroBatch[Batch]]]]:
        """(step, this rank's micro-batches) for the steps after ``first``, up to and with ``last``, across epochs."""
        for step in range(first + 1, last + 1):
            rows = self._take()
            dealt = _deal(rows, self.micro_batch, self.rank, self.world_size)
            yield step, [_collate(self.dataset, chosen, counts, self.collate) for chosen, counts in dealt]

    def _take(self) -> NDArray[np.int64]:
        """The next global batch. The position moves on at once: a checkpoint is taken after these rows are used."""
        epoch, start = self.position.epoch, self.position.consumed
        stop = min(start + self.global_batch, len(self.dataset))
        places = np.arange(start, stop)
        at_end = stop == len(self.dataset)
        self.position = DataState(
            epoch=epoch + 1 if at_end else epoch,
            consumed=0 if at_end else stop,
            fingerprint=self.dataset.fingerprint,
        )
        return order(self.seed, epoch, places, len(self.dataset)) if self.shuffle else places


class EvalLoader(Generic[Batch]):
    """Every row once over all ranks, in order; each rank takes one contiguous share, and all run equally often.

    Args: as for ``TrainLoader``. Its length is this rank's number of micro-batches, fillers included.
    """

    def __init__(
        self, dataset: RowDataset, *, micro_batch: int, rank: int, world_size: int, collate: Collate[Batch]
    ) -> None:
        self.dataset = dataset
        self.collate = collate
        self._dealt = _deal(np.arange(len(dataset)), micro_batch, rank, world_size)

    def __len__(self) -> int:
        return len(self._dealt)

    def __iter__(self) -> Iterator[MicroBatch[Batch]]:
        for chosen, counts in self._dealt:
            yield _collate(self.dataset, chosen, counts, self.collate)


def _deal(
    rows: NDArray[np.int64], micro_batch: int, rank: int, world_size: int
) -> list[tuple[NDArray[np.int64], bool]]:
    """One rank's share of the rows as (rows, counts) for each micro-batch: the same number of them on every rank.

    Collective operations run once a micro-batch, so a rank that ran fewer would leave the others waiting. Where a rank
    has no rows left, a filler of one row stands in.
    """
    share = rows[rank * len(rows) // world_size : (rank + 1) * len(rows) // world_size]
    largest_share = -(-len(rows) // world_size)
    starts = range(0, largest_share, micro_batch)
    return [(share[start : start + micro_batch], True) if start < len(share) else (rows[:1], False) for start in starts]


def _collate(dataset: RowDataset, rows: NDArray[np.int64], counts: bool, collate: Collate[Batch]) -> MicroBatch[Batch]:
    return MicroBatch(batch=collate([dataset[row] for row in rows.tolist()]), counts=counts)
