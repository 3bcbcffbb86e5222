"""Byte n-gram models with Witten–Bell smoothing: what a language model must beat to have learned anything.

Source: Witten & Bell, "The zero-frequency problem" (IEEE Trans. Inf. Theory 37, 1991), in the interpolated form of
Chen & Goodman, "An empirical study of smoothing techniques for language modeling" (1998), section 2.4.
"""

from collections.abc import Iterable

import numpy as np

VALUES = 256


def bits_per_byte(train: Iterable[str], validation: Iterable[str], order: int) -> float:
    """Mean bits that a byte model of this ``order`` (1: unigram, 3: trigram), fitted on ``train``, needs for a byte.

    A document begins after a context of zero bytes.
    """
    counts = [np.zeros(VALUES ** (n + 1), dtype=np.int64) for n in range(order)]
    for text in train:
        for n, codes in enumerate(_codes(text, order)):
            found, times = np.unique(codes, return_counts=True)
            counts[n][found] += times
    totals = [table.reshape(-1, VALUES).sum(axis=1) for table in counts]
    varieties = [(table.reshape(-1, VALUES) > 0).sum(axis=1) for table in counts]
    bits, size = 0.0, 0
    for text in validation:
        probability: np.ndarray | float = 1 / VALUES
        for n, codes in enumerate(_codes(text, order)):
            context = codes // VALUES
            seen, kinds = totals[n][context], varieties[n][context]
            total = np.maximum(seen + kinds, 1)
            mixed = (counts[n][codes] + kinds * probability) / total
            probability = np.where(seen > 0, mixed, probability)
        bits -= float(np.log2(probability).sum())
        size += len(text.encode())
    return bits / max(size, 1)


def _codes(text: str, order: int) -> list[np.ndarray]:
    """For n = 0 … order-1: each position's last n bytes and its own, as one number in base 256."""
    data = np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int64)
    padded = np.concatenate([np.zeros(order - 1, dtype=np.int64), data])
    codes, result = data, [data]
    for n in range(1, order):
        codes = codes + padded[order - 1 - n : order - 1 - n + data.size] * VALUES**n
        result.append(codes)
    return result
