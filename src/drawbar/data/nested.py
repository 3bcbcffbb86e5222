"""The columns of a record, and those inside others: ``translation.en``."""

import json
from collections.abc import Mapping
from typing import Any

from drawbar.data.readers import Record

SEPARATORS = ";,|\t"
"""What may stand between the fields of a table."""


def value_at(record: Record, column: str) -> Any:
    """A record's value under a column: ``translation.en`` is that of ``en`` in ``translation``.

    A column that has this very name comes first.

    Raises:
        KeyError: there is no such column.
    """
    if column in record:
        return record[column]
    value: Any = record
    for name in column.split("."):
        if not isinstance(value, dict):
            raise KeyError(column)
        value = value[name]
    return value


def old_name(column: str, rename: Mapping[str, str]) -> str:
    """The name that a column has in the file, be it inside a column that was renamed.

    Args:
        rename: old names by new ones.
    """
    first, dot, inner = column.partition(".")
    return rename.get(column) or f"{rename.get(first, first)}{dot}{inner}"


def columns_of(record: Record) -> list[str]:
    """The names of a record's columns, and of those inside them, as ``value_at`` takes them."""
    names = []
    for name, value in record.items():
        inner = columns_of(value) if isinstance(value, dict) else []
        names += [name, *(f"{name}.{column}" for column in inner)]
    return names


def misread_header(column: str, record: Record) -> str | None:
    """A remedy if the header was split wrongly, so that the column is part of another name; None otherwise."""
    for name in record:
        if name.strip() == column:
            return f"write {column!r} without spaces around it; in a table, the names are in the header"
        for separator in SEPARATORS:
            if column in (part.strip() for part in name.split(separator)):
                return name_separator(separator)
    return None


def name_separator(separator: str) -> str:
    """The remedy for a table whose fields are not separated as they were read."""
    return (
        f"the fields of the file seem to be separated by {separator!r}: set 'data.separator={json.dumps(separator)}', "
        "which files named .csv take"
    )
