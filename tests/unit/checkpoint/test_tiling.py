"""Boxes that make up a tensor, and boxes that do not, against a count of every element."""

import random

import numpy as np
import pytest

from drawbar.checkpoint.tensor_index import covers_exactly_once
from parts_writing import cut_at_random


def covers_once(shape: tuple[int, ...], boxes: list[tuple[tuple[int, int], ...]]) -> bool:
    counts = np.zeros(shape, dtype=np.int64)
    for box in boxes:
        counts[tuple(slice(*bounds) for bounds in box)] += 1
    return bool((counts == 1).all())


def says(shape: tuple[int, ...], boxes: list[tuple[tuple[int, int], ...]]) -> bool:
    rows = np.array(boxes, dtype=np.int64).reshape(len(boxes), len(shape), 2)
    return covers_exactly_once(shape, rows[:, :, 0], rows[:, :, 1] - rows[:, :, 0])


@pytest.mark.parametrize("shape", [(12,), (5, 7), (4, 1, 6), (3, 4, 2, 3), ()])
def test_as_a_count_of_all_elements_says(shape: tuple[int, ...]) -> None:
    rng = random.Random(0)
    seen = set()
    for _ in range(300):
        boxes = cut_at_random(shape, rng.randrange(1, 9), rng)
        for _ in range(rng.randrange(3) if shape else 0):  # spoil it, or happen to restore it
            number, dim = rng.randrange(len(boxes)), rng.randrange(len(shape))
            start = rng.randrange(shape[dim] + 1)
            bounds = (start, rng.randrange(start, shape[dim] + 1))
            boxes[number] = (*boxes[number][:dim], bounds, *boxes[number][dim + 1 :])
        if rng.random() < 0.1:
            boxes.append(rng.choice(boxes))
        rng.shuffle(boxes)
        expected = covers_once(shape, boxes)
        assert says(shape, boxes) == expected, boxes
        seen.add(expected)
    assert seen == {True, False}


def test_no_boxes_and_twice_the_whole() -> None:
    assert not covers_exactly_once((3,), np.zeros((0, 1), dtype=np.int64), np.zeros((0, 1), dtype=np.int64))
    assert not says((3,), [((0, 3),), ((0, 3),)])
    assert not covers_exactly_once((2**40, 2**40), *(np.array([[0, 0], [0, 1]]), np.array([[1, 1], [1, 1]])))
