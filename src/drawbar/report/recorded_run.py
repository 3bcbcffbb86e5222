"""``RecordedRun``: the data of one run for a report, from the files in its directory."""

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from drawbar.config.io.fields import show
from drawbar.config.io.load_config import script_of_run
from drawbar.config.io.source import config_of_run, read_file
from drawbar.errors import UserError
from drawbar.launch.jobs.progress import LoggedProgress, read_progress
from drawbar.launch.jobs.run_status import RunStatus
from drawbar.report.run_log import PACKED, TRAIN, RunHistory, read_history
from drawbar.report.run_metrics import RunMetrics, read_metrics
from drawbar.report.stored_results import (
    StoredCheckpoint,
    StoredEvaluation,
    StoredPlan,
    read_checkpoints,
    read_evaluations,
    read_plan,
    shortened,
)
from drawbar.util.run_dir import STATUS_FILE

T = TypeVar("T")

_ROWS = re.compile(r"(\d+) samples in (\d+) rows")
_TOKENS = re.compile(r".* ([\d,]+) tokens$")


@dataclass
class RecordedRun:
    """One run, as its files tell it when it is read."""

    folder: Path
    state: str
    """See ``LoggedProgress.state``."""
    progress: LoggedProgress
    metrics: RunMetrics = field(default_factory=RunMetrics)
    history: RunHistory = field(default_factory=RunHistory)
    checkpoints: Sequence[StoredCheckpoint] = ()
    evaluations: Sequence[StoredEvaluation] = ()
    plan: StoredPlan | None = None
    """What it was planned to take; None where it was not planned."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """The resolved configuration: dotted keys, and values as one would type them."""
    problems: list[str] = field(default_factory=list)
    """Files that could not be read, and why."""

    @property
    def task(self) -> str:
        """The type of the task; or its class, where a script defines it."""
        script = script_of_run(self.folder)
        return self.settings.get("task.type", "") if script is None else f"{script[1]} ({script[0].name})"

    @property
    def strategy(self) -> str:
        """The strategy as the log describes it; without a log, the setting."""
        return self.history.strategy or self.settings.get("parallel.strategy", "")

    @property
    def measured_peak(self) -> int | None:
        """The most memory that rank 0 has had so far, in bytes."""
        curve = self.metrics.curves.get("train/peak_memory_gib")
        highest = None if curve is None else curve.highest
        return None if highest is None else int(highest[1] * 2**30)

    @property
    def padding(self) -> str:
        """A sentence about the share of padding in the batches, as far as the files tell it."""
        joined = any(checkpoint.resolved.get("padding_free") is True for checkpoint in self.checkpoints)
        if joined and self.settings.get("data.batching") != "packed":  # packed rows are still padded to one length
            return "None: the samples of a micro-batch lie end to end in one row (data.padding_free)."
        packed = _ROWS.match(self.history.messages.get(PACKED, ""))
        tokens = _TOKENS.match(self.history.messages.get(TRAIN, ""))
        length = self.settings.get("data.sequence_length", "")
        if packed is None or tokens is None or not length.isdecimal():
            return "Not recorded. `drawbar prepare CONFIG` counts it for each way of batching."
        samples, rows = map(int, packed.groups())
        share = 1 - int(tokens.group(1).replace(",", "")) / max(1, rows * int(length))
        return f"{max(0.0, share):.1%} of the packed rows ({samples:,} samples in {rows:,} rows of {length} tokens)."


def read_recorded_run(folder: Path, max_buckets: int) -> RecordedRun:
    """Read the files that there are. One that cannot be read is added to the run's ``problems``, and the rest is read.

    Args:
        max_buckets: the largest number of buckets of each curve.
    """
    progress = read_progress(folder)
    run = RecordedRun(folder, progress.state(folder, time.time()), progress)
    if RunStatus.read(folder) is None and (folder / STATUS_FILE).exists():
        run.problems.append(f"{folder / STATUS_FILE}: {STATUS_FILE} is damaged")
    run.history = _read(run, RunHistory(), lambda: read_history(folder))
    run.metrics = _read(run, RunMetrics(), lambda: read_metrics(folder, run.history, max_buckets))
    best = None if progress.best is None else progress.best.step
    run.checkpoints = read_checkpoints(folder, best, run.problems)
    run.evaluations = _read(run, [], lambda: read_evaluations(folder, run.problems))
    run.plan = _read(run, None, lambda: read_plan(folder))
    run.settings = _read(run, {}, lambda: _settings(folder))
    return run


def _read(run: RecordedRun, otherwise: T, read: Callable[[], T]) -> T:
    try:
        return read()
    except OSError as error:
        run.problems.append(f"{error.filename}: {error.strerror}")
    except UserError as error:
        run.problems.append(f"{error.where}: {error.what}")
    return otherwise


def _settings(folder: Path) -> dict[str, str]:
    with config_of_run(folder) as path:
        values = read_file(path).values
    found: dict[str, str] = {}
    _flatten(values, "", found)
    return found


def _flatten(values: Mapping[str, Any], prefix: str, found: dict[str, str]) -> None:
    for name, value in values.items():
        if isinstance(value, dict) and value:
            _flatten(value, f"{prefix}{name}.", found)
        else:
            found[f"{prefix}{name}"] = shortened(show(value))
