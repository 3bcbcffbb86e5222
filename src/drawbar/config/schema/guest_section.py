"""``GuestSection``: a configuration section that a package adds, as drawbar's own guests do.

A package registers it as an entry point of the group ``drawbar.sections``; the entry point's name is the section's.
"""

from functools import cache
from pkgutil import resolve_name
from typing import Any, ClassVar, Self

from pydantic import BaseModel

from drawbar.config.schema.section import Section
from drawbar.util.registry import load_points

SECTIONS_GROUP = "drawbar.sections"


class GuestSection(Section):
    """An optional section of a run (null by default). Its docstring is its documentation.

    It sets how or where a run is computed, not what is computed, so a resumed run may change it. Its module is imported
    whenever a configuration is read, so it must import neither torch nor ``RunConfig``, which contains it. Code that
    needs them is given as ``package.module:object`` and imported on demand.
    """

    strategy: ClassVar[str | None] = None
    """The strategy that reads this section; if the section is set, ``parallel.strategy: auto`` chooses it."""
    rules: ClassVar[str | None] = None
    """Rules for every run: a sequence of ``drawbar.config.rules.rule.Rule``."""
    package_rules: ClassVar[str | None] = None
    """Rules for this machine: the packages that it must have."""
    check_start: ClassVar[str | None] = None
    """A function of a ``LoadedConfig`` and a number of ranks; raises UserError if the run cannot start."""

    @classmethod
    def find(cls, config: BaseModel) -> Self | None:
        """This section of a run, or None if the run has none."""
        return next((value for _, value in config if isinstance(value, cls)), None)

    @classmethod
    def of(cls, config: BaseModel) -> Self:
        """This section of a run, or one with the defaults."""
        return cls.find(config) or cls()


@cache
def guest_sections() -> dict[str, type[GuestSection]]:
    """The sections of installed packages, by name."""
    return dict(sorted(load_points(SECTIONS_GROUP, "section")))


def from_guests(hook: str) -> list[Any]:
    """Import the objects that guests' sections name in the attribute ``hook``, such as ``rules``."""
    return [resolve_name(path) for section in guest_sections().values() if (path := getattr(section, hook))]
