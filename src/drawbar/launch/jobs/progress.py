"""How far a run is, from the files that it writes: quick, without torch, and while it trains."""

import itertools
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ruamel.yaml.error import YAMLError

from drawbar.config.io.source import parse_yaml
from drawbar.launch.jobs.restart_count import newest_step
from drawbar.launch.jobs.run_status import RunStatus
from drawbar.util.best_score import BEST_FILE, BestScore

_TAIL = 2**18
"""Bytes of ``metrics.jsonl`` that are read: the newest lines."""
_QUIET = 120.0
"""Seconds without a new line of ``metrics.jsonl`` that are normal for any run."""


@dataclass(frozen=True)
class LoggedProgress:
    """How far a run is, read from its files. A field is None where the run has not written it yet."""

    run_state: str | None = None
    """What the run says of itself: see :class:`RunStatus`."""
    step: int | None = None
    total: int | None = None
    """Steps of the whole run."""
    loss: float | None = None
    tokens_per_second: float | None = None
    written: float | None = None
    """When the newest line was written, in seconds since 1970."""
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

    def is_stale(self, now: float) -> bool:
        return self.written is not None and now - self.written > self.patience


def read_progress(run_dir: Path) -> LoggedProgress:
    """Read what is there; a run that has not begun has nothing."""
    lines = _metrics(run_dir / "metrics.jsonl")
    trained = [line for line in lines if "train/loss" in line]
    last = trained[-1] if trained else {}
    times = [line["time"] for line in lines[-20:]]
    gaps = [after - before for before, after in itertools.pairwise(times)]
    checkpoint = newest_step(run_dir)
    status = RunStatus.read(run_dir)
    return LoggedProgress(
        run_state=None if status is None else status.state,
        step=lines[-1]["step"] if lines else None,
        total=_total_of_older_run(run_dir / "config.yaml", last) if status is None else status.total_steps,
        loss=_number(last.get("train/loss")),
        tokens_per_second=_number(last.get("train/tokens_per_second")),
        written=times[-1] if times else None,
        patience=max([_QUIET, *(10 * gap for gap in gaps)]),
        checkpoint=None if checkpoint < 0 else checkpoint,
        best=_best(run_dir / "checkpoints" / BEST_FILE),
    )


def _metrics(file: Path) -> list[dict[str, Any]]:
    """The newest lines, without one that is not complete."""
    try:
        with file.open("rb") as stream:
            size = stream.seek(0, 2)
            stream.seek(max(0, size - _TAIL))
            rows = stream.read().split(b"\n")
    except OSError:
        return []
    found = []
    for row in rows[0 if size <= _TAIL else 1 : -1]:
        try:
            line = json.loads(row)
        except ValueError:
            continue
        if isinstance(line, dict) and isinstance(line.get("step"), int) and isinstance(line.get("time"), int | float):
            found.append(line)
    return found


def _total_of_older_run(file: Path, last: dict[str, Any]) -> int | None:
    """Total steps of a run without ``status.json``, as configured; of ``epochs``, from the steps and epochs so far."""
    try:
        train = parse_yaml(file.read_text(encoding="utf-8"))["train"]
    except (OSError, ValueError, TypeError, KeyError, YAMLError):
        return None
    if train.get("steps") is not None:
        return int(train["steps"])
    epochs, done = train.get("epochs"), _number(last.get("train/epoch"))
    return math.ceil(round(last["step"] / done * float(epochs), 6)) if epochs and done else None


def _best(file: Path) -> BestScore | None:
    try:
        return BestScore.model_validate_json(file.read_bytes())
    except (OSError, ValueError):
        return None


def _number(value: object) -> float | None:
    """A value of ``metrics.jsonl`` as a number: numbers that are not finite are texts there."""
    return float(value) if isinstance(value, int | float | str) else None
