"""The runs of a folder, each with its state: from their files alone, quick, and without torch."""

import time
from dataclasses import dataclass
from pathlib import Path

from drawbar.errors import UserError
from drawbar.launch.jobs.job_status import status_from_files
from drawbar.launch.jobs.progress import LoggedProgress, read_progress
from drawbar.launch.jobs.records import JobRecord, read, run_file
from drawbar.launch.jobs.run_status import last_host
from drawbar.util.run_dir import is_run_dir

SUBMITTED = "submitted"
"""The state of a run that a job is to train, and that has not begun."""


@dataclass(frozen=True)
class ListedRun:
    """One run of a folder."""

    folder: Path
    state: str
    """See ``LoggedProgress.state``; of a run that has not begun, ``submitted``, or how its job ended."""
    progress: LoggedProgress
    job: JobRecord | None
    """The job that was submitted last for the run."""
    host: str | None
    """The host of rank 0 that trained the run last."""

    @property
    def written(self) -> float | None:
        """When the run last wrote something, or its job was submitted; in seconds since 1970."""
        if self.progress.written is not None:
            return self.progress.written
        return None if self.job is None else self.job.time

    @property
    def place(self) -> str:
        """``slurm 1234`` of a run that was submitted, otherwise the host."""
        if self.job is None:
            return self.host or ""
        return f"{self.job.launcher} {self.job.number}"


def list_runs(folder: Path) -> list[ListedRun]:
    """The runs whose directories lie in a folder; those that wrote something last come first.

    Raises:
        UserError: the folder cannot be read.
    """
    try:
        entries = sorted(folder.iterdir())
    except OSError as error:
        raise UserError(
            f"the folder of the runs cannot be read: {error.strerror}",
            where=str(folder),
            remedy="give the folder that holds your runs, which is the setting run.dir: `drawbar runs DIR`",
        ) from error
    if _is_run(folder):
        entries = [folder]
    now = time.time()
    found = [_read(entry, now) for entry in entries if _is_run(entry)]
    return sorted(found, key=lambda run: run.written or 0.0, reverse=True)


def _is_run(folder: Path) -> bool:
    """Whether this is the directory of a run, perhaps of one that has not begun: that holds only the record of its job.
    (The folder of a sweep holds such records, too, but of runs whose directories lie elsewhere.)"""
    return is_run_dir(folder) or any(record.run == folder.name for record in read(run_file(folder)))


def _read(folder: Path, now: float) -> ListedRun:
    progress, jobs = read_progress(folder), read(run_file(folder))
    state = progress.state(folder, now)
    if jobs and progress.run_state is None and progress.step is None:
        ended = status_from_files(jobs[-1])
        state = SUBMITTED if ended is None else ended.state.lower()
    return ListedRun(folder, state, progress, jobs[-1] if jobs else None, last_host(folder))
