"""``RunView``: a run as read from its files, with its job if an installed package finds one. Does not import torch.

Every command that shows runs reads them here, during training and long after, and presents the view in its own way.
"""

import fcntl
import itertools
import json
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

from drawbar.errors import UserError
from drawbar.util.atomic_files import replacing
from drawbar.util.best_score import BEST_FILE, BestScore
from drawbar.util.registry import load_points
from drawbar.util.run_dir import LOCK_FILE, METRICS_FILE, STATUS_FILE, is_run_dir, newest_step

RunState = Literal["training", "complete", "stopped", "failed"]
STALE, SUBMITTED, UNKNOWN = "stale", "submitted", "unknown"
"""States of a run that it does not write itself: see ``RunView.state``."""
_TAIL = 2**18
"""How many bytes of ``metrics.jsonl`` are read, from its end: the newest lines."""
_RATES = ("train/tokens_per_second", "train/samples_per_second")
_LATEST = 1e11
"""Seconds since 1970: a line with a later time, or with NaN, is damaged."""
_QUIET = 120.0
"""Seconds without a new line in ``metrics.jsonl`` that are normal for any run."""


@dataclass(frozen=True)
class RunStatus:
    """``status.json``: the state that a run wrote last. A killed run stays at ``training``, with an old ``time``."""

    state: RunState
    """``complete``: all steps are done, or early stopping ended it. ``stopped``: it has saved, and can be resumed."""
    step: int
    total_steps: int
    time: float
    """In seconds since 1970."""
    started: float
    """When the process that wrote this began to train."""

    @property
    def summary(self) -> str:
        """How the log and reports describe the end of the training: ``stopped at step 60/500``."""
        return f"{self.state} at step {self.step}/{self.total_steps}"

    @staticmethod
    def read(run_dir: Path) -> "RunStatus | None":
        """Read the status of a run; None if it has not begun."""
        try:
            status = RunStatus(**json.loads((run_dir / STATUS_FILE).read_bytes()))
        except (OSError, ValueError, TypeError):
            return None
        return status if status.state in get_args(RunState) else None


def write_run_status(run_dir: Path, state: RunState, step: int, total_steps: int, started: float) -> None:
    """Write ``status.json``. Raises OSError if that fails; a run directory that was deleted is not made again."""
    status = RunStatus(state, step, total_steps, round(time.time(), 3), started)
    with replacing(run_dir / STATUS_FILE, one_writer=False, durable=False) as file:
        file.write(json.dumps(asdict(status)).encode() + b"\n")


@dataclass(frozen=True)
class Progress:
    """The progress of a run. A field is None if the run has not written it yet."""

    run_state: str | None = None
    """The state in ``status.json``: see :class:`RunStatus`."""
    step: int | None = None
    total: int | None = None
    """Steps of the whole run."""
    loss: float | None = None
    lr: float | None = None
    rates: Mapping[str, float | None] = field(default_factory=dict)
    """Speeds by metric name, in tokens or samples per second."""
    mfu: float | None = None
    peak_memory_gib: float | None = None
    seconds_left: float | None = None
    """From the newest line to the last step, at the mean pace of the newest lines since the run started or resumed."""
    evaluated_step: int | None = None
    """Step of the newest evaluation."""
    scores: Mapping[str, float] = field(default_factory=dict)
    """The scores of that evaluation, by their names in ``metrics.jsonl``."""
    written: float | None = None
    """When the newest line was written, or ``status.json`` if there is no line yet; in seconds since 1970."""
    patience: float = _QUIET
    """Seconds after ``written`` by which a run that is training should have written more."""
    checkpoint: int | None = None
    """Step of the newest checkpoint."""
    best: BestScore | None = None

    @property
    def step_of_total(self) -> str:
        """``20/500``, ``20`` if the total is unknown, or an empty string."""
        if self.step is None:
            return ""
        return f"{self.step}" if self.total is None else f"{self.step}/{self.total}"


@dataclass(frozen=True)
class RunJob:
    """A job that trains a run, with what the commands that list or follow runs show of it."""

    run: str
    """The run's name."""
    launcher: str
    number: str
    submitted: float
    """In seconds since 1970, as is ``ended``."""
    size: str
    """``2 nodes × 8 processes``."""
    state: str | None = None
    """Its current state, or how it ended; None if its launcher was not asked and the job did not record its end."""
    remarks: str = ""
    """Details beyond the state."""
    is_active: bool = True
    """Whether it is queued or running, as far as is known."""
    is_running: bool = False
    ended: float | None = None
    """Set only if the job itself recorded it."""


