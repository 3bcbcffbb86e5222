"""Tables and histograms on standard output."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from numpy.typing import ArrayLike
from rich.cells import cell_len
from rich.console import Console as RichConsole
from rich.table import Table
from rich.text import Text

MOST_BINS = 15
BAR_WIDTH = 24
"""With this width, a line with a mark stays under 80 columns."""


@dataclass(frozen=True)
class Bin:
    """How many values lie in ``first..last``, both included."""

    first: int
    last: int
    count: int


def bins_of(values: ArrayLike) -> list[Bin]:
    """Count integers, at least one, in at most 15 bins of equal width, without gaps; the width is 1, 2 or 5 × 10ⁿ.

    The first bin contains the smallest value, the last one the largest.
    """
    numbers = np.asarray(values, dtype=np.int64)
    smallest, largest = int(numbers.min()), int(numbers.max())
    widths = (factor * 10**power for power in range(19) for factor in (1, 2, 5))
    width = next(width for width in widths if largest // width - smallest // width < MOST_BINS)
    start = smallest // width
    counts = np.bincount(numbers // width - start)
    return [Bin((start + i) * width, (start + i + 1) * width - 1, count) for i, count in enumerate(counts.tolist())]


def fold(bins: Sequence[Bin]) -> list[Bin]:
    """The bins, with each sequence of three or more empty ones merged into one."""
    folded: list[Bin] = []
    for is_empty, run in groupby(bins, key=lambda one: one.count == 0):
        some = list(run)
        folded += [Bin(some[0].first, some[-1].last, 0)] if is_empty and len(some) > 2 else some
    return folded


def print_histogram(title: str, values: ArrayLike, marks: dict[str, int]) -> None:
    """Print a bar for each bin, in ASCII if standard output is not a terminal.

    Args:
        values: integers, at least one.
        marks: numbers to mark, by name; those beyond the last bin are listed below the bars.
    """
    print(plain_histogram(title, fold(bins_of(values)), marks, "█" if sys.stdout.isatty() else "#"), flush=True)


def plain_histogram(title: str, bins: Sequence[Bin], marks: dict[str, int], bar: str = "#") -> str:
    """The bars as lines of text."""
    cells = [(_span(one), bar * _bar(one, bins), f"{one.count:,}", _marks(one, marks)) for one in bins]
    spans, counts = max(len(cell[0]) for cell in cells), max(len(cell[2]) for cell in cells)
    lines = [
        f"{span:>{spans}}  {drawn:<{BAR_WIDTH}}  {count:>{counts}}  {mark}".rstrip()
        for span, drawn, count, mark in cells
    ]
    beyond = [f"{name} = {value:,}, beyond the largest" for name, value in marks.items() if value > bins[-1].last]
    return "\n".join([title, "", *lines, *beyond])


def _span(one: Bin) -> str:
    return f"{one.first:,}" if one.first == one.last else f"{one.first:,}-{one.last:,}"


def _bar(one: Bin, bins: Sequence[Bin]) -> int:
    """The length of the bar in characters; 0 only if the bin is empty."""
    most = max(other.count for other in bins)
    return max(round(one.count / most * BAR_WIDTH), 1) if one.count else 0


def _marks(one: Bin, marks: dict[str, int]) -> str:
    here = [f"{name} = {value:,}" for name, value in marks.items() if one.first <= value <= one.last]
    return f"<- {', '.join(here)}" if here else ""


def print_table(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    left: int = 1,
    styles: Mapping[str, str] | None = None,
) -> None:
    """Print a table: drawn by rich on a terminal, aligned plain text elsewhere.

    The first ``left`` columns are left-aligned and all others, which hold numbers, right-aligned. On a terminal that
    is too narrow, each cell gets a line of its own, so that no number is cut off.

    Args:
        styles: text of a cell → its style in rich, on a terminal.
    """
    if not sys.stdout.isatty():
        print(plain_table(title, columns, rows, left), flush=True)
        return
    console, styled = RichConsole(highlight=False), styles or {}
    widths = [max(cell_len(row[i]) for row in [columns, *rows]) for i in range(len(columns))]
    if sum(widths) + 3 * len(columns) + 1 > console.width:
        console.print(_stacked(title, columns, rows, styled), markup=False)
    else:
        console.print(_rich_table(title, columns, rows, left, styled), markup=False)


def plain_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """The table as lines of text, columns two spaces apart."""
    cells = [columns, *rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    lines = []
    for row in cells:
        aligned = [
            cell.ljust(width) if index < left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(aligned).rstrip())
    rule = "  ".join("-" * width for width in widths)
    return "\n".join([title, "", lines[0], rule, *lines[1:]])


def _rich_table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], left: int, styles: Mapping[str, str]
) -> Table:
    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < left else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(Text(cell, styles.get(cell, "")) for cell in row))
    return table


def _stacked(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], styles: Mapping[str, str]) -> Text:
    """For each row, its first cell, and below it the others with the names of their columns."""
    width = max(map(cell_len, columns)) + 2
    text = Text(f"{title}\n")
    for row in rows:
        text.append(f"\n{row[0]}\n", styles.get(row[0], "bold"))
        for column, cell in zip(columns[1:], row[1:], strict=True):
            if cell:
                text.append(f"  {column}".ljust(width + 2), "dim").append(f"{cell}\n", styles.get(cell, ""))
    text.rstrip()
    return text
