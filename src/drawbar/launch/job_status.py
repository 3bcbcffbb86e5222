"""How a job stands: what Slurm says of it, and what its script has left, as one answer."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from drawbar.errors import ExitCode, UserError
from drawbar.launch.queue import QueueEntry, ask, lost_nodes
from drawbar.launch.records import End, JobRecord

LOST = "LOST"
"""Slurm has forgotten the job, and its script could not say how it ended."""
STOPPED = "STOPPED"
"""The run has saved, and asks to be started again; but it is not in the queue. Slurm says FAILED."""
_DAY = 86400
_MEANINGS = {
    ExitCode.FAILED: "failed",
    ExitCode.WRONG_REQUEST: "the request is wrong",
    ExitCode.REQUEUE: "saved before it was stopped",
    ExitCode.INTERRUPTED: "interrupted after saving",
    137: "killed, perhaps for want of memory",
}


@dataclass(frozen=True)
class JobStatus:
    """One job, now."""

    record: JobRecord
    state: str
    """Slurm's word, or ``LOST`` or ``STOPPED``."""
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
    """In seconds since 1970, where the script said it."""

    @property
    def remarks(self) -> str:
        """All that there is to say besides the state."""
        times = f"{self.restarts} time{'s' * (self.restarts > 1)}"
        return "; ".join(filter(None, (self.detail, f"restarted {times}" if self.restarts else "")))

    @property
    def clock(self) -> str:
        """``0:05/1:00:00``: the time used and the limit, since the last restart."""
        return f"{self.used}/{self.limit}" if self.used and self.limit else self.used


def stand(records: Iterable[JobRecord]) -> list[JobStatus]:
    """How these jobs stand. Slurm is asked once for all.

    Raises:
        UserError: Slurm cannot be asked, and of some job no file tells the end.
    """
    wanted = list(records)
    ends = {record: End.read(record) for record in wanted}
    try:
        entries: Mapping[str, QueueEntry] = ask(record.number for record in wanted)
    except UserError:
        if None in ends.values():
            raise
        entries = {}
    found = []
    for record in wanted:
        # elements that were cancelled one by one before they began are shown under the array's number alone
        entry = entries.get(record.number) or entries.get(record.array)
        if entry is not None and entry.name != record.job_name:
            entry = None  # another cluster, or the numbers have begun again
        found.append(judge(record, entry, ends[record]))
    return found


def judge(record: JobRecord, entry: QueueEntry | None, end: End | None) -> JobStatus:
    """From both sources. What has ended may be put back into the queue, so Slurm has the last word as long as it knows
    the job."""
    if entry is not None and entry.is_active:
        return JobStatus(record, entry.state, _where(entry), True, entry.restarts, used=entry.used, limit=entry.limit)
    if entry is None and end is None:
        return JobStatus(record, LOST, "Slurm has forgotten it, and it left no exit code: killed, or its node was lost")
    code = _exit_code(entry, end)
    state = entry.state if entry is not None else "COMPLETED" if code == ExitCode.DONE else "FAILED"
    if state == "FAILED" and code in (ExitCode.REQUEUE, ExitCode.INTERRUPTED):
        state = STOPPED
    return JobStatus(
        record,
        state,
        "; ".join(filter(None, (_nodes_lost(entry), explain(code)))),
        restarts=end.restarts if end is not None else entry.restarts if entry is not None else 0,
        code=code,
        used=entry.used if entry is not None else "",
        limit=entry.limit if entry is not None else "",
        ended=end.time if end is not None else None,
    )


def explain(code: int) -> str:
    """``exit code 75: saved before it was stopped``; nothing of a good end."""
    if code == ExitCode.DONE:
        return ""
    meaning = _MEANINGS.get(code, f"killed by signal {code - 128}" if 128 < code < 160 else "")
    return f"exit code {code}" + (f": {meaning}" if meaning else "")


def is_recent(record: JobRecord, end: End | None, now: float) -> bool:
    """Whether a job was submitted, or ended, less than a day ago."""
    return now - max(record.time, end.time if end is not None else 0) < _DAY


def _where(entry: QueueEntry) -> str:
    if entry.state == "PENDING":
        start = "" if entry.start in ("N/A", "") else f", starts about {entry.start.replace('T', ' ')}"
        return f"waits: {entry.reason}{start}"
    return f"on {entry.nodes}" if entry.nodes else ""


def _exit_code(entry: QueueEntry | None, end: End | None) -> int:
    """That of the run; where the script was killed, what Slurm made of it. Never 0 for what did not complete."""
    if end is not None:
        return end.code
    assert entry is not None
    return entry.exit_code or (ExitCode.DONE if entry.state == "COMPLETED" else ExitCode.FAILED)


def _nodes_lost(entry: QueueEntry | None) -> str:
    if entry is None or entry.state != "NODE_FAIL":
        return ""
    lost = lost_nodes(entry.nodes)
    return f"lost {', '.join(lost)}" if lost else f"lost a node of {entry.nodes}, which answers again"
