import errno
import itertools
import json
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drawbar.data.dataset import EncodedDataset, encode_records
from drawbar.data.loader import EvalLoader, MicroBatchSize, OtherRankFailed, SampleRows, TrainLoader
from drawbar.data.packing import PackedRows, plan_rows
from drawbar.data.prefetch import BatchMaker, MicroBatch, Prefetcher
from drawbar.data.sampler import Grouped, InOrder, Sampler, Shuffled, order
from drawbar.errors import UserError

COUNTS = st.integers(1, 12)
WORLDS = st.integers(1, 5)
LENGTHS = st.lists(st.integers(1, 30), min_size=1, max_size=60)
SIZES = st.one_of(
    st.builds(MicroBatchSize, rows=COUNTS),
    st.builds(MicroBatchSize, tokens=st.integers(1, 100)),
    st.builds(MicroBatchSize, rows=COUNTS, tokens=st.integers(1, 100)),
)
ROWS = MicroBatchSize(rows=2)


def dataset(lengths: list[int], offset: int = 0) -> EncodedDataset:
    records = [{"input_ids": [number + offset] * length} for number, length in enumerate(lengths)]
    return encode_records(records, lambda record: record, describe=str)


def collate(samples: list[dict[str, Any]]) -> list[int]:
    return [number for sample in samples for number in sample["ids"]]


class SimulatedRank:
    """A data-parallel rank in a thread of its own, among several."""

    def __init__(self, rank: int, largest: "Largest") -> None:
        self.rank, self.size, self._largest = rank, largest.size, largest

    def max(self, value: int) -> int:
        return self._largest.of(self.rank, value)


class Largest:
    def __init__(self, size: int) -> None:
        self.size = size
        self._values = [0] * size
        self._barrier = threading.Barrier(size, timeout=60)

    def of(self, rank: int, value: int) -> int:
        self._values[rank] = value
        self._barrier.wait()
        largest = max(self._values)
        self._barrier.wait()
        return largest


def simulated(world_size: int) -> list[Any]:
    largest = Largest(world_size)
    return [SimulatedRank(rank, largest) for rank in range(world_size)]


