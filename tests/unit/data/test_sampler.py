"""Samplers: each epoch is what it says, whoever asks for which part of it."""

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drawbar.data.sampler import BATCHES_SORTED_TOGETHER, Grouped, InOrder, Mixed, Sampler, Shuffled
from drawbar.errors import UserError

SEEDS = st.integers(0, 2**63 - 1)
EPOCHS = st.integers(0, 1000)


def whole(sampler: Sampler, epoch: int) -> list[int]:
    return sampler.rows(epoch, np.arange(sampler.size)).tolist()


@st.composite
def mixtures(draw: st.DrawFn) -> tuple[np.ndarray, list[float], Mixed]:
    """The source of each row, of one to four; their weights, and the sampler."""
    sizes = draw(st.lists(st.integers(1, 30), min_size=1, max_size=4))
    source_of = np.repeat(np.arange(len(sizes)), sizes)
    weights = draw(st.lists(st.floats(0.01, 100), min_size=len(sizes), max_size=len(sizes)))
    return source_of, weights, Mixed(sizes, weights, draw(SEEDS))


@st.composite
def samplers(draw: st.DrawFn) -> Sampler:
    size, seed = draw(st.integers(1, 400)), draw(SEEDS)
    sampler: Sampler = draw(
        st.one_of(st.just(InOrder(size)), st.just(Shuffled(size, seed)), mixtures().map(lambda mixture: mixture[2]))
    )
    if draw(st.booleans()):
        lengths = np.random.default_rng(0).integers(1, 100, sampler.size)
        sampler = Grouped(sampler, lengths, draw(st.integers(1, 9)), seed)
    return sampler


@given(sampler=samplers(), epoch=EPOCHS, cuts=st.lists(st.integers(0, 400), max_size=6))
def test_any_slices_of_an_epoch_are_those_of_all_of_it(sampler: Sampler, epoch: int, cuts: list[int]) -> None:
    """Also out of turn, and with another epoch asked for in between: nothing is remembered that matters."""
    expected = whole(sampler, epoch)
    edges = sorted({0, sampler.size, *(cut % sampler.size for cut in cuts)})
    for first, last in list(itertools.pairwise(edges))[::-1]:
        assert sampler.rows(epoch, np.arange(first, last)).tolist() == expected[first:last]
        whole(sampler, epoch + 1)
    backwards = np.arange(sampler.size)[::-1]
    assert sampler.rows(epoch, backwards).tolist() == expected[::-1]


def test_grouped_batches_come_in_a_new_order_in_each_epoch() -> None:
    sampler = Grouped(InOrder(400), np.arange(400), 8, seed=3)
    first, second = whole(sampler, 0), whole(sampler, 1)
    assert first != second
    assert sorted(first) == sorted(second)


@given(size=st.integers(1, 400), seed=SEEDS, epoch=EPOCHS, batch=st.integers(1, 9))
def test_without_weights_an_epoch_is_a_permutation(size: int, seed: int, epoch: int, batch: int) -> None:
    lengths = np.random.default_rng(0).integers(1, 100, size)
    for base in (InOrder(size), Shuffled(size, seed)):
        assert sorted(whole(base, epoch)) == list(range(size))
        assert sorted(whole(Grouped(base, lengths, batch, seed), epoch)) == list(range(size))


def test_epochs_and_seeds_differ() -> None:
    shuffled = Shuffled(100, seed=1)
    assert whole(shuffled, 0) != whole(shuffled, 1)
    assert whole(shuffled, 0) != whole(Shuffled(100, seed=2), 0)
    mixed = Mixed([50, 50], [1, 1], seed=1)
    assert whole(mixed, 0) != whole(mixed, 1)
    assert whole(mixed, 0) != whole(Mixed([50, 50], [1, 1], seed=2), 0)
    assert whole(InOrder(5), 3) == [0, 1, 2, 3, 4]


