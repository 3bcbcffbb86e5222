"""A run's log as events: when it started, resumed, was stopped or got a signal, and what went wrong."""

import re
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from drawbar.launch.jobs.job_status import explain
from drawbar.launch.jobs.progress import LoggedProgress
from drawbar.launch.jobs.records import JobEnd, JobRecord, read, run_file
from drawbar.launch.jobs.run_status import RunStatus

LOG_FILE = "logs/rank-0000.log"
MOST_EVENTS = 300
"""Events of a run that are kept: the newest."""
_MOST_LINES = 30
"""Lines of one message that are kept: most messages have one, an error with its traceback more."""

START = "start"
STRATEGY, PACKED, TRAIN = "strategy: ", "packed: ", "train: "
OPENED = "opened"
"""A command such as ``drawbar eval`` opened a checkpoint of the run."""
_RECORD = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),(\d{3}) ([A-Z]+) (.*)", re.DOTALL)
_KINDS = (
    (STRATEGY, START),
    ("checkpoint: ", OPENED),
    ("resumed from ", "resume"),
    ("saved by ", "resized"),  # "saved by 4 processes, resumed by 8"
    ("early stop: ", "early stop"),
    ("stopped at step ", "stopped"),
    ("complete at step ", "complete"),
    ("train.steps was ", "change"),
    ("train.epochs was ", "change"),
    ("the evaluation of step ", "evaluation given up"),
)
"""Messages below the level of a warning that are events: how they begin, and the kind of the event, which the report
shows. "resized": the number of processes changed. "stopped": the training ended before its last step."""
_KEPT = {PACKED: " rows", TRAIN: " tokens"}
"""Messages that other parts of a report need: how they begin, and how they end."""
_ENDS = ("stopped at step ", "complete at step ")
_SAVING_AT_SIGNAL = re.compile(r"SIG[A-Z0-9]+: saving ")
_RESUMED = re.compile(r"resumed from .* at step (\d+)$")


@dataclass(frozen=True)
class RunEvent:
    """Something that happened to a run."""

    time: float
    """In seconds since 1970."""
    kind: str
    text: str


@dataclass
class RunHistory:
    """What the log and the records of the launchers tell of a run."""

    events: list[RunEvent] = field(default_factory=list)
    """Oldest first."""
    left_out: int = 0
    """Older events, which were not kept."""
    resumed: set[int] = field(default_factory=set)
    """Steps that the run was resumed at."""
    resume_times: list[float] = field(default_factory=list)
    """When it was resumed, in seconds since 1970."""
    end_times: list[float] = field(default_factory=list)
    """When a process stopped or completed the training. One that was killed has not logged its end."""
    messages: dict[str, str] = field(default_factory=dict)
    """Key of ``_KEPT`` → the rest of the newest message that begins with this key and ends with its value."""

    @property
    def strategy(self) -> str | None:
        """What the newest start of the training said of it: ``fsdp (8 processes; …)``."""
        starts = [event.text for event in self.events if event.kind == START]
        return starts[-1].removeprefix(STRATEGY) if starts else None


def read_history(run_dir: Path) -> RunHistory:
    """Read a run's history. Raises OSError where the log is there, and cannot be read."""
    found = RunHistory()
    kept: deque[RunEvent] = deque(maxlen=MOST_EVENTS)
    total = 0
    for when, level, text in _log_records(run_dir / LOG_FILE):
        if match := _RESUMED.match(text):
            found.resumed.add(int(match.group(1)))
            found.resume_times.append(when)
        elif text.startswith(_ENDS):
            found.end_times.append(when)
        for beginning, ending in _KEPT.items():
            if text.startswith(beginning) and text.endswith(ending):
                found.messages[beginning] = text.removeprefix(beginning)
        kind = _kind(level, text)
        if kind is not None:
            kept.append(RunEvent(when, kind, text))
            total += 1
    found.left_out = total - len(kept)
    end = [event for event in _end(run_dir) if event.text not in {logged.text for logged in kept}]
    found.events = sorted([*kept, *_job_events(run_dir), *end], key=lambda event: event.time)
    return found


def _log_records(file: Path) -> Iterator[tuple[float, str, str]]:
    """Time, level and text of each record; the lines that follow its first one are part of the text."""
    try:
        stream = file.open(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return
    with stream:
        record: tuple[float, str] | None = None
        lines: list[str] = []
        for line in stream:
            match = _RECORD.match(line)
            if match is None:
                if len(lines) < _MOST_LINES:
                    lines.append(line.rstrip("\n"))
                continue
            if record is not None:
                yield *record, "\n".join(lines)
            stamp, thousandths, level, text = match.groups()
            record, lines = (_seconds(stamp) + int(thousandths) / 1000, level), [text.rstrip("\n")]
        if record is not None:
            yield *record, "\n".join(lines)


def _seconds(stamp: str) -> float:
    """Seconds since 1970 of a time of the log, taken as this machine's local time. A stamp of no real day gives 0."""
    try:
        return time.mktime(time.strptime(stamp, "%Y-%m-%d %H:%M:%S"))
    except (ValueError, OverflowError):
        return 0.0


def _kind(level: str, text: str) -> str | None:
    if _SAVING_AT_SIGNAL.match(text):
        return "signal"
    if level in ("WARNING", "ERROR", "CRITICAL"):
        return level.lower()
    return next((kind for beginning, kind in _KINDS if text.startswith(beginning)), None)


def _job_events(run_dir: Path) -> Iterator[RunEvent]:
    for record in read(run_file(run_dir)):
        size = f"{record.nodes} node{'s' * (record.nodes != 1)} × {record.processes} processes"
        yield RunEvent(record.time, "submitted", f"{record.launcher} job {record.number}: {size}")
        end = JobEnd.read(record)
        if end is not None:
            yield RunEvent(end.time, "job ended", _describe_end(record, end))


def _describe_end(record: JobRecord, end: JobEnd) -> str:
    restarts = f", after {end.restarts} restart{'s' * (end.restarts != 1)}" if end.restarts else ""
    return f"{record.launcher} job {record.number}: {explain(end.code) or 'done'}{restarts}"


def _end(run_dir: Path) -> Iterator[RunEvent]:
    """The end of the run by its status file: a run that failed has not logged it."""
    status = RunStatus.read(run_dir)
    if status is not None and status.state != "training":
        progress = LoggedProgress(step=status.step, total=status.total_steps)
        yield RunEvent(status.time, status.state, progress.ended_as(status.state))
