"""Reads a run's plan, the facts of its checkpoints, and the scores and predictions of its evaluations."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drawbar.errors import UserError
from drawbar.launch.job import plan_file
from drawbar.launch.jobs.progress import metric_value
from drawbar.launch.jobs.restart_count import checkpoint_folders

MOST_PREDICTIONS = 300
"""Records of a split that are shown."""
MOST_COLUMNS = 12
MOST_CHARACTERS = 2000
"""Characters of one value that are shown."""
MOST_TEXT = 2_000_000
"""Characters of the predictions of one split."""


@dataclass(frozen=True)
class StoredCheckpoint:
    """A checkpoint as it lies on the disk."""

    step: int
    size: int
    """Bytes."""
    time: float
    """When it was completed, in seconds since 1970."""
    is_best: bool
    processes: int | None
    """How many processes saved it."""
    resolved: Mapping[str, Any]
    """The dtypes and ways of computing that the run began with (``formats`` in ``state.json``):
    ``{"padding_free": True, …}``."""


@dataclass(frozen=True)
class StoredPlan:
    """What a run was planned to take before it was submitted."""

    strategy: str
    peak: int
    """Bytes of the rank that takes most."""
    fits: bool
    hours: float | None


@dataclass
class StoredEvaluation:
    """Scores and predictions of one split: a folder of ``eval/``."""

    split: str
    scores: dict[str, float] = field(default_factory=dict)
    step: int | None = None
    records: int | None = None
    columns: list[str] = field(default_factory=list)
    rows: list[list[str]] = field(default_factory=list)
    """The first predictions, each with one text per column."""
    has_more: bool = False
    """Whether the file holds more records."""
    damaged: int = 0
    """Lines that cannot be read."""


def read_plan(run_dir: Path) -> StoredPlan | None:
    """The run's plan; None where it was not planned.

    Raises:
        OSError: it is there, and cannot be read.
        UserError: it is no plan.
    """
    path = plan_file(run_dir)
    try:
        values = json.loads(path.read_text("utf-8"))
        return StoredPlan(str(values["strategy"]), int(values["peak"]), bool(values["fits"]), values.get("hours"))
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path.name} is no plan of a run",
            where=str(path),
            remedy="delete it: the next `drawbar submit` writes it anew",
        ) from error


def read_checkpoints(run_dir: Path, best_step: int | None, problems: list[str]) -> list[StoredCheckpoint]:
    """The checkpoints, newest first. What is in them is not verified. Adds to ``problems`` what cannot be read."""
    found = []
    for step, folder in checkpoint_folders(run_dir).items():
        try:
            size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
            completed = folder.stat().st_mtime
        except OSError:  # it is being rotated out
            continue
        state = _read_object(folder / "state.json", problems)
        processes, resolved = state.get("world_size"), state.get("formats")
        found.append(
            StoredCheckpoint(
                step,
                size,
                completed,
                is_best=step == best_step,
                processes=processes if isinstance(processes, int) else None,
                resolved=resolved if isinstance(resolved, dict) else {},
            )
        )
    return found[::-1]


def read_evaluations(run_dir: Path, problems: list[str]) -> list[StoredEvaluation]:
    """The newest evaluation of each split. Adds scores that cannot be read to ``problems``. Raises OSError where
    predictions are there, and cannot be read."""
    folder = run_dir / "eval"
    folders = sorted(entry for entry in folder.iterdir() if entry.is_dir()) if folder.is_dir() else []
    return [_read_evaluation(entry, problems) for entry in folders]


def _read_evaluation(folder: Path, problems: list[str]) -> StoredEvaluation:
    values = _read_object(folder / "scores.json", problems)
    step, records = values.pop("step", None), values.pop("records", None)
    scores = {name: number for name, value in values.items() if (number := metric_value(value)) is not None}
    found = StoredEvaluation(folder.name, scores, step, records)
    kept: list[dict[str, Any]] = []
    for record in _predictions(folder / "predictions.jsonl", found):
        found.columns += [name for name in record if name not in found.columns]
        kept.append(record)
    found.columns = _with_prediction_early(found.columns)[:MOST_COLUMNS]
    found.rows = [[_text(record[name]) if name in record else "" for name in found.columns] for record in kept]
    return found


def _predictions(file: Path, found: StoredEvaluation) -> Iterator[dict[str, Any]]:
    """The first records of a file. Sets ``found.has_more`` if there are others, and counts unreadable lines in
    ``found.damaged``."""
    try:
        stream = file.open("rb")
    except FileNotFoundError:
        return
    count = characters = 0
    with stream:
        for row in stream:
            if count >= MOST_PREDICTIONS or characters > MOST_TEXT:
                found.has_more = True
                return
            try:
                record = json.loads(row)
            except (ValueError, RecursionError):
                record = None
            if not isinstance(record, dict):
                found.damaged += 1
                continue
            count += 1
            characters += sum(min(len(_text(value)), MOST_CHARACTERS) for value in record.values())
            yield record


def _with_prediction_early(columns: list[str]) -> list[str]:
    """The columns in the file's order; where there are too many to show all, ``id`` and ``prediction`` come first."""
    first = [name for name in ("id", "prediction") if name in columns]
    rest = [name for name in columns if name not in first]
    return [*first, *rest] if len(columns) > MOST_COLUMNS else columns


def _text(value: Any) -> str:
    """A value as text, shortened where it is very long."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return shortened(text)


def shortened(text: str) -> str:
    """The text; of a very long one its beginning, and how long it is."""
    if len(text) <= MOST_CHARACTERS:
        return text
    return f"{text[:MOST_CHARACTERS]}… ({len(text):,} characters)"


def _read_object(file: Path, problems: list[str]) -> dict[str, Any]:
    """The JSON object of a file; empty where there is none that can be read. Adds to ``problems`` why it cannot."""
    try:
        values = json.loads(file.read_bytes())
    except FileNotFoundError:
        return {}
    except OSError as error:
        problems.append(f"{file}: {error.strerror}")
        return {}
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        problems.append(f"{file}: {file.name} is damaged")
        return {}
    return values
