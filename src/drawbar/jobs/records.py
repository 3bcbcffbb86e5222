"""The jobs: the stored record of each (``JobRecord``), how it ended (``JobEnd``), and its current status
(``JobStatus``).

The records make Slurm's accounting unnecessary. A line of JSON for each job, or element of an array: in
``launch/jobs.jsonl`` of its run, and in a list of the user's own, so that ``drawbar jobs`` works from any folder.
"""

import fcntl
import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from drawbar.config.io.source import run_folder
from drawbar.errors import ExitCode, UserError, nearest
from drawbar.util.atomic_files import write_atomically
from drawbar.util.run_dir import CONFIG_FILE, LAUNCH_FOLDER, is_run_dir, job_config, job_end

PENDING, RUNNING = "PENDING", "RUNNING"
COMPLETED, FAILED = "COMPLETED", "FAILED"
LOST = "LOST"
"""The launcher no longer knows the job, and the job left no end file."""
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
FILE = "jobs.jsonl"


@dataclass(frozen=True)
class JobRecord:
    """A job of one run."""

    number: str
    """The launcher's job id; for an element of a sweep with its index: ``7``, or ``7_0``."""
    time: float
    """When it was submitted, in seconds since 1970."""
    run: str
    run_dir: str
    """Absolute, as are all paths here."""
    workdir: str
    """The folder that it was submitted from; it may run in another (``Job.workdir``)."""
    log: str
    script: str
    """The file with what ``Launcher.render`` returned, in the job's folder (of a sweep: in the sweep's)."""
    nodes: int
    processes: int
    """On each node."""
    arguments: tuple[str, ...]
    """The arguments of ``drawbar submit``: a configuration, and settings."""
    launcher: str
    """By name."""
    profile: str | None = None
    """The cluster profile."""
    code: str | None = None
    """The version of the user's own code, if git tracks it."""
    snapshot: str | None = None
    """The copy of that code which the job uses."""
    program: str | None = None
    """The user's own script, if the user called that and not ``drawbar``."""
    sweep: str | None = None
    """For an element of a sweep: the sweep's name, which is also the job's name."""
    settings: tuple[str, ...] = ()
    """For an element of a sweep: the settings that only it has."""

    @property
    def array_id(self) -> str:
        """The id of the whole job array, or of the job."""
        return self.number if self.sweep is None else self.number.rpartition("_")[0]

    @property
    def job_name(self) -> str:
        """That of the sweep, or of the run."""
        return self.sweep or self.run

    @property
    def config_file(self) -> Path:
        """The whole configuration that was submitted."""
        return job_config(Path(self.run_dir), self.number)

    @property
    def end_file(self) -> Path:
        """The file that the job writes when it ends: see :class:`JobEnd`."""
        return job_end(Path(self.run_dir), self.number)


@dataclass(frozen=True)
class JobEnd:
    """How a job ended, as its own script or launcher says."""

    code: int
    time: float
    restarts: int = 0

    @staticmethod
    def read(record: JobRecord) -> "JobEnd | None":
        """None if it has not ended, or was killed together with the script or launcher that would have said so."""
        try:
            return JobEnd(**json.loads(record.end_file.read_text()))
        except (OSError, ValueError, TypeError):
            return None

    def write(self, file: Path) -> None:
        """Raises OSError if it cannot be written."""
        write_atomically(file, json.dumps(asdict(self)).encode() + b"\n")


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
        """All details besides the state."""
        times = f"{self.restarts} time{'s' * (self.restarts > 1)}"
        return "; ".join(filter(None, (self.detail, f"restarted {times}" if self.restarts else "")))

    @property
    def summary(self) -> str:
        """``FAILED exit code 1: failed``."""
        return f"{self.state} {self.remarks}".rstrip()

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
    """Poll until all jobs have ended. Returns those that have not ended after this many seconds."""
    end, left = time.monotonic() + seconds, list(records)
    while left and (left := [status.record for status in ask(left) if status.is_active]):
        if time.monotonic() > end:
            break
        time.sleep(_ASK_SECONDS)
    return left


