"""``Rule``: one line of the table of settings that do not combine."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from drawbar.config.schema.run_config import RunConfig
from drawbar.errors import UserError


@dataclass(frozen=True)
class Rule:
    """A combination of settings that drawbar refuses."""

    name: str
    keys: tuple[str, ...]
    """The settings to show in the error, with their values."""
    broken: Callable[[RunConfig], bool]
    reason: str
    """Why it is refused."""
    remedy: str
    """What to do instead."""


def one_error(problems: Sequence[tuple[str, str]]) -> UserError:
    """Combine several problems, each with its remedy, into one error."""
    if len(problems) == 1:
        return UserError(problems[0][0], remedy=problems[0][1])
    lines = [f"{len(problems)} problems:", *(problem for problem, _ in problems)]
    remedies = "\n         ".join(remedy for _, remedy in problems)  # below one another, as UserError prints them
    return UserError("\n".join(lines), remedy=remedies)
