"""Loaders: micro-batches for one data-parallel rank, in a sample order that does not depend on the world size."""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Generic, Protocol

import numpy as np
from numpy.typing import NDArray

from drawbar.data.columns import Values
from drawbar.data.dataset import EncodedDataset, Sample
from drawbar.data.prefetch import (
    Augment,
    Batch,
    BatchMaker,
    Collate,
    Join,
    MicroBatch,
    PlannedMicroBatch,
    Prefetcher,
    RawBatch,
    RawRow,
    StepPlan,
    unchanged,
)
from drawbar.data.sampler import Sampler
from drawbar.distributed.process_group import DataParallelRanks
from drawbar.errors import UserError

TOKEN_FIELDS = ("input_ids", "decoder_input_ids")
"""Fields of a sample; the longest determines its length in tokens."""
_FAILED = 2**62
"""In place of a number of micro-batches, where a rank cannot plan its step; larger than any number."""


class Rows(Protocol):
    """The data of a loader: rows by number, their lengths in tokens, and a digest of all of them."""

    @property
    def samples(self) -> EncodedDataset: ...
    @property
    def fingerprint(self) -> str: ...
    @property
    def lengths(self) -> Values: ...
    @property
    def join(self) -> Join: ...
    def __len__(self) -> int: ...
    def read(self, index: int) -> list[Sample]:
        """The encoded samples of a row."""


class SampleRows:
    """Rows of one sample each."""

    def __init__(self, samples: EncodedDataset) -> None:
        self.samples = samples
        self.lengths = samples.stored_lengths(*TOKEN_FIELDS)  # the longer of encoder and decoder
        self.fingerprint = samples.fingerprint
        self.join: Join = only_sample

    def __len__(self) -> int:
        return len(self.samples)

    def read(self, index: int) -> list[Sample]:
        return [self.samples[index]]


def only_sample(samples: list[Sample]) -> Sample:
    """The row of one sample."""
    (sample,) = samples
    return sample


def raw_batch(rows: Rows, chosen: NDArray[np.int64], epoch: int) -> RawBatch:
    """Read some of the rows."""
    return RawBatch([RawRow(rows.read(row), rows.join) for row in chosen.tolist()], epoch)


