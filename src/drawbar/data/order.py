"""The order in which training visits its samples: a pseudo-random permutation that needs no memory.

``order(seed, epoch, index, size)`` says which sample stands at a place of an epoch. It depends on nothing else, so
any number of processes, started at any step, agree on it without talking to one another.
"""

import numpy as np
from numpy.typing import NDArray

ROUNDS = 8  # four make a Feistel network pseudo-random (Luby & Rackoff 1988); small domains want more


def order(seed: int, epoch: int, index: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    """The sample at each place ``index`` of one epoch: a permutation of ``range(size)`` keyed by seed and epoch.

    A balanced Feistel network permutes the smallest domain of ``4**k >= size`` numbers; a result outside
    ``range(size)`` is fed back until it falls inside ("cycle walking"; Black & Rogaway, "Ciphers with Arbitrary
    Finite Domains", CT-RSA 2002). The domain is at most four times the size, so that takes
    four turns or fewer on average.

    Args:
        seed: 0 <= seed < 2**64.
        epoch: 0 <= epoch < 2**64.
        index: places in the epoch, any shape, each in ``range(size)``.
        size: number of samples, 1 <= size <= 2**62.

    Returns:
        Sample numbers, of the shape of ``index``.

    Raises:
        ValueError: a place outside ``range(size)``.
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
