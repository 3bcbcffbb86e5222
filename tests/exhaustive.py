"""Long lists of cases: ``make test`` runs some, spread evenly over the list, and ``make test-all`` the others as well.

The others bear the mark ``exhaustive``, as do tests that take long; ``pytest -m ""`` runs them.
"""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def evenly(cases: Iterable[Any], count: int) -> list[Any]:
    """``count`` of the cases: the first, the last, and some between them."""
    known = list(cases)
    if len(known) <= count or count == 1:
        return known[:count]
    return [known[round(number * (len(known) - 1) / (count - 1))] for number in range(count)]


def params(cases: Iterable[Any], often: Collection[Any]) -> list[Any]:
    """Every case for ``parametrize``, those that are not among ``often`` with the mark. A tuple is several values;
    a ``pytest.param`` keeps its name."""
    return [
        pytest.param(
            *(getattr(case, "values", case) if isinstance(case, tuple) else (case,)),
            id=getattr(case, "id", None),
            marks=() if case in often else pytest.mark.exhaustive,
        )
        for case in cases
    ]


def some(cases: Iterable[Any], count: int) -> list[Any]:
    """Every case, and all but ``count`` of them with the mark."""
    known = list(cases)
    return params(known, evenly(known, count))


def asked(request: pytest.FixtureRequest, *names: str) -> list[Any]:
    """The cases of these parameters that the module's tests were asked for, for a fixture that computes them all at
    once: values where there is one name, else tuples."""
    found: dict[Any, None] = {}
    for item in request.session.items:
        callspec = getattr(item, "callspec", None)
        if item.path == request.path and callspec is not None and all(name in callspec.params for name in names):
            values = tuple(callspec.params[name] for name in names)
            found[values if len(names) > 1 else values[0]] = None
    return list(found)
