import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drawbar.data.dataset import EncodedDataset, encode_records
from drawbar.data.packing import PackedDataset, join_samples, plan_packs, split_tokens
from drawbar.errors import UserError

LENGTHS = st.lists(st.integers(1, 50), min_size=1, max_size=300).map(lambda lengths: np.array(lengths))
SEEDS = st.integers(0, 2**63 - 1)


def dataset(samples: list[dict[str, Any]]) -> EncodedDataset:
    return encode_records(samples, lambda sample: sample, describe=str)


@given(lengths=LENGTHS, capacity=st.integers(50, 120), seed=SEEDS)
def test_plan_holds_every_sample_once_and_no_row_too_long(lengths: np.ndarray, capacity: int, seed: int) -> None:
    plan = plan_packs(lengths, capacity, seed)
    assert sorted(sample for pack in plan for sample in pack) == list(range(len(lengths)))
    assert all(0 < lengths[pack].sum() <= capacity for pack in plan)
    assert plan == sorted(sorted(pack) for pack in plan)


@given(lengths=LENGTHS, capacity=st.integers(50, 120), seed=SEEDS)
def test_plan_is_tight(lengths: np.ndarray, capacity: int, seed: int) -> None:
    """Any two rows hold more than one row could, or best-fit would have joined them; and Johnson's bound holds."""
    loads = sorted(int(lengths[pack].sum()) for pack in plan_packs(lengths, capacity, seed))
    assert len(loads) < 2 or loads[0] + loads[1] > capacity
    fewest = -(-int(lengths.sum()) // capacity)
    assert len(loads) <= 2 * fewest


@given(lengths=LENGTHS, seed=SEEDS)
def test_plan_is_the_textbook_best_fit_decreasing(lengths: np.ndarray, seed: int) -> None:
    free: list[int] = []
    for length in sorted(lengths.tolist(), reverse=True):
        fits = [row for row, room in enumerate(free) if room >= length]
        if fits:
            free[min(fits, key=lambda row: free[row])] -= length
        else:
            free.append(64 - length)
    loads = [int(lengths[pack].sum()) for pack in plan_packs(lengths, 64, seed)]
    assert sorted(loads) == sorted(64 - room for room in free)


def test_plan_depends_on_lengths_and_seed_alone() -> None:
    lengths = np.tile([30, 20, 10, 5], 50)
    assert plan_packs(lengths, 64, 1) == plan_packs(lengths.copy(), 64, 1)
    assert plan_packs(lengths, 64, 1) != plan_packs(lengths, 64, 2)


def test_many_samples() -> None:
    lengths = np.random.default_rng(0).integers(1, 2048, size=100_000)
    plan = plan_packs(lengths, 2048, 0)
    assert lengths.sum() / (len(plan) * 2048) > 0.99


def test_sample_longer_than_a_row() -> None:
    with pytest.raises(UserError, match="sample 1 is 9 tokens long; a packed row holds 8"):
        plan_packs(np.array([3, 9]), 8, 0)


def test_joined_row() -> None:
    samples = dataset(
        [
            {"input_ids": [5, 6, 7], "labels": [5, 6, 7], "loss_weight": [0.0, 1.0, 1.0], "bytes": 11},
            {"input_ids": [8, 9], "labels": [8, 9], "loss_weight": [0.5, 0.5], "bytes": 4},
            {"input_ids": [3], "labels": [3], "loss_weight": [1.0], "bytes": 1},
        ]
    )
    row = join_samples([samples[2], samples[0], samples[1]])
    assert {name: np.asarray(value).tolist() for name, value in row.items()} == {
        "ids": [2, 0, 1],
        "input_ids": [3, 5, 6, 7, 8, 9],
        "labels": [-100, -100, 6, 7, -100, 9],
        "loss_weight": [1.0, 0.0, 1.0, 1.0, 0.5, 0.5],
        "bytes": [1, 11, 4],
        "position_ids": [0, 0, 1, 2, 0, 1],
        "segment_ids": [0, 1, 1, 1, 2, 2],
    }
    assert samples[0]["labels"].tolist() == [5, 6, 7]  # the data set itself is left alone


def test_positions_of_the_task_are_kept() -> None:
    samples = dataset([{"input_ids": [1, 2], "position_ids": [2, 3]}, {"input_ids": [3], "position_ids": [2]}])
    assert join_samples([samples[0], samples[1]])["position_ids"].tolist() == [2, 3, 2]


@given(documents=st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=20), min_size=1, max_size=30), seed=SEEDS)
def test_packing_keeps_every_token_and_every_target(documents: list[list[int]], seed: int) -> None:
    base = dataset([{"input_ids": tokens, "labels": tokens} for tokens in documents])
    packed = PackedDataset(base, plan_packs(base.lengths, 24, seed))
    found: dict[int, list[int]] = {}
    targets = 0
    for index in range(len(packed)):
        row = packed[index]
        targets += int((row["labels"][1:] != -100).sum())
        for segment, sample in enumerate(row["ids"]):
            mine = row["segment_ids"] == segment
            found[sample] = row["input_ids"][mine].tolist()
            assert row["position_ids"][mine].tolist() == list(range(len(found[sample])))
    assert [found[sample] for sample in range(len(documents))] == documents
    assert targets == sum(len(tokens) - 1 for tokens in documents)


def test_packed_fingerprint_sees_base_and_plan() -> None:
    base = dataset([{"input_ids": [token]} for token in (1, 2, 3)])
    other = dataset([{"input_ids": [token]} for token in (1, 2, 4)])
    plans = [[[0, 1], [2]], [[0], [1, 2]], [[0], [1], [2]], [[2], [0, 1]]]
    found = {PackedDataset(base, plan).fingerprint for plan in plans} | {PackedDataset(other, plans[0]).fingerprint}
    assert len(found | {base.fingerprint}) == 6
    assert PackedDataset(base, plans[0]).fingerprint == PackedDataset(base, plans[0]).fingerprint


@pytest.mark.parametrize(
    ("samples", "what"),
    [
        ([{"pixels": [1, 2]}], "no input_ids"),
        ([{"input_ids": [1, 2], "labels": 1}], "not one for each token"),
        (
            [{"input_ids": [1, 2], "labels": [1, 2]}, {"input_ids": [1, 2], "labels": [1]}],
            "sample 1 has 1 values of 'lab",
        ),
        ([{"input_ids": [1]}, {"input_ids": [1], "labels": [1]}], "sample 1 has other fields"),
    ],
)
def test_samples_that_cannot_be_packed(samples: list[dict[str, Any]], what: str) -> None:
    base = dataset(samples)
    with pytest.raises(UserError, match=what) as caught:
        PackedDataset(base, [[index] for index in range(len(base))])
    assert caught.value.remedy == "set data.packing=false"


@given(tokens=st.lists(st.integers(0, 99), max_size=60), length=st.integers(2, 20))
def test_split_makes_every_token_but_the_first_a_target_once(tokens: list[int], length: int) -> None:
    windows = split_tokens(np.arange(len(tokens)), length)
    targets = [place for window in windows for place in window[1:].tolist()]
    assert targets == list(range(1, len(tokens)))
    assert all(2 <= len(window) <= length for window in windows)
    assert all(window[0] == before[-1] for before, window in itertools.pairwise(windows))
