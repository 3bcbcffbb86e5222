"""Which samples share a packed row."""

import bisect
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drawbar.data import packing
from drawbar.data.packing import Plan, cached_plan_of_sources, plan_rows, plan_sources
from drawbar.data.sampler import order
from drawbar.errors import UserError
from plans import rows_of

LENGTHS = st.lists(st.integers(1, 50), min_size=1, max_size=300).map(lambda lengths: np.array(lengths))
WITH_EMPTY = st.lists(st.integers(0, 50), min_size=1, max_size=300).map(lambda lengths: np.array(lengths))
SEEDS = st.integers(0, 2**63 - 1)


def one_by_one(lengths: np.ndarray, capacity: int, seed: int) -> list[list[int]]:
    """Best-fit decreasing, sample by sample: of several rows with equal room, the one that got it last."""
    shuffled = order(seed, 0, np.arange(len(lengths)), len(lengths))
    packs: list[list[int]] = []
    with_room: dict[int, list[int]] = {}
    for sample in shuffled[np.argsort(-lengths[shuffled], kind="stable")].tolist():
        rooms = sorted(with_room)
        fit = bisect.bisect_left(rooms, lengths[sample])
        if fit < len(rooms):
            room = rooms[fit]
            pack = with_room[room].pop()
            if not with_room[room]:
                del with_room[room]
        else:
            room, pack = capacity, len(packs)
            packs.append([])
        packs[pack].append(sample)
        with_room.setdefault(room - int(lengths[sample]), []).append(pack)
    return sorted(sorted(pack) for pack in packs)


@given(lengths=WITH_EMPTY, capacity=st.integers(50, 200), seed=SEEDS, block=st.integers(1, 400))
@settings(deadline=None)
def test_a_plan_is_what_placing_one_sample_after_another_gives(
    lengths: np.ndarray, capacity: int, seed: int, block: int
) -> None:
    """The fingerprints of a run's data depend on it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "BLOCK_VALUES", block)
        plan = plan_rows(lengths, capacity, seed)
        rows = rows_of(plan)
        assert rows == one_by_one(lengths, capacity, seed)
        assert plan.row_lengths(lengths).tolist() == [int(lengths[row].sum()) for row in rows]


@given(lengths=LENGTHS, capacity=st.integers(50, 120), seed=SEEDS)
def test_a_plan_holds_every_sample_once_and_no_row_too_long(lengths: np.ndarray, capacity: int, seed: int) -> None:
    rows = rows_of(plan_rows(lengths, capacity, seed))
    assert sorted(sample for row in rows for sample in row) == list(range(len(lengths)))
    assert all(0 < lengths[row].sum() <= capacity for row in rows)
    assert rows == sorted(sorted(row) for row in rows)


@given(lengths=LENGTHS, capacity=st.integers(50, 120), seed=SEEDS)
def test_a_plan_is_tight(lengths: np.ndarray, capacity: int, seed: int) -> None:
    """Any two rows hold more than one row could, or best-fit would have joined them; and Johnson's bound holds."""
    loads = sorted(plan_rows(lengths, capacity, seed).row_lengths(lengths).tolist())
    assert len(loads) < 2 or loads[0] + loads[1] > capacity
    fewest = -(-int(lengths.sum()) // capacity)
    assert len(loads) <= 2 * fewest


def test_a_plan_depends_on_lengths_and_seed_alone() -> None:
    lengths = np.tile([30, 20, 10, 5], 50)
    assert rows_of(plan_rows(lengths, 64, 1)) == rows_of(plan_rows(lengths.copy(), 64, 1))
    assert rows_of(plan_rows(lengths, 64, 1)) != rows_of(plan_rows(lengths, 64, 2))


def test_many_samples() -> None:
    lengths = np.random.default_rng(0).integers(1, 2048, size=100_000)
    plan = plan_rows(lengths, 2048, 0)
    assert lengths.sum() / (len(plan) * 2048) > 0.99


def test_a_sample_longer_than_a_row() -> None:
    with pytest.raises(UserError, match="sample 1 is 9 tokens long; a packed row holds 8"):
        plan_rows(np.array([3, 9]), 8, 0)


def test_no_row_holds_samples_of_two_sources() -> None:
    lengths = np.array([3, 4, 5, 3, 4, 5, 2])
    plan, rows = plan_sources(lengths, [3, 4], 8, 0)
    first, second = (plan_rows(part, 8, 0) for part in (lengths[:3], lengths[3:]))
    assert rows_of(plan) == rows_of(first) + [[3 + sample for sample in row] for row in rows_of(second)]
    assert rows == [len(first), len(second)]


def kept(lengths: np.ndarray, folder: Path) -> tuple[Plan, list[int]]:
    of_samples = str(lengths.sum())
    return cached_plan_of_sources(
        lambda: lengths, [400, 600], 64, 1, of_samples=of_samples, placement="token", cache=folder, timeout=60
    )


def test_a_plan_that_is_kept_is_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = np.random.default_rng(0).integers(1, 64, size=1000)
    made, rows = plan_sources(lengths, [400, 600], 64, 1)
    assert rows_of(kept(lengths, tmp_path)[0]) == rows_of(made)
    with monkeypatch.context() as patch:
        patch.setattr(packing, "plan_rows", lambda *_: pytest.fail("planned again"))
        plan, again = kept(lengths, tmp_path)
    assert (rows_of(plan), again, plan.digest("x")) == (rows_of(made), rows, made.digest("x"))
    assert plan.digest(str(lengths.sum())) == made.digest(str(lengths.sum()))  # which was kept
    assert plan.lengths is not None
    assert plan.lengths[:].tolist() == made.row_lengths(lengths).tolist()
    lengths[0] = 65 - lengths[0]
    assert rows_of(kept(lengths, tmp_path)[0]) == rows_of(plan_sources(lengths, [400, 600], 64, 1)[0])


def test_where_nothing_can_be_kept_a_plan_is_made_all_the_same(tmp_path: Path, caplog: Any) -> None:
    (tmp_path / "cache").write_text("a file is in the way")
    lengths = np.random.default_rng(0).integers(1, 64, size=1000)
    assert rows_of(kept(lengths, tmp_path / "cache")[0]) == rows_of(plan_sources(lengths, [400, 600], 64, 1)[0])
