"""Scores of numbers: one a record."""

from typing import Any

import numpy as np

Numbers = list[float]


def mse(predictions: Numbers, references: Numbers) -> float:
    """The mean squared error, in the square of the references' unit."""
    return float(np.mean(np.square(_array(predictions) - _array(references))))


def mae(predictions: Numbers, references: Numbers) -> float:
    """The mean absolute error, in the references' unit."""
    return float(np.mean(np.abs(_array(predictions) - _array(references))))


def pearson(predictions: Numbers, references: Numbers) -> float:
    """The correlation of the values, from -1 to 1; nan where it is not defined, as for a constant."""
    from scipy.stats import pearsonr

    return float(pearsonr(predictions, references).statistic) if _both_vary(predictions, references) else float("nan")


def spearman(predictions: Numbers, references: Numbers) -> float:
    """The correlation of the ranks, from -1 to 1; nan where it is not defined, as for a constant."""
    from scipy.stats import spearmanr

    return float(spearmanr(predictions, references).statistic) if _both_vary(predictions, references) else float("nan")


def _array(values: Numbers) -> Any:
    """Shape (records,), float64: a difference of unsigned or 16-bit values would overflow."""
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1:
        raise ValueError("it is for one number a record, and these are lists")
    return array


def _both_vary(predictions: Numbers, references: Numbers) -> bool:
    arrays = (_array(predictions), _array(references))
    return all(bool(np.isfinite(array).all()) and array.min() < array.max() for array in arrays)
