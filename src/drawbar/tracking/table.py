"""One table on standard output."""

import sys
from collections.abc import Mapping, Sequence

from rich.cells import cell_len
from rich.console import Console as RichConsole
from rich.table import Table
from rich.text import Text


def print_table(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    left: int = 1,
    styles: Mapping[str, str] | None = None,
) -> None:
    """Print a table: drawn by rich on a terminal, aligned plain text elsewhere.

    The first ``left`` columns are set to the left and all others, which hold numbers, to the right. On a terminal that
    is too narrow, each row becomes lines of one cell, so that no number is cut.

    Args:
        styles: how cells of these texts are drawn on a terminal, as rich names styles.
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
    """For each row its first cell, and below it the other ones with their columns' names."""
    width = max(map(cell_len, columns)) + 2
    text = Text(f"{title}\n")
    for row in rows:
        text.append(f"\n{row[0]}\n", styles.get(row[0], "bold"))
        for column, cell in zip(columns[1:], row[1:], strict=True):
            if cell:
                text.append(f"  {column}".ljust(width + 2), "dim").append(f"{cell}\n", styles.get(cell, ""))
    text.rstrip()
    return text
