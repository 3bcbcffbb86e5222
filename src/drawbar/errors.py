"""Errors that a user can act on, and the exit codes of every drawbar command.

A :class:`UserError` is drawbar's only exception that a command prints without a traceback: it says what is wrong,
where, and what to do about it.
"""

import difflib
import re
from collections.abc import Iterable
from enum import IntEnum

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def visible(text: str) -> str:
    """The text with control characters as escapes (``\\x1b``), except tabs and line breaks: a terminal would obey those
    in data, file names and exceptions."""
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


class ExitCode(IntEnum):
    """What a drawbar process says to the shell or the scheduler that started it."""

    DONE = 0
    FAILED = 1
    WRONG_REQUEST = 2
    REQUEUE = 75
    """Saved, or stopped before there was anything to save; asks to be started again (EX_TEMPFAIL)."""
    INTERRUPTED = 130
    """Ctrl-C; a run that had begun to train was saved first."""


EVERY_RANK = "every rank"
"""``UserError.origin`` of an error that all ranks report, and none has caused alone."""


class UserError(Exception):
    """An error with a cause, and a remedy that a user can act on.

    Args:
        what: what is wrong, in one sentence or a short block of lines.
        where: the file, line or key that it concerns.
        remedy: what to do about it.
        exit_code: 2 for a wrong request; 1 where the request was valid and failed later (a full disk, a diverged loss).

    Attributes:
        origin: the rank that it happened on, and what that was doing, if it is not the one that reports the error; or
            ``EVERY_RANK``.
    """

    origin = ""

    def __init__(
        self,
        what: str,
        *,
        where: str | None = None,
        remedy: str | None = None,
        exit_code: ExitCode = ExitCode.WRONG_REQUEST,
    ) -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.remedy = remedy
        self.exit_code = exit_code

    def __str__(self) -> str:
        lines = [self.what]
        if self.where:
            lines.append(f"  where: {self.where}")
        if self.remedy:
            lines.append(f"  fix:   {self.remedy}")
        return visible("\n".join(lines))


def nearest(word: str, options: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The first option that ends in an underscore and ``word``, else the one spelled most like ``word``; None where
    nothing comes close.

    Args:
        cutoff: the least similarity that counts, from 0 to 1, as ``difflib`` measures it.
    """
    known = list(options)
    named = [option for option in known if option.endswith(f"_{word}")]
    matches = named or difflib.get_close_matches(word, known, n=1, cutoff=cutoff)
    return matches[0] if matches else None
