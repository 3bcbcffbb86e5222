"""What happened to a run, and what it measured: its log and the records of its jobs as events (``RunHistory``), its
``metrics.jsonl`` as curves, and where the time between its lines went (``RunMetrics``)."""

import math
import re
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drawbar.tracking.run_view import RunStatus, metric_value, parse_metrics_line, rank_log, recorded_jobs
from drawbar.util.run_dir import METRICS_FILE

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
MOST_CURVES = 80
"""Names of metrics that are read; a user's callbacks may log any number."""
TRAINING = "training steps"
DATA_WAIT = "waiting for data"
EVALUATION = "evaluations, each with the save before it"
MIXED = "steps and an evaluation, between two lines of metrics.jsonl"
RESTART = "stopped, and started again"


@dataclass(frozen=True)
class RunEvent:
    """Something that happened to a run."""

    time: float
    """In seconds since 1970."""
    kind: str
    text: str


@dataclass
class RunHistory:
    """What the log and the records of the launchers say about a run."""

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
    """Read a run's history. Raises OSError if the log exists, and cannot be read."""
    found = RunHistory()
    kept: deque[RunEvent] = deque(maxlen=MOST_EVENTS)
    total = 0
    for when, level, text in _log_records(rank_log(run_dir, 0)):
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
    """Seconds since 1970 of a time of the log, taken as this machine's local time. An impossible date gives 0."""
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
    for job in recorded_jobs(run_dir):
        yield RunEvent(job.submitted, "submitted", f"{job.launcher} job {job.number}: {job.size}")
        if job.ended is not None:
            yield RunEvent(job.ended, "job ended", f"{job.launcher} job {job.number}: {job.remarks or 'done'}")


def _end(run_dir: Path) -> Iterator[RunEvent]:
    """The end of the run by its status file: a run that failed has not logged it."""
    status = RunStatus.read(run_dir)
    if status is not None and status.state != "training":
        yield RunEvent(status.time, status.state, status.summary)


@dataclass
class _Bucket:
    """The values of some consecutive steps: the smallest and the largest finite one, each with its step."""

    low: float = math.inf
    low_step: int = 0
    high: float = -math.inf
    high_step: int = 0
    gap: int | None = None
    """The first step whose value is not a finite number."""

    def merge(self, other: "_Bucket") -> None:
        if other.low < self.low:
            self.low, self.low_step = other.low, other.low_step
        if other.high > self.high:
            self.high, self.high_step = other.high, other.high_step
        self.gap = min((gap for gap in (self.gap, other.gap) if gap is not None), default=None)

    def points(self) -> list[tuple[int, float | None]]:
        found: dict[int, float | None] = {} if self.gap is None else {self.gap: None}
        if self.low <= self.high:
            found |= {self.low_step: self.low, self.high_step: self.high}
        return sorted(found.items(), key=lambda point: point[0])


