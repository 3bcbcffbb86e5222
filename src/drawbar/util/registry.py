"""The entry points of installed packages, among them drawbar's own guests; ``Registry``: the implementations of one
kind by name, with those that packages provide as entry points."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from typing import Any, Generic, TypeVar

from drawbar.errors import UserError, nearest


def installed_points(group: str) -> list[EntryPoint]:
    """The entry points of a group, except those of drawbar's own guests that are not installed."""
    return [point for point in entry_points(group=group) if not _is_left_out(point)]


@cache  # every search looks at all installed packages, which a shared disk may take long for
def left_out_folders(group: str) -> dict[str, str]:
    """By the names of the other entry points of the group: the folder of drawbar's that is not there."""
    return {point.name: _folder(point) for point in entry_points(group=group) if _is_left_out(point)}


def load_points(group: str, kind: str) -> Iterator[tuple[str, Any]]:
    """What the entry points of a group name. Those that cannot be imported, or have one name in several packages, are
    left out with a warning.

    Args:
        kind: what one of them is called in the warning: ``command``.
    """
    points: dict[str, list[EntryPoint]] = {}
    for point in installed_points(group):
        points.setdefault(point.name, []).append(point)
    for point, *others in points.values():
        if others:
            print(f"warning: {_several([point, *others], kind)}; uninstall all of them but one", file=sys.stderr)
            continue
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


T = TypeVar("T")


class Registry(Generic[T]):
    """Implementations of one kind, such as launchers or trackers. Nothing is imported before it is asked for.

    Args:
        kind: what one of them is called in messages: ``launcher``.
        group: the group of entry points by which other packages add theirs: ``drawbar.launchers``.
        built_in: drawbar's own by name, or where each is: ``package.module:attribute``. They go before those of
            packages.
    """

    def __init__(self, kind: str, group: str, built_in: "Mapping[str, T | str] | None" = None) -> None:
        self.kind = kind
        self.group = group
        self._built_in = built_in or {}
        self._loaded: dict[str, T] = {}

    def get(self, name: str, where: str) -> T:
        """The implementation of this name.

        Args:
            where: the setting or option that names it, for the error.

        Raises:
            UserError: there is none, several packages provide one, or it cannot be imported.
        """
        own = self._built_in.get(name)
        if own is not None and not isinstance(own, str):
            return own
        if name not in self._loaded:
            point = EntryPoint(name, own, self.group) if own else self._installed(name, where)
            self._loaded[name] = self._load(point, where)
        return self._loaded[name]

    def _installed(self, name: str, where: str) -> EntryPoint:
        points = [point for point in installed_points(self.group) if point.name == name]
        if not points:
            raise self._unknown(name, where)
        if len(points) > 1:
            raise UserError(_several(points, self.kind), where=where, remedy="uninstall all of them but one")
        return points[0]

    def __contains__(self, name: str) -> bool:
        """Whether there is one of this name; installed packages are searched last."""
        return name in self._built_in or name in self.names()

    def names(self) -> list[str]:
        """All names: drawbar's own, then those of installed packages."""
        installed = sorted(point.name for point in installed_points(self.group))
        return list(dict.fromkeys([*self._built_in, *installed]))

    def _load(self, point: EntryPoint, where: str) -> T:
        try:
            found: T = point.load()
        except Exception as error:
            raise UserError(
                f"the {self.kind} {point.name!r} ({point.value}) cannot be imported: {type(error).__name__}: {error}",
                where=where,
                remedy=f"reinstall or correct {_package(point)}, or choose another {self.kind}",
            ) from error
        return found

    def _unknown(self, name: str, where: str) -> UserError:
        names = self.names()
        known = ", ".join(names) or "none"
        near = nearest(name, names)
        hint = f"did you mean {near}? " if near else ""
        return UserError(
            f"there is no {self.kind} {name!r}",
            where=where,
            remedy=f"{hint}There are: {known}; a package adds one by the entry point group {self.group}",
        )


def _several(points: Sequence[EntryPoint], kind: str) -> str:
    packages = ", ".join(sorted(_package(point) for point in points))
    return f"several packages provide the {kind} {points[0].name!r}: {packages}"


def _package(point: EntryPoint) -> str:
    """The installed package that an entry point belongs to."""
    return point.dist.name if point.dist is not None else "drawbar"
