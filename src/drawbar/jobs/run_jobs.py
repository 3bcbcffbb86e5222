"""What the commands that show runs know about jobs."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from drawbar.errors import UserError
from drawbar.jobs.launchers import FollowedJobs
from drawbar.jobs.records import RUNNING, JobRecord, JobStatus, find_run, jobs_of, status_from_files
from drawbar.tracking.run_view import JobLookup, RunJob


def run_job(record: JobRecord, status: JobStatus | None) -> RunJob:
    """A job's record, and its ``status`` as its launcher, or its files, have just reported it."""
    size = f"{record.nodes} node{'s' * (record.nodes != 1)} × {record.processes} processes"
    job = RunJob(record.run, record.launcher, record.number, record.time, size)
    if status is None:
        return job
    is_running = status.state == RUNNING
    return replace(job, state=status.state, remarks=status.remarks, is_active=status.is_active, is_running=is_running,
                   ended=status.ended)  # fmt: skip


class RecordedJobs(JobLookup):
    """The jobs that ``drawbar submit`` has recorded."""

    def of_folder(self, folder: Path) -> Sequence[RunJob]:
        return [run_job(record, status_from_files(record)) for record in jobs_of(folder)]

    def follow(self, what: str) -> tuple[Path, Callable[[], RunJob | None]] | None:
        try:
            folder, records = find_run(what)
        except UserError:
            return None
        if len(records) > 1:
            raise UserError(
                f"{what} is a sweep of {len(records)} runs",
                where="RUN",
                remedy=f"name one of them, such as {records[0].run_dir}; `drawbar runs` lists them side by side",
            )
        jobs = FollowedJobs(records)

        def ask() -> RunJob | None:
            return next((run_job(status.record, status) for status in jobs.ask()), None)

        return (folder, ask) if records else None
