"""Long lists of cases, of which ``make test`` runs some and ``make test-all`` all (``DRAWBAR_TESTS=all``)."""

import os
from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T")

ALL = os.environ.get("DRAWBAR_TESTS") == "all"


def some(cases: Iterable[T], count: int) -> list[T]:
    """``count`` (at least 2) of the cases, evenly spread, the first and the last among them; all where all are run."""
    known = list(cases)
    if ALL or len(known) <= count:
        return known
    return [known[round(number * (len(known) - 1) / (count - 1))] for number in range(count)]
