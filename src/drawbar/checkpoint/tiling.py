"""Checks that boxes cover a tensor exactly once."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_MOST_CUT_DIMS = 6
_LARGEST = 2**62


def covers_exactly_once(shape: Sequence[int], offsets: NDArray[np.int64], sizes: NDArray[np.int64]) -> bool:
    """Whether the boxes cover every element of a tensor exactly once.

    Compares two sparse n-dimensional difference arrays, in which a box is +1 or -1 at each of its corners: the sum over
    all boxes must equal that of one box with the shape of the whole tensor. Also False where more than six dims are
    split, or the corners cannot be numbered in 62 bits.

    Args:
        shape: of the tensor; it has elements.
        offsets, sizes: one row a box, one column a dim; the boxes lie within the tensor.
    """
    whole = np.array([shape], dtype=np.int64).reshape(1, len(shape))
    offsets, sizes = np.concatenate([offsets, np.zeros_like(whole)]), np.concatenate([sizes, whole])
    cut = [dim for dim in range(len(shape)) if (sizes[:, dim] != shape[dim]).any()]
    if len(cut) > _MOST_CUT_DIMS or math.prod(shape[dim] + 1 for dim in cut) > _LARGEST:
        return False
    corners, signs = np.zeros((len(offsets), 1), dtype=np.int64), np.ones(1, dtype=np.int64)
    for dim in cut:
        begin = corners * (shape[dim] + 1) + offsets[:, dim : dim + 1]
        corners = np.concatenate([begin, begin + sizes[:, dim : dim + 1]], axis=1)
        signs = np.concatenate([signs, -signs])
    weights = np.tile(signs, (len(offsets), 1))
    weights[-1] *= -1  # the last box is the whole tensor, which is subtracted
    order = np.argsort(corners, axis=None, kind="stable")
    places, counts = corners.reshape(-1)[order], weights.reshape(-1)[order]
    first = np.flatnonzero(np.concatenate([[True], places[1:] != places[:-1]]))
    return not np.add.reduceat(counts, first).any()
