"""One table on standard output."""

import sys
from collections.abc import Sequence

from rich.console import Console as RichConsole
from rich.table import Table
from rich.text import Text


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> None:
    """Print a table: drawn by rich on a terminal, aligned plain text elsewhere.

    The first ``left`` columns are set to the left and all others, which hold numbers, to the right.
    """
    if sys.stdout.isatty():
        RichConsole().print(_rich_table(title, columns, rows, left), markup=False)
    else:
        print(plain_table(title, columns, rows, left), flush=True)


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


def _rich_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], left: int) -> Table:
    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < left else "right")
    for row in rows:
        table.add_row(*map(Text, row))
    return table