@dataclass
class Curve:
    """One value by step. Of each bucket of steps the smallest and the largest value are kept, so that no spike is
    lost; a bucket is one step wide at first, and all become twice as wide whenever there are too many."""

    max_buckets: int = 500
    count: int = 0
    """Values so far."""
    first: float = math.nan
    last: float = math.nan
    not_finite: int = 0
    """How many values are not finite numbers."""
    _width: int = 1
    """Steps of a bucket."""
    _buckets: dict[int, _Bucket] = field(default_factory=dict)

    @property
    def is_thinned(self) -> bool:
        return self._width > 1

    @property
    def lowest(self) -> tuple[int, float] | None:
        """Step and value of the smallest finite value."""
        bucket = min(self._buckets.values(), key=lambda found: found.low, default=None)
        return None if bucket is None or bucket.low == math.inf else (bucket.low_step, bucket.low)

    @property
    def highest(self) -> tuple[int, float] | None:
        """Step and value of the largest finite value."""
        bucket = max(self._buckets.values(), key=lambda found: found.high, default=None)
        return None if bucket is None or bucket.high == -math.inf else (bucket.high_step, bucket.high)

    def add(self, step: int, value: float) -> None:
        """Add a value. Steps may come in any order, and more than once."""
        if self.count == 0:
            self.first = value
        self.count += 1
        self.last = value
        key = step // self._width
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = self._buckets[key] = _Bucket()
        elif bucket.low <= value <= bucket.high:  # most values of a long run: nothing to remember
            return
        if not math.isfinite(value):
            self.not_finite += 1
            bucket.gap = step if bucket.gap is None else bucket.gap
        else:
            if value < bucket.low:
                bucket.low, bucket.low_step = value, step
            if value > bucket.high:
                bucket.high, bucket.high_step = value, step
        while len(self._buckets) > self.max_buckets:
            self._widen()

    def _widen(self) -> None:
        self._width *= 2
        merged: dict[int, _Bucket] = {}
        for key, bucket in self._buckets.items():
            if key // 2 in merged:
                merged[key // 2].merge(bucket)
            else:
                merged[key // 2] = bucket
        self._buckets = merged

    def points(self) -> list[tuple[int, float | None]]:
        """Steps, ascending, with their values; None for a value that is not a finite number."""
        return [point for key in sorted(self._buckets) for point in self._buckets[key].points()]


@dataclass
class RunMetrics:
    """What a run measured. The step of a line is the number of optimizer steps done when it was written."""

    curves: dict[str, Curve] = field(default_factory=dict)
    """By the names of ``docs/metrics.md``, in the order in which they first appear."""
    left_out: set[str] = field(default_factory=set)
    """Names beyond ``MOST_CURVES``."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds from the first line to the last one, by what they were spent on: the keys are the constants above."""
    began: float | None = None
    """Time of the first line, in seconds since 1970."""
    ended: float | None = None
    """Time of the last line."""
    lines: int = 0
    damaged: int = 0
    """Unreadable lines, such as a last line that a killed run left incomplete."""

    @property
    def trained(self) -> float | None:
        """Seconds between the first line and the last, without the time that the run was stopped."""
        return sum(self.seconds.values()) - self.seconds.get(RESTART, 0.0) if self.lines else None

    @property
    def is_thinned(self) -> bool:
        return any(curve.is_thinned for curve in self.curves.values())


def read_metrics(run_dir: Path, history: RunHistory, max_buckets: int) -> RunMetrics:
    """Read ``metrics.jsonl`` line by line; memory does not grow with its length.

    Args:
        history: where and when the run was stopped and resumed.
        max_buckets: the largest number of buckets of each curve.

    Raises:
        OSError: it exists, and cannot be read.
    """
    found, resumes = RunMetrics(), sorted(history.resumed)
    try:
        stream = (run_dir / METRICS_FILE).open("rb")
    except FileNotFoundError:
        return found
    with stream:
        before: tuple[int, float] | None = None
        for row in stream:
            line = parse_metrics_line(row)
            if line is None:
                found.damaged += 1
                continue
            found.lines += 1
            _add_values(found, line, max_buckets)
            before = _add_time(found, line, before, resumes, history)
    return found


def _add_values(found: RunMetrics, line: dict[str, Any], max_buckets: int) -> None:
    step = line["step"]
    for name, written in line.items():
        curve = found.curves.get(name)
        if curve is None:
            if name in ("step", "time") or metric_value(written) is None:
                continue
            if len(found.curves) >= MOST_CURVES:
                found.left_out.add(name)
                continue
            curve = found.curves[name] = Curve(max_buckets)
        # floats are the common case, and take no function call: there may be a million lines
        value = written if type(written) is float else metric_value(written)
        if value is not None:
            curve.add(step, value)


def _add_time(
    found: RunMetrics,
    line: dict[str, Any],
    before: tuple[int, float] | None,
    resumes: Sequence[int],
    history: RunHistory,
) -> tuple[int, float]:
    """Add the seconds since the line before. Returns step and time of this line.

    Args:
        resumes: steps that the run was resumed at, ascending.
    """
    step, now = line["step"], float(line["time"])
    found.began = now if found.began is None else found.began
    found.ended = now
    if before is None or now < before[1]:  # the clock was set back
        return step, now
    last_step, last = before
    elapsed = now - last
    is_evaluation = "train/loss" not in line and any(name.startswith("eval/") for name in line)
    is_restart = bisect_left(resumes, last_step) < bisect_left(resumes, step)  # it was resumed between the two
    if is_restart:
        stopped_seconds = _seconds_stopped(last, now, history)
        found.seconds[RESTART] = found.seconds.get(RESTART, 0.0) + stopped_seconds
        elapsed -= stopped_seconds
        if elapsed <= 0:
            return step, now
    if is_evaluation:
        kind = EVALUATION if step == last_step else MIXED
    else:
        kind = TRAINING
        wait = metric_value(line.get("train/data_wait_seconds")) or 0.0
        waited = min(elapsed, max(0.0, wait) * (step - last_step))
        if waited > 0:
            found.seconds[DATA_WAIT] = found.seconds.get(DATA_WAIT, 0.0) + waited
            elapsed -= waited
    found.seconds[kind] = found.seconds.get(kind, 0.0) + elapsed
    return step, now


def _seconds_stopped(last: float, now: float, history: RunHistory) -> float:
    """Seconds from the stop to the start, between two lines of which the second is that of a resumed process.

    Without a start in the log at that time (for example in another time zone), all seconds. Between the two
    lines several processes may have started. A stop begins at the logged end of the process before; if that was killed,
    at the first of the two lines or, where it started after that and wrote no line, at its own start.
    """
    starts = sorted(time for time in history.resume_times if last <= time <= now)
    if not starts:
        return now - last
    stopped_seconds, before = 0.0, last
    for start in starts:
        stopped_seconds += start - min((time for time in history.end_times if before <= time <= start), default=before)
        before = start
    return stopped_seconds
