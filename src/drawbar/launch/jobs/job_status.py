"""``JobStatus``: the state of a job as one answer, whatever launcher runs it."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from drawbar.errors import ExitCode
from drawbar.launch.jobs.records import JobEnd, JobRecord

PENDING, RUNNING = "PENDING", "RUNNING"
COMPLETED, FAILED = "COMPLETED", "FAILED"
LOST = "LOST"
"""The launcher does not know the job any more, and the job left no end file."""
UNKNOWN = "UNKNOWN"
"""The launcher cannot be asked here, and the job left no end file."""
STOPPED = "STOPPED"
"""Interrupted: the run has saved what there was and can be started again, but is in no queue. Slurm says FAILED."""
_DAY = 86400
_ASK_SECONDS = 1.0
_MEANINGS = {
    ExitCode.FAILED: "failed",
    ExitCode.WRONG_REQUEST: "the request is wrong",
    ExitCode.REQUEUE: "stopped; what there was to save is saved",
    ExitCode.INTERRUPTED: "interrupted; what there was to save is saved",
    137: "killed, perhaps for want of memory",
}


@dataclass(frozen=True)
class JobStatus:
    """One job, now."""

    record: JobRecord
    state: str
    """One of the words above, or the launcher's own."""
    detail: str = ""
    """Why it waits, where it runs, how it ended."""
    is_active: bool = False
    """Whether it waits or runs, or is about to."""
    restarts: int = 0
    code: int | None = None
    """Exit code of a job that has ended."""
    used: str = ""
    limit: str = ""
    ended: float | None = None
    """In seconds since 1970, where the job itself said it."""

    @property
    def remarks(self) -> str:
        """All that there is to say besides the state."""
        times = f"{self.restarts} time{'s' * (self.restarts > 1)}"
        return "; ".join(filter(None, (self.detail, f"restarted {times}" if self.restarts else "")))

    @property
    def clock(self) -> str:
        """``0:05/1:00:00``: the time used and the limit, since the last restart."""
        return f"{self.used}/{self.limit}" if self.used and self.limit else self.used


def status_from_files(record: JobRecord) -> JobStatus | None:
    """The status of a job that left an end file; else None."""
    end = JobEnd.read(record)
    if end is None:
        return None
    state = state_of_code(end.code)
    return JobStatus(record, state, explain(end.code), restarts=end.restarts, code=end.code, ended=end.time)


def state_of_code(code: int) -> str:
    """The state of a job that has ended with this exit code."""
    if code == ExitCode.DONE:
        return COMPLETED
    return STOPPED if code in (ExitCode.REQUEUE, ExitCode.INTERRUPTED) else FAILED


def explain(code: int) -> str:
    """``exit code 75: stopped; what there was to save is saved``; an empty text for exit code 0."""
    if code == ExitCode.DONE:
        return ""
    meaning = _MEANINGS.get(code, f"killed by signal {code - 128}" if 128 < code < 160 else "")
    return f"exit code {code}" + (f": {meaning}" if meaning else "")


def is_recent(record: JobRecord, end: JobEnd | None, now: float) -> bool:
    """Whether a job was submitted, or ended, less than a day ago."""
    return now - max(record.time, end.time if end is not None else 0) < _DAY


def wait_for_ends(
    ask: Callable[[Sequence[JobRecord]], list[JobStatus]], records: Sequence[JobRecord], seconds: float
) -> list[JobRecord]:
    """Ask again and again until all jobs have ended. Returns those that have not ended after so many seconds."""
    end, left = time.monotonic() + seconds, list(records)
    while left and (left := [status.record for status in ask(left) if status.is_active]):
        if time.monotonic() > end:
            break
        time.sleep(_ASK_SECONDS)
    return left
