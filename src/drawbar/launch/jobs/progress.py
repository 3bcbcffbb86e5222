"""Reads a run's progress from its files, also while it trains. Without torch."""

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ruamel.yaml.error import YAMLError

from drawbar.config.io.source import parse_yaml
from drawbar.launch.jobs.restart_count import newest_step
from drawbar.launch.jobs.run_status import RunStatus, is_gone, is_locked
from drawbar.util.best_score import BEST_FILE, BestScore
from drawbar.util.run_dir import METRICS_FILE

_TAIL = 2**18
"""Bytes of ``metrics.jsonl`` that are read: the newest lines."""
_RATES = ("train/tokens_per_second", "train/samples_per_second")
_LATEST = 1e11
"""Seconds since 1970: a line with a later time, or with NaN, is damaged."""
_QUIET = 120.0
"""Seconds without a new line of ``metrics.jsonl`` that are normal for any run."""


@dataclass(frozen=True)
class LoggedProgress:
    """How far a run is, read from its files. A field is None where the run has not written it yet."""

    run_state: str | None = None
    """The state in ``status.json``: see :class:`RunStatus`."""
    step: int | None = None
    total: int | None = None
    """Steps of the whole run."""
    loss: float | None = None
    lr: float | None = None
    rates: Mapping[str, float | None] = field(default_factory=dict)
    """The speed, by the name of its metric: in tokens a second, or in samples."""
    mfu: float | None = None
    peak_memory_gib: float | None = None
    seconds_left: float | None = None
    """From the newest line to the last step, at the mean pace of the newest lines since the run began or went on."""
    evaluated_step: int | None = None
    """Step of the newest evaluation."""
    scores: Mapping[str, float] = field(default_factory=dict)
    """Of that evaluation, by their names in ``metrics.jsonl``."""
    written: float | None = None
    """When the newest line was written, or ``status.json`` before there is any; in seconds since 1970."""
    patience: float = _QUIET
    """Seconds after ``written`` until a run that trains should have written more."""
    checkpoint: int | None = None
    """Step of the newest checkpoint."""
    best: BestScore | None = None

    @property
    def step_of_total(self) -> str:
        """``20/500``, ``20`` where the total is not known, or nothing."""
        if self.step is None:
            return ""
        return f"{self.step}" if self.total is None else f"{self.step}/{self.total}"

    def ended_as(self, state: str) -> str:
        """How the log and a report say that the training ended here: ``stopped at step 60/500``."""
        return f"{state} at step {self.step_of_total}"

    def is_stale(self, now: float) -> bool:
        return self.written is not None and now - self.written > self.patience

    def state(self, run_dir: Path, now: float) -> str:
        """What the run says of itself; ``stale`` where it says that it trains, no process holds its directory, and its
        process is gone or it has been silent for too long; ``unknown`` of a run that has not begun."""
        if self.run_state == "training" and not is_locked(run_dir) and (self.is_stale(now) or is_gone(run_dir)):
            return "stale"
        return self.run_state or "unknown"


def read_progress(run_dir: Path) -> LoggedProgress:
    """Read what is there; a run that has not begun has nothing."""
    lines = newest_lines(run_dir)
    trained = [line for line in lines if "train/loss" in line]
    last = trained[-1] if trained else {}
    evaluated: dict[str, Any] = next((line for line in reversed(lines) if evaluation_scores(line)), {})
    times = [line["time"] for line in lines[-20:]]
    checkpoint = newest_step(run_dir)
    status = RunStatus.read(run_dir)
    started = -math.inf if status is None else status.started
    gaps = [
        after - before for before, after in itertools.pairwise(times) if before >= started
    ]  # without the time between two processes
    total = _total_of_older_run(run_dir / "config.yaml", last) if status is None else status.total_steps
    return LoggedProgress(
        run_state=None if status is None else status.state,
        step=_step(lines, status),
        total=total,
        loss=metric_value(last.get("train/loss")),
        lr=metric_value(last.get("train/lr")),
        rates={name: metric_value(last.get(name)) for name in _RATES},
        mfu=metric_value(last.get("train/mfu")),
        peak_memory_gib=metric_value(last.get("train/peak_memory_gib")),
        seconds_left=_seconds_left(trained, total, status),
        evaluated_step=evaluated.get("step"),
        scores=evaluation_scores(evaluated),
        written=times[-1] if times else None if status is None else status.time,
        patience=max([_QUIET, *(10 * gap for gap in gaps)]),
        checkpoint=None if checkpoint < 0 else checkpoint,
        best=_best(run_dir / "checkpoints" / BEST_FILE),
    )


