"""``JobProcess``: the submitting process of an ssh job, which lives as long as the job; a file that it keeps locked
tells others of it."""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from drawbar.launch.job import FOLDER
from drawbar.launch.jobs.records import JobRecord


@dataclass(frozen=True)
class JobProcess:
    """The submitting process, as its file describes it."""

    pid: int
    machine: str
    """The name of the machine that it runs on."""
    nodes: tuple[str, ...] = ()
    """Where the job's ranks run."""

    @property
    def is_here(self) -> bool:
        return self.machine == os.uname().nodename


@contextmanager
def lock_job_file(run_dir: Path, number: str, nodes: tuple[str, ...] = ()) -> Iterator[None]:
    """Context in which this process holds the lock of a job's file, which marks the job as running. Raises OSError
    where the file cannot be written."""
    file = _file(run_dir, number)
    with file.open("w", encoding="utf-8") as stream:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(stream, fcntl.LOCK_EX)
        stream.write(json.dumps(asdict(JobProcess(os.getpid(), os.uname().nodename, nodes))) + "\n")
        stream.flush()
        yield


def find_process(record: JobRecord) -> JobProcess | None:
    """The process of a job, alive or not; None where none is written down."""
    try:
        values = json.loads(_file(Path(record.run_dir), record.number).read_text(encoding="utf-8"))
        return JobProcess(**{**values, "nodes": tuple(values["nodes"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None


def is_running(record: JobRecord) -> bool:
    """Whether the process of a job still has its file locked: the kernel releases the lock however the process ends."""
    try:
        with _file(Path(record.run_dir), record.number).open() as stream:
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # there is no file, or the file system has no locks
        process = find_process(record)
        return process is not None and process.is_here and Path(f"/proc/{process.pid}").exists()
    return False


def _file(run_dir: Path, number: str) -> Path:
    return run_dir / FOLDER / f"process-{number}.json"