def user_file() -> Path:
    """The list of all jobs of this user: ``$XDG_STATE_HOME/drawbar/jobs.jsonl``, by default in ``~/.local/state``."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "drawbar" / FILE


def run_file(run_dir: Path) -> Path:
    return run_dir / LAUNCH_FOLDER / FILE


def append_records(records: Iterable[JobRecord]) -> None:
    """Record a new job: with its runs, with the sweep that they belong to, and in the user's list.

    Raises:
        OSError: one of the files cannot be written.
    """
    kept = list(records)
    for record in kept:
        _append(run_file(Path(record.run_dir)), [record])
    if kept[0].sweep is not None:
        _append(Path(kept[0].script).with_name(FILE), kept)
    _append(user_file(), kept)


def read(file: Path) -> list[JobRecord]:
    """The records of a file, oldest first; lines that cannot be parsed as a record are left out."""
    try:
        lines = file.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return []
    return [record for line in lines if (record := _parse(line)) is not None]


def jobs_of(folder: Path) -> list[JobRecord]:
    """The jobs that the files of a folder record, oldest first: those of a run, whose folder may have been moved since,
    or of a sweep, whose runs lie elsewhere."""
    found = read(run_file(folder))
    return [replace(record, run_dir=str(folder)) if record.run == folder.name else record for record in found]


def find_run(what: str) -> tuple[Path, list[JobRecord]]:
    """The folder and the newest job that a number, a run's folder or a run's name refers to. The job has several
    records, and the folder is that of the first, for a whole sweep; and none for a run that was never submitted.

    Raises:
        UserError: there is none; or the name is that of runs of several projects, and none was submitted from here.
    """
    known, folder = read(user_file()), Path(what).absolute()
    numbered = [record for record in known if what in (record.number, record.array_id)]
    found = _newest(numbered) or _newest(jobs_of(folder))
    if not found and is_run_dir(folder):
        return folder, []
    found = found or _newest(_of_one_project(known, what))
    if found:
        return Path(found[0].run_dir), found
    if (folder / CONFIG_FILE).is_file():
        return run_folder(what), []  # raises: it is the folder of a project
    names = {name for record in known for name in (record.run, record.sweep, record.number) if name}
    guess = nearest(what, sorted(names))
    raise UserError(
        f"no job of {what!r} is known",
        where=str(user_file()),
        remedy=f"did you mean {guess}?" if guess else "`drawbar jobs --all` lists your jobs; or give a run's folder",
    )


def find(what: str) -> list[JobRecord]:
    """The job of ``find_run``. Raises UserError if the run was never submitted, too: no launcher knows of it."""
    folder, found = find_run(what)
    if not found:
        raise UserError(
            f"{what} has no job: it was trained without `drawbar submit`",
            where=str(folder),
            remedy="`drawbar train CONFIG`, with the configuration of the run, resumes from its newest checkpoint; "
            "Ctrl-C where it trains stops it",
        )
    return found


def _of_one_project(records: list[JobRecord], name: str) -> list[JobRecord]:
    """The records of the runs and sweeps of this name that were submitted from the current folder; where there are
    none, all of this name, if these were submitted from one folder.

    Raises:
        UserError: they were submitted from several: the name alone could mean another project's run.
    """
    named = [record for record in records if name in (record.run, record.sweep)]
    here = [record for record in named if record.workdir == os.getcwd()]
    folders = list(dict.fromkeys(record.workdir for record in named))
    if here or len(folders) <= 1:
        return here or named
    raise UserError(
        f"runs of the name {name!r} were submitted from several folders: {', '.join(folders)}",
        where=str(user_file()),
        remedy="go to one of these folders, or give the run's folder or the number of the job (`drawbar jobs --all`)",
    )


def _newest(records: list[JobRecord]) -> list[JobRecord]:
    """The records of the job submitted last: job numbers are reused, after years or on other clusters."""
    return [record for record in records if (record.array_id, record.time) == (records[-1].array_id, records[-1].time)]


def _append(file: Path, records: list[JobRecord]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8", errors="surrogateescape") as lines:
        fcntl.flock(lines, fcntl.LOCK_EX)  # appending is not atomic on network filesystems
        lines.writelines(json.dumps(asdict(record)) + "\n" for record in records)


def _parse(line: str) -> JobRecord | None:
    try:
        values = json.loads(line)
        known = {field.name for field in fields(JobRecord)}
        record = JobRecord(**{name: value for name, value in values.items() if name in known})
    except (ValueError, TypeError, AttributeError):
        return None
    return replace(record, arguments=tuple(record.arguments), settings=tuple(record.settings))