def steps_of(
    ranks: list[TrainLoader[list[int]]], first: int, last: int
) -> list[tuple[tuple[int, list[MicroBatch[list[int]]]], ...]]:
    """For each step, what each rank's loader gives."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(zip(*pool.map(lambda rank: list(rank.steps(first, last)), ranks), strict=True))


def loaders(
    samples: EncodedDataset,
    global_batch: int,
    micro_batch: MicroBatchSize,
    world_size: int,
    sampler: Sampler | None = None,
) -> list[TrainLoader[list[int]]]:
    return [
        TrainLoader(
            SampleRows(samples),
            sampler or Shuffled(len(samples), seed=5),
            global_batch=global_batch,
            micro_batch=micro_batch,
            ranks=ranks,
            prefetcher=Prefetcher(BatchMaker(collate), prefetch=False),
        )
        for ranks in simulated(world_size)
    ]


def fits(size: MicroBatchSize, lengths: list[int]) -> bool:
    within_tokens = size.tokens is None or len(lengths) * max(lengths) <= size.tokens
    return len(lengths) == 1 or (within_tokens and len(lengths) <= (size.rows or len(lengths)))


def run(ranks: list[TrainLoader[list[int]]], first: int, last: int) -> list[list[int]]:
    """The rows of each step, over all ranks, in ascending order; checks what must hold of every step."""
    steps = []
    for of_ranks in steps_of(ranks, first, last):
        assert len({step for step, _ in of_ranks}) == 1
        assert len({len(micro_batches) for _, micro_batches in of_ranks}) == 1
        every = [micro for _, micro_batches in of_ranks for micro in micro_batches]
        lengths = ranks[0].rows.lengths
        assert all(fits(ranks[0].micro_batch, lengths[micro.batch].tolist()) for micro in every)
        counted = sorted(row for micro in every if not micro.is_padding for row in micro.batch)
        assert all(len(micro.batch) == 1 and micro.batch[0] in counted for micro in every if micro.is_padding)
        assert any(
            not micro_batches[-1].is_padding for _, micro_batches in of_ranks
        )  # one rank runs no padding micro-batch
        steps.append(counted)
    assert all(rank.position == ranks[0].position for rank in ranks)
    return steps


@given(lengths=LENGTHS, size=SIZES)
def test_micro_batches_hold_every_row_once_longest_first(lengths: list[int], size: MicroBatchSize) -> None:
    rows = np.arange(len(lengths))[::-2]  # some of all rows, in an order of their own
    batches = size.split(rows, np.array(lengths))
    assert sorted(row for batch in batches for row in batch.tolist()) == sorted(rows.tolist())
    assert all(fits(size, [lengths[row] for row in batch]) for batch in batches)
    of_rows = [lengths[row] for batch in batches for row in batch]
    assert of_rows == sorted(of_rows, reverse=True)


@given(lengths=LENGTHS, size=SIZES)
def test_a_micro_batch_takes_all_that_fits(lengths: list[int], size: MicroBatchSize) -> None:
    batches = size.split(np.arange(len(lengths)), np.array(lengths))
    for batch, following in itertools.pairwise(batches):
        assert not fits(size, [lengths[row] for row in [*batch, following[0]]])


def test_no_rows_give_no_micro_batches() -> None:
    assert ROWS.split(np.arange(0), np.array([3, 4])) == []


@given(lengths=LENGTHS, global_batch=COUNTS, micro_batch=SIZES, world_size=WORLDS)
def test_steps_follow_the_order(
    lengths: list[int], global_batch: int, micro_batch: MicroBatchSize, world_size: int
) -> None:
    size = len(lengths)
    ranks = loaders(dataset(lengths), global_batch, micro_batch, world_size)
    per_epoch = ranks[0].steps_per_epoch
    assert per_epoch is not None
    steps = run(ranks, 0, 2 * per_epoch)
    for epoch in (0, 1):
        whole = order(5, epoch, np.arange(size), size).tolist()
        wanted = [sorted(whole[start : start + global_batch]) for start in range(0, size, global_batch)]
        assert steps[epoch * per_epoch : (epoch + 1) * per_epoch] == wanted


@settings(max_examples=40)
@given(
    lengths=LENGTHS,
    global_batch=COUNTS,
    worlds=st.tuples(WORLDS, WORLDS),
    micro_batches=st.tuples(SIZES, SIZES),
    stop=st.integers(0, 20),
    grouped=st.booleans(),
)
def test_resume_at_another_world_size_goes_on(
    lengths: list[int],
    global_batch: int,
    worlds: tuple[int, int],
    micro_batches: tuple[MicroBatchSize, MicroBatchSize],
    stop: int,
    grouped: bool,
) -> None:
    samples = dataset(lengths)

    def sampler() -> Sampler:
        base = Shuffled(len(samples), seed=5)
        return Grouped(base, samples.lengths, global_batch, seed=5) if grouped else base

    wanted = run(loaders(samples, global_batch, ROWS, 1, sampler()), 0, 25)
    before = loaders(samples, global_batch, micro_batches[0], worlds[0], sampler())
    found = run(before, 0, stop)
    state = json.loads(json.dumps(before[-1].state()))
    after = loaders(samples, global_batch, micro_batches[1], worlds[1], sampler())
    for rank in after:
        rank.load(state)
    assert found + run(after, stop, 25) == wanted


@given(size=st.integers(1, 60), batches=st.lists(COUNTS, min_size=1, max_size=80))
def test_a_changed_global_batch_still_visits_every_row_once(size: int, batches: list[int]) -> None:
    samples = dataset([1] * size)
    seen: list[int] = []
    state = loaders(samples, 1, ROWS, 1)[0].state()
    for step, global_batch in enumerate(batches):
        (loader,) = loaders(samples, global_batch, ROWS, 1)
        loader.load(state)
        (rows_of_step,) = run([loader], step, step + 1)
        seen += rows_of_step
        state = loader.state()
    for start in range(0, len(seen), size):
        epoch = seen[start : start + size]
        assert len(epoch) == len(set(epoch))


def test_state_in_the_loop_body_counts_the_step() -> None:
    (loader,) = loaders(dataset([1] * 10), 4, ROWS, 1)
    states = [(step, loader.state()["epoch"], loader.state()["consumed"]) for step, _ in loader.steps(0, 4)]
    assert states == [(1, 0, 4), (2, 0, 8), (3, 1, 0), (4, 1, 4)]


def test_a_step_that_is_given_back_is_made_again_with_the_same_draws() -> None:
    """Where batches are made at their step, a user's augment may draw from generators that a checkpoint holds."""

    def shuffled(samples: list[dict[str, Any]]) -> list[float]:
        return [random.random(), float(np.random.rand()), float(torch.rand(())), *collate(samples)]

    rows = SampleRows(dataset([1] * 10))
    (ranks,) = simulated(1)
    prefetcher = Prefetcher(BatchMaker(shuffled), prefetch=False)
    loader = TrainLoader(
        rows, Shuffled(10, seed=5), global_batch=4, ranks=ranks, micro_batch=ROWS, prefetcher=prefetcher
    )
    seen = []
    for step, micro_batches in loader.steps(0, 3):
        if step == 3:
            loader.undo_step()
            break
        seen.append(micro_batches)
    assert loader.state()["consumed"] == 8
    _, again = next(loader.steps(2, 3))
    assert again == micro_batches != seen[-1]


