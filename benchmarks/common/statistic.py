"""Medians with their spread, and ratios of what was measured in the same rounds."""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from drawbar.tracking.table import plain_table

Key = TypeVar("Key")


@dataclass(frozen=True)
class Statistic:
    """A number that was measured several times."""

    median: float
    low: float
    high: float
    rounds: int

    @staticmethod
    def of(values: Iterable[float]) -> "Statistic":
        """Raises ``ValueError`` where there are none."""
        found = sorted(values)
        if not found:
            raise ValueError("nothing was measured")
        return Statistic(statistics.median(found), found[0], found[-1], len(found))


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> Statistic:
    """``ours / theirs`` round by round: what slows the machine down for a while slows both of a pair."""
    return Statistic.of(one / other for one, other in zip(ours, theirs, strict=True))


def interleave(contenders: Mapping[Key, Callable[[], Any]], rounds: int) -> dict[Key, list[Any]]:
    """The results of each contender, measured in turn: A, B, C, A, B, C, …"""
    found: dict[Key, list[Any]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, measure in contenders.items():
            found[name].append(measure())
    return found


def growth(points: Sequence[tuple[float, float]]) -> float:
    """The exponent of the power law through (x, y), by least squares of the logarithms: 0 is constant, 1 linear."""
    logs = [(math.log(x), math.log(y)) for x, y in points]
    return statistics.linear_regression(*zip(*logs, strict=True)).slope


def cell(value: Any) -> str:
    """A value as a table shows it: ``1,234``, ``0.0123``, ``12.3 (11.9–13.0)``."""
    if value is None:
        return ""
    if isinstance(value, Statistic):
        value = asdict(value)
    if isinstance(value, dict):
        spread = "" if value["rounds"] == 1 else f" ({_number(value['low'])}–{_number(value['high'])})"
        return _number(value["median"]) + spread
    return _number(value) if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


def _number(value: float) -> str:
    """Three digits, or all that stand before the point."""
    if value and abs(value) < 1e-3:
        return f"{value:.2e}"
    decimals = 3 if abs(value) < 10 else 1 if abs(value) < 100 else 0
    return f"{value:,.{decimals}f}"


def text_table(title: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows of values by column, as a table of plain text."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    return plain_table(title, columns, [[cell(row.get(column)) for column in columns] for row in rows])


def markdown_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The same as Markdown."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)]]
    lines += [[cell(row.get(column)).replace("|", "\\|") for column in columns] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
