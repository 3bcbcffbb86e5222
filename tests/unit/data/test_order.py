import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drawbar.data.sampler import order

SEEDS = st.integers(0, 2**63 - 1)
EPOCHS = st.integers(0, 10_000)


def epoch_order(seed: int, epoch: int, size: int) -> np.ndarray:
    return order(seed, epoch, np.arange(size), size)


def test_every_sample_once_at_every_size() -> None:
    for size in [*range(1, 300), *range(300, 2100, 7), 1023, 1024, 1025, 2048]:
        assert np.array_equal(np.sort(epoch_order(7, 3, size)), np.arange(size)), size


@given(seed=SEEDS, epoch=EPOCHS, size=st.integers(1, 5000))
def test_every_sample_once(seed: int, epoch: int, size: int) -> None:
    assert np.array_equal(np.sort(epoch_order(seed, epoch, size)), np.arange(size))


@given(seed=SEEDS, epoch=EPOCHS, size=st.integers(1, 2**40), data=st.data())
def test_one_place_at_a_time_is_the_same_as_all_at_once(seed: int, epoch: int, size: int, data: st.DataObject) -> None:
    places = np.array(data.draw(st.lists(st.integers(0, size - 1), max_size=8)), dtype=np.int64)
    together = order(seed, epoch, places, size)
    alone = [int(order(seed, epoch, np.array(place), size)) for place in places]
    assert together.tolist() == alone


def test_epochs_and_seeds_differ() -> None:
    orders = [epoch_order(seed, epoch, 1000) for seed in (0, 1, 2**63 - 1) for epoch in (0, 1, 2)]
    for i, one in enumerate(orders):
        for other in orders[:i]:
            assert (one == other).sum() < 15  # two random orders agree at one place on average


def test_order_is_fixed_for_all_time() -> None:
    """A change of these numbers would make every old checkpoint resume on other data."""
    assert epoch_order(0, 0, 10).tolist() == [8, 0, 4, 7, 5, 2, 1, 6, 9, 3]
    assert epoch_order(1, 2, 10).tolist() == [8, 6, 3, 7, 5, 1, 0, 9, 4, 2]
    far = order(2**63 - 1, 5, np.arange(3), 2**40)
    assert far.tolist() == [393738796856, 370290409030, 885123058535]


@pytest.mark.parametrize("size", [5, 16, 37])
def test_looks_uniform(size: int) -> None:
    """Over many epochs each sample stands at each place equally often: chi-square on the table of both."""
    epochs = 1500
    table = np.zeros((size, size))
    for epoch in range(epochs):
        table[np.arange(size), epoch_order(11, epoch, size)] += 1
    expected = epochs / size
    chi_square = float(((table - expected) ** 2 / expected).sum())
    freedom = (size - 1) ** 2
    assert chi_square < freedom + 6 * np.sqrt(2 * freedom)


def test_neighbours_are_far_apart() -> None:
    """In a random order of n, places next to each other hold samples about n/3 apart."""
    size = 10_000
    distance = np.abs(np.diff(epoch_order(5, 0, size)))
    assert 0.9 < distance.mean() / (size / 3) < 1.1
    assert (distance == 1).mean() < 0.002


def test_huge_data_set() -> None:
    size = 2**40 + 12_345
    places = np.concatenate([np.arange(2000), np.arange(size - 2000, size)])
    samples = order(0, 0, places, size)
    assert len(set(samples.tolist())) == len(places)
    assert samples.min() >= 0
    assert samples.max() < size
    assert 0.45 < samples.mean() / size < 0.55


@pytest.mark.parametrize("place", [-1, 10])
def test_a_place_outside_the_epoch_is_refused(place: int) -> None:
    with pytest.raises(ValueError, match="not all in range"):
        order(0, 0, np.array([place]), 10)