def parse_metrics_line(row: bytes) -> dict[str, Any] | None:
    """What a line of ``metrics.jsonl`` says; None of one that is damaged or was cut off."""
    try:
        line = json.loads(row)
    except (ValueError, RecursionError):
        return None
    if not isinstance(line, dict) or not isinstance(line.get("step"), int):
        return None
    time = line.get("time")
    return line if isinstance(time, int | float) and abs(time) < _LATEST else None


def metric_value(value: object) -> float | None:
    """A value of ``metrics.jsonl`` as a number: numbers that are not finite are texts there. None of anything else."""
    try:
        return float(value) if isinstance(value, int | float | str) else None
    except (ValueError, OverflowError):
        return None


def newest_lines(run_dir: Path) -> list[dict[str, Any]]:
    """The newest lines of ``metrics.jsonl``, without one that is not complete."""
    try:
        with (run_dir / METRICS_FILE).open("rb") as stream:
            size = stream.seek(0, 2)
            stream.seek(max(0, size - _TAIL))
            rows = stream.read().split(b"\n")
    except OSError:
        return []
    parsed = map(parse_metrics_line, rows[0 if size <= _TAIL else 1 : -1])
    return [line for line in parsed if line is not None]


def evaluation_scores(line: Mapping[str, Any]) -> dict[str, float]:
    """The scores of a line of ``metrics.jsonl``, by their names; none of a line about training."""
    found = {name: metric_value(value) for name, value in line.items() if name.startswith("eval/")}
    return {name: value for name, value in found.items() if value is not None}


def _step(lines: Sequence[Mapping[str, Any]], status: RunStatus | None) -> int | None:
    """That of whichever was written last: a run that stops between two lines writes its status."""
    if not lines:
        return None
    return status.step if status is not None and status.time > lines[-1]["time"] else lines[-1]["step"]


def _seconds_left(trained: Sequence[Mapping[str, Any]], total: int | None, status: RunStatus | None) -> float | None:
    """See ``LoggedProgress``. The first line of a start is left out: its steps also compiled and warmed up."""
    if total is None or status is None:
        return None
    lines = [line for line in trained if line["time"] >= status.started]
    if len(lines) < 2 or lines[-1]["step"] <= lines[0]["step"]:
        return None
    pace = (lines[-1]["time"] - lines[0]["time"]) / (lines[-1]["step"] - lines[0]["step"])
    return max(0.0, pace * (total - lines[-1]["step"]))


def _total_of_older_run(file: Path, last: dict[str, Any]) -> int | None:
    """Total steps of a run without ``status.json``, as configured; of ``epochs``, from the steps and epochs so far."""
    try:
        train = parse_yaml(file.read_text(encoding="utf-8"))["train"]
    except (OSError, ValueError, TypeError, KeyError, YAMLError):
        return None
    if train.get("steps") is not None:
        return int(train["steps"])
    epochs, done = train.get("epochs"), metric_value(last.get("train/epoch"))
    return math.ceil(round(last["step"] / done * float(epochs), 6)) if epochs and done else None


def _best(file: Path) -> BestScore | None:
    try:
        return BestScore.from_json(file.read_bytes())
    except (OSError, ValueError):
        return None
