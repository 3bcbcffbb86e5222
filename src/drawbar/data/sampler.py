"""The row at each position of an epoch, as a pure function, so that any process can start anywhere.

A shuffled epoch is a pseudo-random permutation that needs no memory: ``order(seed, epoch, index, size)`` is the sample
at a position of an epoch. It depends on nothing else, so any number of processes, started at any step, agree on it
without communication.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from drawbar.data.columns import Values
from drawbar.errors import UserError

ROUNDS = 8  # four make a Feistel network pseudo-random (Luby & Rackoff 1988); small domains need more


def order(seed: int, epoch: int, index: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    """The sample at each position ``index`` of an epoch: a permutation of ``range(size)`` keyed by seed and epoch.

    A balanced Feistel network permutes the smallest domain of ``4**k >= size`` numbers; a result outside
    ``range(size)`` is fed back until it falls inside ("cycle walking"; Black & Rogaway, "Ciphers with Arbitrary
    Finite Domains", CT-RSA 2002). The domain is at most four times the size, so this takes at most four iterations on
    average.

    Args:
        seed: 0 <= seed < 2**64.
        epoch: 0 <= epoch < 2**64.
        index: positions in the epoch, any shape, each in ``range(size)``.
        size: number of samples, 1 <= size <= 2**62.

    Returns:
        Sample numbers, of the shape of ``index``.

    Raises:
        ValueError: a position outside ``range(size)``.
    """
    places = np.asarray(index, dtype=np.int64)
    if places.size and (places.min() < 0 or places.max() >= size):
        raise ValueError(f"places {places.min()}..{places.max()} are not all in range({size})")
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    keys = _round_keys(seed, epoch)
    samples = _feistel(places.ravel().astype(np.uint64), half_bits, keys)
    while (outside := samples >= size).any():
        samples[outside] = _feistel(samples[outside], half_bits, keys)
    return samples.astype(np.int64).reshape(places.shape)


def _feistel(numbers: NDArray[np.uint64], half_bits: int, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A permutation of ``range(4**half_bits)``: each round hashes one half of the bits into the other."""
    shift, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = numbers >> shift, numbers & mask
    for key in keys:
        left, right = right, left ^ (_splitmix64(right ^ key) & mask)
    return (left << shift) | right


def _round_keys(seed: int, epoch: int) -> NDArray[np.uint64]:
    key = _splitmix64(_splitmix64(np.array([seed], dtype=np.uint64)) ^ np.array([epoch], dtype=np.uint64))
    return _splitmix64(key ^ np.arange(ROUNDS, dtype=np.uint64))


def _splitmix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The mixing step of SplitMix64 (Steele, Lea & Flood 2014; constants as in Vigna's splitmix64.c), modulo 2**64."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


BATCHES_SORTED_TOGETHER = 50
"""Number of global batches that ``Grouped`` sorts by length at once; as in transformers' LengthGroupedSampler."""


class Sampler(ABC):
    """Maps a position within an epoch to a row of the dataset."""

    size: int
    """Number of rows in an epoch."""

    @abstractmethod
    def rows(self, epoch: int, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """The row at each position in ``places``, each in ``range(size)``; same shape as ``places``."""


class InOrder(Sampler):
    """Every row once per epoch, in order."""

    def __init__(self, size: int) -> None:
        self.size = size

    def rows(self, epoch: int, places: NDArray[np.int64]) -> NDArray[np.int64]:
        return places


class Shuffled(Sampler):
    """Every row once per epoch, in a new random order each time."""

    def __init__(self, size: int, seed: int) -> None:
        self.size = size
        self._seed = seed

    def rows(self, epoch: int, places: NDArray[np.int64]) -> NDArray[np.int64]:
        return order(self._seed, epoch, places, self.size)


class Mixed(Sampler):
    """Rows of several sources in given proportions.

    An epoch has as many positions as there are rows. A source whose weight exceeds its share of the rows gives more
    rows per epoch than it has, any other at most as many. In the next epoch each source continues where it stopped, in
    a new order after each pass: a row may occur twice in an epoch in which a pass ends, and over time all rows of a
    source are visited equally often.

    Args:
        sizes: number of rows of each source; the rows of a source are consecutive.
        weights: each source's weight, relative to the others.

    Raises:
        UserError: a source has no rows.
    """

    def __init__(self, sizes: Sequence[int], weights: list[float], seed: int) -> None:
        self.size = sum(sizes)
        self._seed = seed
        self._sizes = sizes
        self._first_rows = np.cumsum([0, *sizes[:-1]])
        for source, size in enumerate(sizes):
            if not size:
                raise UserError(
                    "a source with a weight gave no samples",
                    where=f"data.train.{source}",
                    remedy="give it records, or leave it out",
                )
        exact = np.array(weights) / sum(weights) * self.size
        counts = np.floor(exact).astype(np.int64)
        largest_rests = np.argsort(counts - exact, kind="stable")[: self.size - counts.sum()]
        counts[largest_rests] += 1
        self._counts = counts
        self._starts = np.concatenate([[0], np.cumsum(counts)])

    def rows(self, epoch: int, places: NDArray[np.int64]) -> NDArray[np.int64]:
        drawn = order(self._seed, epoch, places, self.size)
        sources = np.searchsorted(self._starts, drawn, side="right") - 1
        rows = np.empty_like(drawn)
        for source, size in enumerate(self._sizes):
            mine = sources == source
            visits = epoch * self._counts[source] + drawn[mine] - self._starts[source]
            found = np.empty_like(visits)
            for turn in np.unique(visits // size):
                now = visits // size == turn
                found[now] = order(self._seed + source + 1, int(turn), visits[now] % size, size)
            rows[mine] = self._first_rows[source] + found
        return rows


class Grouped(Sampler):
    """Another sampler's rows, with rows of similar length in the same global batch.

    The rows of ``BATCHES_SORTED_TOGETHER`` batches at a time are sorted by length, and these batches then come in
    random order: batches differ in length, and hardly need padding.

    Args:
        base: the sampler to draw from.
        lengths: shape (rows,): number of tokens in each row.
        global_batch: rows per step.
    """

    def __init__(self, base: Sampler, lengths: Values, global_batch: int, seed: int) -> None:
        self.size = base.size
        self._base = base
        self._lengths = lengths
        self._batch = global_batch
        self._seed = seed
        self._newest: tuple[tuple[int, int], NDArray[np.int64]] | None = None

    def rows(self, epoch: int, places: NDArray[np.int64]) -> NDArray[np.int64]:
        span = BATCHES_SORTED_TOGETHER * self._batch
        rows = np.empty_like(places)
        for group in np.unique(places // span):
            mine = places // span == group
            rows[mine] = self._group(epoch, int(group), span)[places[mine] - group * span]
        return rows

    def _group(self, epoch: int, group: int, span: int) -> NDArray[np.int64]:
        """The rows of one group, starting at position ``group * span``."""
        if self._newest is None or self._newest[0] != (epoch, group):
            places = np.arange(group * span, min((group + 1) * span, self.size))
            rows = self._base.rows(epoch, places)
            rows = rows[np.argsort(-self._lengths[rows], kind="stable")]
            whole = len(rows) // self._batch  # the epoch's last batch may be smaller, and stays the last
            if whole:
                batches = rows[: whole * self._batch].reshape(whole, self._batch)
                shuffled = order(self._seed, epoch * (self.size // span + 1) + group, np.arange(whole), whole)
                rows = np.concatenate([batches[shuffled].ravel(), rows[whole * self._batch :]])
            self._newest = (epoch, group), rows
        return self._newest[1]
