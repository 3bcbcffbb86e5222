"""``Rule``: one line of the table of settings that do not combine."""

from collections.abc import Callable
from dataclasses import dataclass

from drawbar.config.schema import RunConfig


@dataclass(frozen=True)
class Rule:
    """A combination of settings that is refused."""

    name: str
    keys: tuple[str, ...]
    """The settings that an error shows, with their values."""
    broken: Callable[[RunConfig], bool]
    reason: str
    """Why it is refused."""
    remedy: str
    """What to do instead."""
