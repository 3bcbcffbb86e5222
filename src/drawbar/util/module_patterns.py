"""Names of modules with ``*`` for one part of a name: ``model.layers.*.mlp``."""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

T = TypeVar("T")
Module = TypeVar("Module")


def matching(modules: Iterable[tuple[str, Module]], patterns: Mapping[str, T]) -> Iterator[tuple[str, Module, T]]:
    """The named modules that fit a pattern, each with the value of that pattern; in the order of the modules.

    Args:
        modules: from ``named_modules()``.
    """
    compiled: list[tuple[re.Pattern[str], Any]] = [
        (re.compile(re.escape(pattern).replace(r"\*", "[^.]+")), value) for pattern, value in patterns.items()
    ]
    for name, module in modules:
        for pattern, value in compiled:
            if pattern.fullmatch(name):
                yield name, module, value
