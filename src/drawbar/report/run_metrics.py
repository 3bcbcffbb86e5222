"""``RunMetrics``: a run's ``metrics.jsonl`` as curves, and where the time between its lines went."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drawbar.launch.jobs.progress import metric_value, parse_metrics_line
from drawbar.report.curve import Curve
from drawbar.report.run_log import RunHistory
from drawbar.util.run_dir import METRICS_FILE

MOST_CURVES = 80
"""Names of metrics that are read; a user's callbacks may log any number."""

TRAINING = "training steps"
DATA_WAIT = "waiting for data"
EVALUATION = "evaluations, each with the save before it"
MIXED = "steps and an evaluation, between two lines of metrics.jsonl"
RESTART = "stopped, and started again"


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
        OSError: it is there, and cannot be read.
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

    Without a start in the log at that time (it is of another time zone, say), all seconds. Between the two
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
