"""Numbers of bytes as people read and write them."""

import re
from pathlib import Path


def readable(size: int) -> str:
    """A number of bytes for people: ``1.5 GiB``, ``12.0 MiB``, ``3.4 KiB``."""
    for unit, bits in (("GiB", 30), ("MiB", 20)):
        if size >= 2**bits:
            return f"{size / 2**bits:.1f} {unit}"
    return f"{size / 2**10:.1f} KiB"


def bytes_below(folder: Path) -> int:
    """Of all files in a folder, and in the folders in it."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


_UNITS = {
    **{f"{letter}IB": 2 ** (10 * power) for power, letter in enumerate("KMGT", start=1)},
    **{f"{letter}B": 10 ** (3 * power) for power, letter in enumerate("KMGT", start=1)},
}


def parse_size(text: str) -> int:
    """The bytes of ``80GiB``, ``80 GB`` or ``512MiB``.

    Raises:
        ValueError: it is no such size.
    """
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([KMGT]I?B)", text.strip().upper())
    size = int(float(found[1]) * _UNITS[found[2]]) if found else 0
    if not size:
        raise ValueError(f"expected a size such as 80GiB or 24GB, got {text!r}")
    return size
