"""Boxes of flat ranges and of fused layers, and who writes what several ranks hold."""

import random
from math import prod

import numpy as np
import pytest
import torch

from drawbar.parallel.local_boxes import assign_writers, flat_boxes
from drawbar.parallel.tensor import FusedLayout


def test_the_boxes_of_a_range_hold_its_elements_and_no_others() -> None:
    chance = random.Random(0)
    for _ in range(2000):
        shape = tuple(chance.randint(1, 5) for _ in range(chance.randint(0, 4)))
        count = prod(shape)
        start = chance.randint(0, count)
        end = chance.randint(start, count)
        flat = torch.arange(count)[start:end]
        padded = torch.cat([flat, torch.full((chance.randint(0, 2) if end == count else 0,), -2)])
        found = torch.full(shape, -1)
        boxes = list(flat_boxes("weight", shape, start, padded))
        for box in boxes:
            assert box.get().shape == box.sizes
            found[tuple(slice(at, at + size) for at, size in zip(box.offset, box.sizes, strict=True))] = box.get()
        wanted = torch.full((count,), -1)
        wanted[start:end] = flat
        assert torch.equal(found.view(-1), wanted)
        assert sum(prod(box.sizes) for box in boxes) == end - start
        assert len(boxes) <= max(1, 2 * len(shape) - 1)


@pytest.mark.parametrize(("parts", "degree"), [(1, 2), (3, 2), (2, 4), (3, 1)])
def test_pieces_of_fused_layers(parts: int, degree: int) -> None:
    fused = FusedLayout(0, parts, degree)
    logical = torch.arange(2 * parts * degree)
    stored = fused.to_sharded(logical)
    size = len(logical)
    for start in range(size + 1):
        for stop in range(start, size + 1):
            rows = []
            for first, begin, length in fused.pieces(start, stop, size):
                assert torch.equal(stored[first : first + length], logical[begin : begin + length])
                rows += range(first, first + length)
            assert rows == list(range(start, stop))


def test_each_box_goes_to_one_of_its_holders_and_the_loads_are_even() -> None:
    chance = np.random.default_rng(0)
    sizes = chance.integers(1, 100, 400)
    holders = [np.flatnonzero(chance.random(400) < 0.6) for _ in range(8)]
    holders[0] = np.union1d(holders[0], np.arange(400))  # each box has a holder
    dealt = assign_writers([held + 1000 for held in holders], [sizes[held] for held in holders])
    assert sorted(np.concatenate(dealt)) == list(range(1000, 1400))
    for held, own in zip(holders, dealt, strict=True):
        assert set(own - 1000) <= set(held)
    loads = [sizes[own - 1000].sum() for own in dealt]
    assert max(loads) <= 1.1 * min(loads)


def test_what_a_rank_alone_holds_counts_first() -> None:
    none = np.array([], np.int64)
    keys, sizes = [np.array([1, 2, 3]), np.array([3, 4]), none], [np.array([5, 5, 2]), np.array([2, 1]), none]
    dealt = assign_writers(keys, sizes)
    assert [sorted(own) for own in dealt] == [[1, 2], [3, 4], []]