def test_the_wait_for_another_rank_is_no_wait_for_data(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    class SlowRank(SimulatedRank):
        def max(self, value: int) -> int:
            nonlocal now
            now += 5
            return super().max(value)

    def collate_slowly(samples: list[dict[str, Any]]) -> list[int]:
        nonlocal now
        now += 1
        return collate(samples)

    monkeypatch.setattr(time, "perf_counter", lambda: now)
    rows, prefetcher = SampleRows(dataset([1] * 10)), Prefetcher(BatchMaker(collate_slowly), prefetch=False)
    sizes = {"global_batch": 4, "micro_batch": MicroBatchSize(tokens=4)}
    loader = TrainLoader(rows, InOrder(10), ranks=SlowRank(0, Largest(1)), prefetcher=prefetcher, **sizes)
    assert [loader.waited for _ in loader.steps(0, 3)] == [1, 1, 1]


def test_epochs_have_fractions() -> None:
    (loader,) = loaders(dataset([1] * 10), 4, ROWS, 1)
    assert [loader.epoch for _ in loader.steps(0, 4)] == pytest.approx([0.4, 0.8, 1.0, 1.4])


def test_steps_start_after_first() -> None:
    (loader,) = loaders(dataset([1] * 10), 4, ROWS, 1)
    assert [step for step, _ in loader.steps(7, 9)] == [8, 9]
    assert list(loader.steps(9, 9)) == []


def test_in_order_rows_keep_their_order() -> None:
    ranks = loaders(dataset([1] * 7), 3, ROWS, 2, InOrder(7))
    assert run(ranks, 0, 6) == [[0, 1, 2], [3, 4, 5], [6]] * 2


def test_more_ranks_than_rows_run_padding_micro_batches() -> None:
    ranks = loaders(dataset([1, 1]), 2, MicroBatchSize(rows=1), 3, InOrder(2))
    dealt = [[(micro.batch, not micro.is_padding) for micro in all_] for _, all_ in steps_of(ranks, 0, 1)[0]]
    assert dealt == [[([0], False)], [([0], True)], [([1], True)]]


def test_ranks_with_short_rows_run_padding_micro_batches_too() -> None:
    """The second rank's rows fit one forward, the first rank's need two."""
    ranks = loaders(dataset([9, 8, 3, 2]), 4, MicroBatchSize(tokens=10), 2, InOrder(4))
    dealt = [[(micro.batch, not micro.is_padding) for micro in all_] for _, all_ in steps_of(ranks, 0, 1)[0]]
    assert dealt == [[([0], True), ([1], True)], [([2, 3], True), ([0], False)]]


def test_ranks_do_not_wait_for_one_that_cannot_plan_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = loaders(dataset([3] * 8), 4, MicroBatchSize(tokens=10), 2, InOrder(8))

    class Unreadable:
        def __getitem__(self, rows: Any) -> Any:
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(second.rows, "lengths", Unreadable())
    with ThreadPoolExecutor(2) as pool:
        planned = [pool.submit(list, rank.steps(0, 1)) for rank in (first, second)]
    assert [type(one.exception()) for one in planned] == [OtherRankFailed, OSError]


def test_changed_data_is_refused() -> None:
    (saved,), (loader,) = loaders(dataset([1] * 10), 4, ROWS, 1), loaders(dataset([1] * 10, offset=1), 4, ROWS, 1)
    with pytest.raises(UserError) as caught:
        loader.load(saved.state())
    assert "the training data changed since the checkpoint was written" in caught.value.what
    assert saved.rows.fingerprint in caught.value.what
    assert loader.rows.fingerprint in caught.value.what
    assert "--fork NEWNAME" in str(caught.value.remedy)
    assert loader.position.consumed == 0


@given(lengths=LENGTHS, micro_batch=SIZES, world_size=st.integers(1, 7))
def test_evaluation_sees_every_row_once_in_the_same_batches(
    lengths: list[int], micro_batch: MicroBatchSize, world_size: int
) -> None:
    rows = SampleRows(dataset(lengths))

    def dealt(ranks: int) -> list[list[tuple[list[int], bool]]]:
        found = []
        for rank in range(ranks):
            loader = EvalLoader(rows, micro_batch=micro_batch, dp_rank=rank, dp_size=ranks, collate=collate)
            found.append([(micro.batch, not micro.is_padding) for micro in loader])
            assert len(loader) == len(found[-1])
            assert [(micro.batch, not micro.is_padding) for micro in loader] == found[-1]  # a second pass is the same
        return found

    ranks = dealt(world_size)
    counted = sorted(batch for of_rank in ranks for batch, counts in of_rank if counts)
    assert sorted(row for batch in counted for row in batch) == list(range(len(lengths)))
    assert counted == sorted(batch for batch, _ in dealt(1)[0])
    assert all(fits(micro_batch, [lengths[row] for row in batch]) for batch in counted)
    assert {len(of_rank) for of_rank in ranks} == {-(-len(counted) // world_size)}


@given(lengths=LENGTHS, global_batch=COUNTS, world_size=WORLDS)
def test_packed_rows_give_every_sample_once_an_epoch(lengths: list[int], global_batch: int, world_size: int) -> None:
    samples = dataset(lengths)
    rows = PackedRows(samples, plan_rows(samples.lengths, 32, seed=1), "next_token")
    sampler = Shuffled(len(rows), seed=1)
    ranks = [
        TrainLoader(
            rows,
            sampler,
            global_batch=global_batch,
            micro_batch=ROWS,
            ranks=ranks,
            prefetcher=Prefetcher(BatchMaker(collate), prefetch=False),
        )
        for ranks in simulated(world_size)
    ]
    for _ in range(2):
        seen = []
        for _, micro_batches in (of_rank for rank in ranks for of_rank in rank.steps(0, rank.steps_per_epoch or 0)):
            seen += [sample for micro in micro_batches if not micro.is_padding for sample in micro.batch]
        assert sorted(seen) == list(range(len(lengths)))