class JobLookup(ABC):
    """Finds the jobs that train runs elsewhere. A package registers one as an entry point, ``drawbar.job_lookups``."""

    @abstractmethod
    def of_folder(self, folder: Path) -> Sequence[RunJob]:
        """The jobs recorded in a run's folder, oldest first."""

    @abstractmethod
    def follow(self, what: str) -> tuple[Path, Callable[[], RunJob | None]] | None:
        """Find a run by the number of its job, or by the name or folder with which it was submitted: its folder, and a
        function that queries the current state of its job. None if there is no such job.

        Raises:
            UserError: the job trains several runs.
        """


@cache
def job_lookups() -> Sequence[JobLookup]:
    """The job lookups of the installed packages."""
    return [lookup() for _, lookup in load_points("drawbar.job_lookups", "job lookup")]


def recorded_jobs(folder: Path) -> list[RunJob]:
    """The jobs recorded in the files of a run, oldest first."""
    return [job for lookup in job_lookups() for job in lookup.of_folder(folder)]


@dataclass(frozen=True)
class RunView:
    """A run at the moment at which its files were read."""

    folder: Path
    progress: Progress
    lines: Sequence[Mapping[str, Any]] = ()
    """The newest lines of ``metrics.jsonl``."""
    job: RunJob | None = None
    """The job submitted last for the run."""
    host: str | None = None
    """The host on which rank 0 last trained the run."""
    is_held: bool = False
    """Whether a process holds the lock of the run directory. On some file systems, other hosts do not see locks."""
    is_gone: bool = False
    """Whether the process that trained the run last is known to have ended."""
    touched: float = 0.0
    """When the run last wrote its status or a metric, in seconds since 1970."""
    looked: float = field(default_factory=time.time)
    """When these files were read, in seconds since 1970."""

    @property
    def has_begun(self) -> bool:
        return self.progress.run_state is not None or self.progress.step is not None

    @property
    def state(self) -> str:
        """The state that the run wrote. ``stale`` if that is ``training``, but no process holds its directory, and its
        process is gone, its job has ended, or it has been silent for too long and no launcher reports it as running.
        For a run that has not begun: ``submitted``, or how its job ended; without a job, ``unknown``."""
        job, says = self.job, self.progress.run_state
        if says == "training" and not self.is_held:
            runs = job is not None and job.is_running
            has_ended = job is not None and not job.is_active and (job.ended or 0.0) >= self.touched
            if has_ended or (not runs and (self.is_gone or self.is_silent)):
                return STALE
        if self.has_begun or job is None:
            return says or UNKNOWN
        return SUBMITTED if job.is_active or job.state is None else job.state.lower()

    @property
    def is_silent(self) -> bool:
        """Whether the run would have written more by now if it were training."""
        return self.ago is not None and self.ago > self.progress.patience

    @property
    def ago(self) -> float | None:
        """Seconds since the newest line was written; None if there is none."""
        return None if self.progress.written is None else max(0.0, self.looked - self.progress.written)

    @property
    def is_active(self) -> bool:
        """Whether its job is queued or running, as far as is known."""
        return self.job is not None and self.job.is_active

    @property
    def is_over(self) -> bool:
        """Whether no process trains the run, and no job is about to."""
        return not (self.is_active or self.is_held or self.state == "training")

    @property
    def written(self) -> float | None:
        """When the run last wrote something, or its job was submitted; in seconds since 1970."""
        if self.progress.written is not None:
            return self.progress.written
        return None if self.job is None else self.job.submitted


def read_run(folder: Path, job: RunJob | None = None) -> RunView:
    """Read the files of a run.

    Args:
        job: its job, as its launcher has just reported it; by default, the newest one recorded in the files.
    """
    status, lines = RunStatus.read(folder), _newest_lines(folder)
    process, host = _last_process(folder)
    is_here = host == os.uname().nodename and Path("/proc/self").exists()  # otherwise, the process id says nothing
    return RunView(
        folder,
        _progress(folder, status, lines),
        lines,
        job or next(reversed(recorded_jobs(folder)), None),
        host,
        is_held=_is_locked(folder),
        is_gone=is_here and not Path(f"/proc/{process}").exists(),
        touched=max([0.0 if status is None else status.time, *(line["time"] for line in lines[-1:])]),
    )