@given(mixture=mixtures(), epoch=EPOCHS)
def test_an_epoch_has_each_source_in_its_proportion(mixture: tuple[np.ndarray, list[float], Mixed], epoch: int) -> None:
    source_of, weights, sampler = mixture
    assert sampler.size == len(source_of)
    drawn = Counter(source_of[whole(sampler, epoch)].tolist())
    for source, weight in enumerate(weights):
        assert abs(drawn[source] - weight / sum(weights) * sampler.size) < 1 + 1e-9


@given(mixture=mixtures(), epochs=st.integers(1, 8))
def test_over_epochs_all_rows_of_a_source_are_visited_equally_often(
    mixture: tuple[np.ndarray, list[float], Mixed], epochs: int
) -> None:
    source_of, _, sampler = mixture
    visits = np.zeros(sampler.size, dtype=int)
    for epoch in range(epochs):
        np.add.at(visits, whole(sampler, epoch), 1)
    for source in np.unique(source_of):
        mine = visits[source_of == source]
        assert mine.max() - mine.min() <= 1  # so each is within 1 of the exact proportion


def test_sources_are_mixed_all_through_an_epoch() -> None:
    source_of = np.repeat([0, 1], 500)
    sources = source_of[whole(Mixed([500, 500], [3, 1], seed=4), 0)]
    shares = [(part == 0).mean() for part in np.split(sources, 10)]
    assert np.mean(shares) == 0.75
    assert all(0.55 < share < 0.95 for share in shares)  # five standard deviations of a part


def test_a_weighted_source_without_rows_is_refused() -> None:
    with pytest.raises(UserError, match="gave no samples") as caught:
        Mixed([2, 0, 1], [1, 1, 1], seed=0)
    assert caught.value.where == "data.train.1"


@given(
    lengths=st.lists(st.integers(1, 99), min_size=1, max_size=300), batch=st.integers(1, 4), seed=SEEDS, epoch=EPOCHS
)
def test_grouped_batches_are_neighbours_in_length(lengths: list[int], batch: int, seed: int, epoch: int) -> None:
    """Of the rows that are sorted together, no other has a length strictly within a whole batch's range."""
    sampler = Grouped(Shuffled(len(lengths), seed), np.array(lengths), batch, seed)
    base, rows = whole(Shuffled(len(lengths), seed), epoch), whole(sampler, epoch)
    span = BATCHES_SORTED_TOGETHER * batch
    for start in range(0, len(rows), span):
        group = rows[start : start + span]
        assert sorted(group) == sorted(base[start : start + span])
        for first in range(0, len(group) - batch + 1, batch):
            mine = group[first : first + batch]
            low, high = min(lengths[row] for row in mine), max(lengths[row] for row in mine)
            assert not [row for row in group if row not in mine and low < lengths[row] < high]


def padding(sampler: Sampler, lengths: np.ndarray, batch: int) -> float:
    """The share of a padded epoch that is padding."""
    rows = [lengths[part] for part in np.split(np.array(whole(sampler, 0)), range(batch, len(lengths), batch))]
    return 1 - lengths.sum() / sum(len(part) * part.max() for part in rows)


def test_grouping_saves_padding_and_keeps_chance() -> None:
    lengths = np.random.default_rng(0).geometric(1 / 13, 3210)
    base = Shuffled(len(lengths), seed=3)
    sampler = Grouped(base, lengths, 32, seed=3)
    assert padding(base, lengths, 32) > 0.6
    assert padding(sampler, lengths, 32) < 0.1
    batches = np.array(whole(sampler, 0))[:3200].reshape(-1, 32)
    longest = lengths[batches].max(axis=1)
    first = longest[:BATCHES_SORTED_TOGETHER]
    assert (np.diff(first) > 0).any()  # batches do not come by length
    assert (np.diff(first) < 0).any()
    again = {frozenset(batch.tolist()) for batch in np.array(whole(sampler, 1))[:3200].reshape(-1, 32)}
    assert not again & {frozenset(batch.tolist()) for batch in batches}  # other rows meet in the next epoch
