"""The status of Slurm jobs, from Slurm's queue and the end files of their scripts."""

from collections.abc import Sequence

from drawbar.errors import ExitCode
from drawbar.launch.jobs.job_status import (
    COMPLETED,
    FAILED,
    LOST,
    PENDING,
    STOPPED,
    JobStatus,
    explain,
    state_of_code,
    status_from_files,
)
from drawbar.launch.jobs.records import JobEnd, JobRecord
from drawbar.launch.slurm.queue import QueueEntry, lost_nodes, read_queue


def slurm_status(records: Sequence[JobRecord]) -> list[JobStatus]:
    """The status of these jobs. Slurm is asked once for all.

    Raises:
        UserError: Slurm cannot be asked.
    """
    entries = read_queue(record.number for record in records)
    found = []
    for record in records:
        # elements that were cancelled one by one before they began are shown under the array's number alone
        entry = entries.get(record.number) or entries.get(record.array_id)
        if entry is not None and entry.name != record.job_name:
            entry = None  # it is of another job: on another cluster, or the numbers have begun again
        found.append(judge_job(record, entry, JobEnd.read(record)))
    return found


def judge_job(record: JobRecord, entry: QueueEntry | None, end: JobEnd | None) -> JobStatus:
    """The status of a job from Slurm's entry and the job's own end file. An ended job may go back into the queue, so
    Slurm has the last word as long as it knows the job."""
    if entry is None:
        gone = "Slurm has forgotten it, and it left no exit code: killed, or its node was lost"
        return status_from_files(record) or JobStatus(record, LOST, gone)
    if entry.is_active:
        return JobStatus(record, entry.state, _where(entry), True, entry.restarts, used=entry.used, limit=entry.limit)
    code = _exit_code(entry, end)
    return JobStatus(
        record,
        STOPPED if entry.state == FAILED and state_of_code(code) == STOPPED else entry.state,
        "; ".join(filter(None, (_nodes_lost(entry), explain(code)))),
        restarts=entry.restarts if end is None else end.restarts,
        code=code,
        used=entry.used,
        limit=entry.limit,
        ended=None if end is None else end.time,
    )


def _where(entry: QueueEntry) -> str:
    if entry.state == PENDING:
        start = "" if entry.start in ("N/A", "") else f", starts about {entry.start.replace('T', ' ')}"
        return f"waits: {entry.reason}{start}"
    return f"on {entry.nodes}" if entry.nodes else ""


def _exit_code(entry: QueueEntry, end: JobEnd | None) -> int:
    """The run's exit code. If the script was killed, Slurm's, or 1 if Slurm says 0 though the job did not complete."""
    if end is not None:
        return end.code
    return entry.exit_code or (ExitCode.DONE if entry.state == COMPLETED else ExitCode.FAILED)


def _nodes_lost(entry: QueueEntry) -> str:
    if entry.state != "NODE_FAIL":
        return ""
    lost = lost_nodes(entry.nodes)
    return f"lost {', '.join(lost)}" if lost else f"lost a node of {entry.nodes}, which answers again"
