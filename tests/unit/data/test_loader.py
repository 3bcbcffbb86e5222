import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drawbar.data.dataset import EncodedDataset, encode_records
from drawbar.data.loader import EvalLoader, TrainLoader
from drawbar.data.order import order
from drawbar.errors import UserError

COUNTS = st.integers(1, 12)


def dataset(size: int, offset: int = 0) -> EncodedDataset:
    records = [{"x": index + offset} for index in range(size)]
    return encode_records(records, lambda record: record, describe=str)


def collate(samples: list[dict[str, Any]]) -> list[int]:
    return [sample["id"] for sample in samples]


def loaders(
    rows: EncodedDataset, global_batch: int, micro_batch: int, world_size: int, shuffle: bool = True
) -> list[TrainLoader[list[int]]]:
    return [
        TrainLoader(
            rows,
            seed=5,
            global_batch=global_batch,
            micro_batch=micro_batch,
            rank=rank,
            world_size=world_size,
            shuffle=shuffle,
            collate=collate,
        )
        for rank in range(world_size)
    ]


def run(ranks: list[TrainLoader[list[int]]], first: int, last: int) -> list[list[int]]:
    """The rows of each step, over all ranks; checks what must hold of every step."""
    steps = []
    for of_ranks in zip(*(rank.steps(first, last) for rank in ranks), strict=True):
        assert len({step for step, _ in of_ranks}) == 1
        assert len({len(micro_batches) for _, micro_batches in of_ranks}) == 1
        every = [micro for _, micro_batches in of_ranks for micro in micro_batches]
        assert all(1 <= len(micro.batch) <= ranks[0].micro_batch for micro in every)
        counted = [row for micro in every if micro.counts for row in micro.batch]
        assert all(len(micro.batch) == 1 and micro.batch[0] in counted for micro in every if not micro.counts)
        assert all(rank.position == ranks[0].position for rank in ranks)
        steps.append(counted)
    return steps


@given(size=st.integers(1, 60), global_batch=COUNTS, micro_batch=COUNTS, world_size=st.integers(1, 5))
def test_steps_follow_the_order(size: int, global_batch: int, micro_batch: int, world_size: int) -> None:
    ranks = loaders(dataset(size), global_batch, micro_batch, world_size)
    per_epoch = ranks[0].steps_per_epoch
    steps = run(ranks, 0, 2 * per_epoch)
    for epoch in (0, 1):
        whole = order(5, epoch, np.arange(size), size).tolist()
        wanted = [whole[start : start + global_batch] for start in range(0, size, global_batch)]
        assert steps[epoch * per_epoch : (epoch + 1) * per_epoch] == wanted


@given(
    size=st.integers(1, 60),
    global_batch=COUNTS,
    worlds=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    micro_batches=st.tuples(COUNTS, COUNTS),
    stop=st.integers(0, 20),
)
def test_resume_at_another_world_size_goes_on(
    size: int, global_batch: int, worlds: tuple[int, int], micro_batches: tuple[int, int], stop: int
) -> None:
    rows = dataset(size)
    wanted = run(loaders(rows, global_batch, 4, 1), 0, 25)
    before = loaders(rows, global_batch, micro_batches[0], worlds[0])
    found = run(before, 0, stop)
    state = json.loads(json.dumps(before[-1].state()))
    after = loaders(rows, global_batch, micro_batches[1], worlds[1])
    for rank in after:
        rank.load(state)
    assert found + run(after, stop, 25) == wanted


@given(size=st.integers(1, 60), batches=st.lists(COUNTS, min_size=1, max_size=80))
def test_a_changed_global_batch_still_visits_every_row_once(size: int, batches: list[int]) -> None:
    rows = dataset(size)
    seen: list[int] = []
    state = loaders(rows, 1, 1, 1)[0].state()
    for step, global_batch in enumerate(batches):
        (loader,) = loaders(rows, global_batch, 4, 1)
        loader.load(state)
        (rows_of_step,) = run([loader], step, step + 1)
        seen += rows_of_step
        state = loader.state()
    for start in range(0, len(seen), size):
        epoch = seen[start : start + size]
        assert len(epoch) == len(set(epoch))


def test_state_in_the_loop_body_counts_the_step() -> None:
    (loader,) = loaders(dataset(10), 4, 2, 1)
    states = [(step, loader.state()["epoch"], loader.state()["consumed"]) for step, _ in loader.steps(0, 4)]
    assert states == [(1, 0, 4), (2, 0, 8), (3, 1, 0), (4, 1, 4)]


def test_steps_start_after_first() -> None:
    (loader,) = loaders(dataset(10), 4, 2, 1)
    assert [step for step, _ in loader.steps(7, 9)] == [8, 9]
    assert list(loader.steps(9, 9)) == []


def test_without_shuffle_rows_keep_their_order() -> None:
    ranks = loaders(dataset(7), 3, 2, 2, shuffle=False)
    assert run(ranks, 0, 6) == [[0, 1, 2], [3, 4, 5], [6]] * 2


def test_more_ranks_than_rows_run_fillers() -> None:
    ranks = loaders(dataset(2), 2, 1, 3, shuffle=False)
    dealt = [[(micro.batch, micro.counts) for _, all_ in rank.steps(0, 1) for micro in all_] for rank in ranks]
    assert dealt == [[([0], False)], [([0], True)], [([1], True)]]


def test_changed_data_is_refused() -> None:
    (saved,), (loader,) = loaders(dataset(10), 4, 2, 1), loaders(dataset(10, offset=1), 4, 2, 1)
    with pytest.raises(UserError) as caught:
        loader.load(saved.state())
    assert "the training data changed since the checkpoint was written" in caught.value.what
    assert saved.dataset.fingerprint in caught.value.what
    assert loader.dataset.fingerprint in caught.value.what
    assert "--fork NEWNAME" in str(caught.value.remedy)
    assert loader.position.consumed == 0


@given(size=st.integers(1, 60), micro_batch=COUNTS, world_size=st.integers(1, 7))
def test_evaluation_sees_every_row_once_in_order(size: int, micro_batch: int, world_size: int) -> None:
    rows = dataset(size)
    ranks = [
        EvalLoader(rows, micro_batch=micro_batch, rank=rank, world_size=world_size, collate=collate)
        for rank in range(world_size)
    ]
    dealt = [list(rank) for rank in ranks]
    assert [row for all_ in dealt for micro in all_ if micro.counts for row in micro.batch] == list(range(size))
    assert {len(all_) for all_ in dealt} == {len(ranks[0])}
    shares = [sum(len(micro.batch) for micro in all_ if micro.counts) for all_ in dealt]
    assert max(shares) - min(shares) <= 1
    assert len(ranks[0]) == -(-max(shares) // micro_batch)
    assert list(ranks[0]) == dealt[0]  # a second pass is the same
