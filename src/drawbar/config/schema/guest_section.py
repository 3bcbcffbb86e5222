"""``GuestSection``: a section of the configuration that a package brings, as drawbar's own guests do.

Packages name theirs by an entry point of the group ``drawbar.sections``, whose name is the section's.
"""

from functools import cache
from pkgutil import resolve_name
from typing import Any, ClassVar, Self

from pydantic import BaseModel

from drawbar.config.schema.section import Section
from drawbar.util.registry import load_points

SECTIONS_GROUP = "drawbar.sections"


class GuestSection(Section):
    """A section that a run may have; without it, it is null. Its docstring is its documentation.

    It says how or where a run is computed, and not what: a resumed run may change it. Its module is imported whenever
    a configuration is read, so it imports no torch, and not ``RunConfig``, which is made of it. What does is named as
    ``package.module:object``, and imported when it is needed.
    """

    strategy: ClassVar[str | None] = None
    """The strategy that reads this section, and that ``parallel.strategy: auto`` chooses where it is set."""
    rules: ClassVar[str | None] = None
    """Rules that hold for every run: a sequence of ``drawbar.config.rules.rule.Rule``."""
    package_rules: ClassVar[str | None] = None
    """Rules for this machine: packages that it must have."""
    check_start: ClassVar[str | None] = None
    """A function of a ``LoadedConfig`` and a number of ranks that raises UserError for a run that will not start."""

    @classmethod
    def find(cls, config: BaseModel) -> Self | None:
        """This section of a run; None where it has none."""
        return next((value for _, value in config if isinstance(value, cls)), None)

    @classmethod
    def of(cls, config: BaseModel) -> Self:
        """This section of a run; where it has none, one of defaults."""
        return cls.find(config) or cls()


@cache
def guest_sections() -> dict[str, type[GuestSection]]:
    """The sections of the packages that are installed, by name."""
    return dict(sorted(load_points(SECTIONS_GROUP, "section")))


def from_guests(hook: str) -> list[Any]:
    """What the sections of guests name by this attribute, such as ``rules``; it is imported for that."""
    return [resolve_name(path) for section in guest_sections().values() if (path := getattr(section, hook))]
