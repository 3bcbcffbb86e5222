"""Sweeps: from ``optim.lr=1e-4,3e-4`` to a run for each combination of values."""

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from drawbar.errors import UserError

_LONGEST = 128
"""Characters in the name of a run."""
_OPEN, _CLOSED = "[{", "]}"


@dataclass(frozen=True)
class Axis:
    """A setting, and the values that it takes."""

    key: str
    values: tuple[str, ...]


def parse(argument: str) -> Axis:
    """``KEY=VALUE,VALUE``: each value as it would follow ``KEY=`` on the command line.

    Raises:
        UserError: it is not of that form, or names a setting that a sweep cannot have.
    """
    key, equals, text = argument.partition("=")
    values = split_values(text)
    if not equals or not key or not all(values):
        raise UserError(
            f"expected KEY=VALUE,VALUE and not {argument!r}",
            where="--sweep",
            remedy="write it as --sweep optim.lr=1e-4,3e-4; a list is one value: [a,b],[c,d]",
        )
    if key in ("run", "run.name", "run.dir"):
        raise UserError(
            f"{key} cannot be swept: each run is named after its values",
            where="--sweep",
            remedy="set run.name without --sweep: the names begin with it",
        )
    if key.partition(".")[0] == "cluster":
        raise UserError(
            f"{key} cannot be swept: a sweep is one job, and all its elements ask for the same",
            where="--sweep",
            remedy="submit once for each value, under another run.name",
        )
    twice = {value for value in values if values.count(value) > 1}
    if twice:
        raise UserError(f"{key} has the value {min(twice)} twice", where="--sweep", remedy="give each value once")
    return Axis(key, values)


def combine(arguments: Sequence[str]) -> list[tuple[str, ...]]:
    """The settings of each element: all combinations, the last setting changing fastest.

    Raises:
        UserError: see :func:`parse`; or a setting is given twice.
    """
    axes = [parse(argument) for argument in arguments]
    keys = [axis.key for axis in axes]
    for key in keys:
        if keys.count(key) > 1:
            raise UserError(
                f"{key} is swept twice", where="--sweep", remedy=f"write it once: --sweep {key}=VALUE,VALUE,VALUE"
            )
    return list(itertools.product(*([f"{axis.key}={value}" for value in axis.values] for axis in axes)))


def split_values(text: str) -> tuple[str, ...]:
    """Split a text at the commas that are not inside brackets or quotes."""
    values, depth, quote, begin = [], 0, "", 0
    for position, letter in enumerate(text):
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"" and text[begin:position].rstrip()[-1:] in ("", *_OPEN, ",", ":"):
            quote = letter  # inside a word, ' is an apostrophe and opens no quotation
        elif letter in _OPEN:
            depth += 1
        elif letter in _CLOSED:
            depth = max(0, depth - 1)
        elif letter == "," and depth == 0:
            values.append(text[begin:position].strip())
            begin = position + 1
    return (*values, text[begin:].strip())


def name_runs(base: str, elements: Sequence[Sequence[str]]) -> list[str]:
    """A name for the run of each element: ``base-lr1e-4-steps100``. All differ, and a run can have each of them."""
    keys = [setting.partition("=")[0] for setting in elements[0]]
    short = {key: _shortest(key, keys) for key in keys}
    names: list[str] = []
    for element in elements:
        parts = [base]
        for setting in element:
            key, _, value = setting.partition("=")
            parts.append(short[key] + _safe(value))
        name = "-".join(parts)[:_LONGEST]
        number = 1
        while name in names:  # different values can give one name: some characters are replaced, its end is cut
            number += 1
            end = f"-{number}"
            name = "-".join(parts)[: _LONGEST - len(end)] + end
        names.append(name)
    return names


def _shortest(key: str, keys: Sequence[str]) -> str:
    """The last word of a key, or as many as distinguish it from the others."""
    words = key.split(".")
    for count in range(1, len(words)):
        end = ".".join(words[-count:])
        if sum(other == end or other.endswith(f".{end}") for other in keys) == 1:
            return _safe(end)
    return _safe(key)


def _safe(text: str) -> str:
    """The text with ``_`` in place of each series of characters that no run's name can have."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", text).strip("_") or "_"