@dataclass(frozen=True)
class MicroBatchSize:
    """Limits of a micro-batch: rows, and tokens including padding (one row is always allowed)."""

    rows: int | None = None
    tokens: int | None = None

    def split(self, rows: NDArray[np.int64], lengths: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        """Split rows into micro-batches, longest first, so that rows of similar length share one.

        Args:
            rows: indices into ``lengths``.
            lengths: shape (all rows,): number of tokens of each row.
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
class DataPosition:
    """The position in the data, for any world size and micro-batch size."""

    epoch: int
    consumed: int
    """Number of rows of this epoch consumed by steps, over all ranks; less than the epoch's size."""
    fingerprint: str


class Loader(ABC, Generic[Batch]):
    """Training batches for one rank, and their position."""

    steps_per_epoch: int | None
    """Number of steps in an epoch; None if not known before it ends."""
    position: Any
    """Position in the data after the latest step."""
    tokens: int = 0
    """This rank's tokens in the latest step, without padding (encoder–decoder: the longer side); or else samples."""
    waited: float = 0.0
    """Seconds that this rank waited for the batches of the latest step."""

    def __init__(self, ranks: DataParallelRanks, micro_batch: MicroBatchSize, prefetcher: Prefetcher[Batch]) -> None:
        self.ranks = ranks
        self.micro_batch = micro_batch
        self.prefetcher = prefetcher
        self._before_newest: Any = None
        self._waited_for_ranks = 0.0

    @property
    def counts_tokens(self) -> bool:
        """False if the samples are known to have no tokens."""
        return True

    @property
    @abstractmethod
    def epoch(self) -> float:
        """Number of epochs consumed, including fractions if the length of an epoch is known."""

    def steps(self, first: int, last: int) -> Iterator[tuple[int, list[MicroBatch[Batch]]]]:
        """Yield (step, this rank's micro-batches) for the steps after ``first`` up to and including ``last``, across
        epochs."""
        self._plan_from(self.position)
        self._before_newest = self.position
        for step, prepared in self.prefetcher.steps(self._plan, first, last):
            self.position, self.tokens = prepared.plan.after, prepared.plan.tokens
            self.waited, self._waited_for_ranks = max(0.0, prepared.waited - self._waited_for_ranks), 0.0
            yield step, prepared.micro_batches
            self._before_newest = self.position

    def undo_step(self) -> None:
        """Undo the latest step, which was not trained or whose batches failed: restore the position before it, and the
        host's random generators, from which a user's augment or collate may have drawn."""
        self.position = self._before_newest
        self.prefetcher.restore_generators()

    def _max_over_ranks(self, micro_batches: int) -> int:
        """The largest number of micro-batches of any rank; the others add padding micro-batches up to it. Collective.
        Waiting here for a rank that is still training does not count as waiting for batches.

        Args:
            micro_batches: this rank's number, or ``_FAILED``.

        Raises:
            OtherRankFailed: another rank passed ``_FAILED``.
        """
        began = time.perf_counter()
        most = self.ranks.max(micro_batches)
        self._waited_for_ranks += time.perf_counter() - began
        if micro_batches < most == _FAILED:
            raise OtherRankFailed
        return most

    @abstractmethod
    def _plan_from(self, position: Any) -> None:
        """Make the next ``_plan`` be for the step after this position."""

    @abstractmethod
    def _plan(self, may_defer_error: bool) -> StepPlan | None:
        """Plan the next step; called by ``Prefetcher.steps``.

        Args:
            may_defer_error: whether an earlier step is still to be trained. If so, it may return None instead of
                raising an error, and is called again after that step.

        Raises:
            OtherRankFailed: another rank cannot plan the step.
        """

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """The position as plain values. Collective. In the body of a loop over ``steps``, that loop's step counts as
        consumed."""

    @abstractmethod
    def load(self, state: dict[str, Any]) -> None:
        """Continue from a saved position.

        Raises:
            UserError: the data differ from those that the position was saved with.
        """

    def close(self) -> None:
        """Stop prefetching."""
        self.prefetcher.close()


class OtherRankFailed(Exception):
    """Another rank cannot make its batches; that rank raises the actual error."""


class OtherData(UserError):
    """The training data are not those of the checkpoint."""


def check_fingerprint(saved: str, now: str) -> None:
    """Refuse to resume with other data.

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

    The last global batch of an epoch may be smaller: no row of the sampler is dropped, repeated or carried over.

    Args:
        rows: the data.
        sampler: the order of the rows in an epoch.
        global_batch: rows per step, over all ranks.
        ranks: the data-parallel ranks.
        micro_batch: maximum size of one forward.
        prefetcher: builds the batches.
    """

    position: DataPosition

    def __init__(
        self,
        rows: Rows,
        sampler: Sampler,
        *,
        global_batch: int,
        ranks: DataParallelRanks,
        micro_batch: MicroBatchSize,
        prefetcher: Prefetcher[Batch],
    ) -> None:
        super().__init__(ranks, micro_batch, prefetcher)
        self.rows = rows
        self.sampler = sampler
        self.global_batch = global_batch
        self.steps_per_epoch = -(-sampler.size // global_batch)
        self.position = DataPosition(epoch=0, consumed=0, fingerprint=rows.fingerprint)
        self._planned = self.position

    @property
    def counts_tokens(self) -> bool:
        return not self.rows.samples.fields.keys().isdisjoint(TOKEN_FIELDS)

    @property
    def epoch(self) -> float:
        return self.position.epoch + self.position.consumed / self.sampler.size

    def state(self) -> dict[str, Any]:
        return asdict(self.position)

    def load(self, state: dict[str, Any]) -> None:
        check_fingerprint(
            state["fingerprint"], self.rows.fingerprint
        )  # first: a stream's state does not fit DataPosition
        self.position = DataPosition(**state)

    def _plan_from(self, position: DataPosition) -> None:
        self._planned = position

    def _plan(self, may_defer_error: bool) -> StepPlan:
        """This rank's share of the next global batch. Looks up no other rows, as a step may have thousands."""
        epoch, start = self._planned.epoch, self._planned.consumed
        stop = min(start + self.global_batch, self.sampler.size)
        at_end = stop == self.sampler.size
        self._planned = DataPosition(
            epoch=epoch + 1 if at_end else epoch,
            consumed=0 if at_end else stop,
            fingerprint=self.rows.fingerprint,
        )
        size, rank, ranks = stop - start, self.ranks.rank, self.ranks.size
        share = np.arange(start + rank * size // ranks, start + (rank + 1) * size // ranks)
        try:
            first, rows = np.split(self.sampler.rows(epoch, np.concatenate(([start], share))), [1])
            lengths = self.rows.lengths[rows]
        except Exception:
            self._most_micro_batches(_FAILED, size)  # else the other ranks would wait for this one
            raise
        chosen = [rows[places] for places in self.micro_batch.split(np.arange(len(rows)), lengths)]
        micro_batches = [PlannedMicroBatch(partial(raw_batch, self.rows, one, epoch)) for one in chosen]
        missing = self._most_micro_batches(len(chosen), size) - len(chosen)
        if missing:  # the same row at any number of ranks
            micro_batches += [PlannedMicroBatch(partial(raw_batch, self.rows, first, epoch), is_padding=True)] * missing
        return StepPlan(micro_batches, int(lengths.sum()), after=self._planned)

    def _most_micro_batches(self, own: int, size: int) -> int:
        """The largest number of micro-batches of any rank. Collectives run once per micro-batch, so a rank with fewer
        must run padding micro-batches, or the others would hang.

        Args:
            own: this rank's number of micro-batches.
            size: rows of the step.
        """
        if self.micro_batch.tokens is not None:
            return self._max_over_ranks(own)
        largest_share = -(-size // self.ranks.size)
        return -(-largest_share // (self.micro_batch.rows or largest_share))


class EvalLoader(Generic[Batch]):
    """Loads every row exactly once over all ranks. Which rows share a batch is independent of the number of ranks.

    Batches are distributed round-robin, the same number to each rank. ``len`` is this rank's number of micro-batches,
    including padding ones.

    Args:
        parts: rows that share no batch with those of other parts; all rows. Default: one part.
        dp_rank, dp_size: this data-parallel rank, and the number of data-parallel ranks.
        rows, micro_batch, collate, augment: as for ``TrainLoader`` and ``BatchMaker``.
    """

    def __init__(
        self,
        rows: Rows,
        *,
        micro_batch: MicroBatchSize,
        dp_rank: int,
        dp_size: int,
        collate: Collate[Batch],
        augment: Augment = unchanged,
        parts: Sequence[range] | None = None,
    ) -> None:
        self.rows = rows
        self._make = BatchMaker(collate, augment)
        self._dealt: list[tuple[NDArray[np.int64], bool]] = []
        self.parts: list[int] = []
        """The part of each micro-batch."""
        lengths = rows.lengths[:]
        for number, part in enumerate(parts or [range(len(rows))]):
            batches = micro_batch.split(np.arange(part.start, part.stop), lengths)
            mine = batches[dp_rank::dp_size]
            missing = -(-len(batches) // dp_size) - len(mine)
            self._dealt += [(chosen, False) for chosen in mine] + [(batches[-1][:1], True)] * missing
            self.parts += [number] * (len(mine) + missing)

    def __len__(self) -> int:
        return len(self._dealt)

    def __iter__(self) -> Iterator[MicroBatch[Batch]]:
        for chosen, is_padding in self._dealt:
            yield MicroBatch(self._make(raw_batch(self.rows, chosen, epoch=0)), is_padding)
