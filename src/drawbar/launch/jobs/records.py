"""``JobRecord``: the stored record of each submitted job, which makes Slurm's accounting unnecessary.

A line of JSON for each job, or element of an array: in ``launch/jobs.jsonl`` of its run, and in a list of the user's
own, so that ``drawbar jobs`` works from any folder.
"""

import fcntl
import json
import os
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from drawbar.config.io.source import run_folder
from drawbar.errors import UserError, nearest
from drawbar.launch.job import FOLDER, config_file, end_file
from drawbar.util.atomic_files import write_atomically
from drawbar.util.run_dir import CONFIG_FILE

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
    """What ``drawbar submit`` was told: a configuration, and settings."""
    launcher: str
    """By name."""
    profile: str | None = None
    """The cluster profile."""
    code: str | None = None
    """The version of the user's own code, where git knows it."""
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
        return config_file(Path(self.run_dir), self.number)

    @property
    def end_file(self) -> Path:
        """The file that the job writes when it ends: see :class:`JobEnd`."""
        return end_file(Path(self.run_dir), self.number)


@dataclass(frozen=True)
class JobEnd:
    """How a job ended, as its own script or launcher says."""

    code: int
    time: float
    restarts: int = 0

    @staticmethod
    def read(record: JobRecord) -> "JobEnd | None":
        """None where it has not ended, or was killed together with the script or launcher that would have said so."""
        try:
            return JobEnd(**json.loads(record.end_file.read_text()))
        except (OSError, ValueError, TypeError):
            return None

    def write(self, file: Path) -> None:
        """Raises OSError where it cannot be written."""
        write_atomically(file, json.dumps(asdict(self)).encode() + b"\n")


class NotSubmitted(UserError):
    """A run that was trained without ``drawbar submit``: no launcher knows of it."""

    def __init__(self, what: str, run_dir: Path) -> None:
        super().__init__(
            f"{what} has no job: it was trained without `drawbar submit`",
            where=str(run_dir),
            remedy="`drawbar train CONFIG`, with the configuration of the run, goes on from its newest checkpoint; "
            "Ctrl-C where it trains stops it",
        )
        self.run_dir = run_dir


def user_file() -> Path:
    """The list of all jobs of this user: ``$XDG_STATE_HOME/drawbar/jobs.jsonl``, by default in ``~/.local/state``."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "drawbar" / FILE


def run_file(run_dir: Path) -> Path:
    return run_dir / FOLDER / FILE


def append_records(records: Iterable[JobRecord]) -> None:
    """Write down a new job: with its runs, with the sweep that they belong to, and in the user's list.

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


def find(what: str) -> list[JobRecord]:
    """The newest job that a number, a run's folder or a run's name stands for: several records for a whole sweep.

    Raises:
        NotSubmitted: it is the folder of a run that no job was submitted for.
        UserError: there is none; or the name is that of runs of several projects, and none was submitted from here.
    """
    known = read(user_file())
    if found := _newest(known, lambda record: what in (record.number, record.array_id)):
        return found
    folder = Path(what).absolute()
    if found := _newest(read(run_file(folder)), lambda record: True):
        # the run's folder may have been moved; a sweep's folder has records of runs that lie elsewhere
        return [replace(record, run_dir=str(folder)) if record.run == folder.name else record for record in found]
    if found := _newest(_of_one_project(known, what), lambda record: True):
        return found
    if (folder / CONFIG_FILE).is_file():
        raise NotSubmitted(what, run_folder(what))
    names = {name for record in known for name in (record.run, record.sweep, record.number) if name}
    guess = nearest(what, sorted(names))
    raise UserError(
        f"no job of {what!r} is known",
        where=str(user_file()),
        remedy=f"did you mean {guess}?" if guess else "`drawbar jobs --all` lists your jobs; or give a run's folder",
    )


def _of_one_project(records: list[JobRecord], name: str) -> list[JobRecord]:
    """The records of the runs and sweeps of this name that were submitted from the current folder; where there are
    none, all of this name, if these were submitted from one folder.

    Raises:
        UserError: they were submitted from several: the name alone could stand for another project's run.
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


def _newest(records: list[JobRecord], fits: Callable[[JobRecord], bool]) -> list[JobRecord]:
    """The matching records of the job submitted last: job numbers are reused, after years or on other clusters."""
    fitting = [record for record in records if fits(record)]
    if not fitting:
        return []
    last = fitting[-1]
    return [record for record in fitting if (record.array_id, record.time) == (last.array_id, last.time)]


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
