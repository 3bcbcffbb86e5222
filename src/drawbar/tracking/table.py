"""One table on standard output."""

import sys
from collections.abc import Sequence

from rich.console import Console as RichConsole
from rich.table import Table


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table: drawn by rich on a terminal, aligned plain text elsewhere.

    The first column is set to the left and all others, which hold numbers, to the right.
    """
    if sys.stdout.isatty():
        RichConsole().print(_rich_table(title, columns, rows), markup=False)
    else:
        print(plain_table(title, columns, rows), flush=True)


def plain_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The table as lines of text, columns two spaces apart."""
    cells = [columns, *rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    lines = []
    for row in cells:
        aligned = [
            row[0].ljust(widths[0]),
            *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)),
        ]
        lines.append("  ".join(aligned).rstrip())
    rule = "  ".join("-" * width for width in widths)
    return "\n".join([title, "", lines[0], rule, *lines[1:]])


def _rich_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    for row in rows:
        table.add_row(*row)
    return table
