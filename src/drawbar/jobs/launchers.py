"""The launchers by name, all of them entry points ``drawbar.launchers``: those of drawbar and of other packages."""

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from drawbar.config.io.user_modules import find_class
from drawbar.errors import UserError
from drawbar.jobs.launcher import Launcher
from drawbar.jobs.records import UNKNOWN, JobEnd, JobRecord, JobStatus, status_from_files
from drawbar.util.registry import Registry

POLL_SECONDS = 0.5
"""Between two looks at the files of a job that is followed."""
ASK_SECONDS = 5.0
"""Between two questions to a scheduler, whose controller serves all users."""
PATIENCE = 300.0
"""Seconds that a scheduler may be out of reach while somebody follows a job."""
LAUNCHERS: Registry[type[Launcher]] = Registry("launcher", "drawbar.launchers")


def get_launcher(name: str, where: str) -> Launcher:
    """A launcher by its name; errors say that ``where`` names it. Raises UserError if there is none."""
    return find_class(LAUNCHERS, Launcher, name, where)()


def launcher_of(record: JobRecord) -> Launcher:
    """The launcher that a job was submitted by. Raises UserError if it is no longer installed."""
    return get_launcher(record.launcher, f"the record of job {record.number}")


def ask_status(records: Iterable[JobRecord]) -> list[JobStatus]:
    """The status of these jobs, in their order. Each launcher is asked once for all of its jobs.

    Raises:
        UserError: a launcher cannot tell, and some of its jobs have no file that says how they ended.
    """
    statuses, errors = ask_status_where_possible(records)
    if errors:
        raise errors[0]
    return statuses


def ask_status_where_possible(records: Iterable[JobRecord]) -> tuple[list[JobStatus], list[UserError]]:
    """The status of these jobs, in their order, and the errors of launchers that cannot tell: those of their jobs that
    have no end file are ``UNKNOWN``, and may be active."""
    wanted, errors = list(records), []
    found: dict[JobRecord, JobStatus] = {}
    for name in dict.fromkeys(record.launcher for record in wanted):
        own = [record for record in wanted if record.launcher == name]
        try:
            statuses = launcher_of(own[0]).status(own)
        except UserError as error:
            ended = [status_from_files(record) for record in own]
            if None in ended:
                errors.append(error)
            statuses = [
                status or JobStatus(record, UNKNOWN, is_active=True) for status, record in zip(ended, own, strict=True)
            ]
        found.update(zip(own, statuses, strict=True))
    return [found[record] for record in wanted], errors


@dataclass
class FollowedJobs:
    """Jobs that somebody follows. Their launchers are asked every few seconds, and at once when a job writes how it
    ended."""

    records: Sequence[JobRecord]
    statuses: Sequence[JobStatus] = ()
    """The newest answer."""
    trouble: str = ""
    """Why the newest question had no answer."""
    _ends: Sequence[JobEnd | None] = ()
    _asked: float = -math.inf
    _answered: float = field(default_factory=time.monotonic)

    def ask(self) -> Sequence[JobStatus]:
        """The newest answer; none before the first one. Raises UserError if there has been none for ``PATIENCE``
        seconds, or the scheduler's commands are not installed here."""
        now, ends = time.monotonic(), [JobEnd.read(record) for record in self.records]
        if now - self._asked < ASK_SECONDS and ends == self._ends:
            return self.statuses
        self._asked, self._ends = now, ends
        try:
            self.statuses, self.trouble, self._answered = ask_status(self.records), "", now
        except UserError as error:
            if now - self._answered > PATIENCE or isinstance(error.__cause__, FileNotFoundError):
                raise
            self.trouble = error.what
        return self.statuses

    def drop_ended(self) -> list[JobStatus]:
        """Stop following those that have ended. Returns how they ended."""
        ended = [status for status in self.statuses if not status.is_active]
        self.statuses = [status for status in self.statuses if status.is_active]
        self.records = [record for record in self.records if record not in [status.record for status in ended]]
        return ended