def list_runs(folder: Path) -> list[RunView]:
    """The runs whose directories are in a folder, most recently written first.

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
    found = [read_run(entry) for entry in ([folder] if _is_run(folder) else entries) if _is_run(entry)]
    return sorted(found, key=lambda run: run.written or 0.0, reverse=True)


def rank_log(folder: Path, rank: int) -> Path:
    """The log file that a rank of the run writes itself."""
    return folder / "logs" / f"rank-{rank:04d}.log"


def parse_metrics_line(row: bytes) -> dict[str, Any] | None:
    """Parse a line of ``metrics.jsonl``; None if it is damaged or was cut off."""
    try:
        line = json.loads(row)
    except (ValueError, RecursionError):
        return None
    if not isinstance(line, dict) or not isinstance(line.get("step"), int):
        return None
    time = line.get("time")
    return line if isinstance(time, int | float) and abs(time) < _LATEST else None


def metric_value(value: object) -> float | None:
    """A value of ``metrics.jsonl`` as a number; None if it is not one. Non-finite numbers are stored as strings."""
    try:
        return float(value) if isinstance(value, int | float | str) else None
    except (ValueError, OverflowError):
        return None


def evaluation_scores(line: Mapping[str, Any]) -> dict[str, float]:
    """The scores in a line of ``metrics.jsonl``, by name; empty for a line about training."""
    found = {name: metric_value(value) for name, value in line.items() if name.startswith("eval/")}
    return {name: value for name, value in found.items() if value is not None}


def _is_run(folder: Path) -> bool:
    """Whether this is the directory of a run. If the run has not begun, it holds only the record of its job. (The
    folder of a sweep also holds such records, but of runs whose directories are elsewhere.)"""
    return is_run_dir(folder) or any(job.run == folder.name for job in recorded_jobs(folder))


def _newest_lines(folder: Path) -> list[dict[str, Any]]:
    """The newest complete lines of ``metrics.jsonl``."""
    try:
        with (folder / METRICS_FILE).open("rb") as stream:
            size = stream.seek(0, 2)
            stream.seek(max(0, size - _TAIL))
            rows = stream.read().split(b"\n")
    except OSError:
        return []
    parsed = map(parse_metrics_line, rows[0 if size <= _TAIL else 1 : -1])
    return [line for line in parsed if line is not None]


def _progress(folder: Path, status: RunStatus | None, lines: Sequence[Mapping[str, Any]]) -> Progress:
    trained = [line for line in lines if "train/loss" in line]
    last: Mapping[str, Any] = trained[-1] if trained else {}
    evaluated: Mapping[str, Any] = next((line for line in reversed(lines) if evaluation_scores(line)), {})
    newest: Mapping[str, Any] = lines[-1] if lines else {}
    step, written = newest.get("step"), newest.get("time")
    if status is not None and written is not None and status.time > written:
        step = status.step  # a run that stops between two lines writes its status
    elif status is not None and written is None:
        written = status.time
    times = [line["time"] for line in lines[-20:] if status is None or line["time"] >= status.started]
    gaps = [after - before for before, after in itertools.pairwise(times)]  # not those between two processes
    checkpoint = newest_step(folder)
    return Progress(
        run_state=None if status is None else status.state,
        step=step,
        total=None if status is None else status.total_steps,
        loss=metric_value(last.get("train/loss")),
        lr=metric_value(last.get("train/lr")),
        rates={name: metric_value(last.get(name)) for name in _RATES},
        mfu=metric_value(last.get("train/mfu")),
        peak_memory_gib=metric_value(last.get("train/peak_memory_gib")),
        seconds_left=None if status is None else _seconds_left(trained, status),
        evaluated_step=evaluated.get("step"),
        scores=evaluation_scores(evaluated),
        written=written,
        patience=max([_QUIET, *(10 * gap for gap in gaps)]),
        checkpoint=None if checkpoint < 0 else checkpoint,
        best=_best(folder / "checkpoints" / BEST_FILE),
    )


def _seconds_left(trained: Sequence[Mapping[str, Any]], status: RunStatus) -> float | None:
    """See ``Progress``. The first line after a start does not count: its steps include compilation and warm-up."""
    lines = [line for line in trained if line["time"] >= status.started]
    if len(lines) < 2 or lines[-1]["step"] <= lines[0]["step"]:
        return None
    pace = (lines[-1]["time"] - lines[0]["time"]) / (lines[-1]["step"] - lines[0]["step"])
    return max(0.0, pace * (status.total_steps - lines[-1]["step"]))


def _best(file: Path) -> BestScore | None:
    try:
        return BestScore.from_json(file.read_bytes())
    except (OSError, ValueError):
        return None


def _is_locked(folder: Path) -> bool:
    try:
        with (folder / LOCK_FILE).open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _last_process(folder: Path) -> tuple[str, str | None]:
    """Process id and host, from the lock file: ``process 12 on gpu7``."""
    try:
        text = (folder / LOCK_FILE).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "", None
    process, _, host = text.partition("\n")[0].rpartition(" on ")
    return process.removeprefix("process "), host or None
