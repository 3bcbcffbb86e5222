"""The entry points of installed packages, among them drawbar's own guests."""

import sys
from collections.abc import Iterator
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from typing import Any


def installed_points(group: str) -> list[EntryPoint]:
    """The entry points of a group, but for those of drawbar's folders that were left out where it was installed."""
    return [point for point in entry_points(group=group) if not _is_left_out(point)]


@cache  # every search looks at all installed packages, which a shared disk may take long for
def left_out_folders(group: str) -> dict[str, str]:
    """By the names of the other entry points of the group: the folder of drawbar's that is not there."""
    return {point.name: _folder(point) for point in entry_points(group=group) if _is_left_out(point)}


def load_points(group: str, kind: str) -> Iterator[tuple[str, Any]]:
    """What the entry points of a group name. One that cannot be imported costs a warning, and the others are there all
    the same.

    Args:
        kind: what one of them is called in the warning: ``command``.
    """
    for point in installed_points(group):
        try:
            found = point.load()
        except Exception as error:  # noqa: BLE001 - any package's import may raise anything
            print(f"warning: the {kind} {point.name} ({point.value}) cannot be imported: {error}", file=sys.stderr)
        else:
            yield point.name, found


def _is_left_out(point: EntryPoint) -> bool:
    # of another package nothing is asked: to look for a module imports what is around it
    return point.module.startswith("drawbar.") and not has_folder(_folder(point))


def _folder(point: EntryPoint) -> str:
    return point.module.split(".")[1]


def has_folder(name: str) -> bool:
    """Whether drawbar was installed with its folder of this name."""
    spec = find_spec(f"drawbar.{name}")
    return spec is not None and spec.origin is not None  # a folder in which only __pycache__ is left has a spec
