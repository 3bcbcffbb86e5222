"""``RecordedRun``: the data of one run for a report, from the files in its directory."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any

from drawbar.config.io.fields import show
from drawbar.config.io.load_config import script_of_run
from drawbar.config.io.source import config_of_run, read_file
from drawbar.errors import UserError
from drawbar.report.run_history import PACKED, TRAIN, RunHistory, RunMetrics, read_history, read_metrics
from drawbar.tracking.run_view import Progress, metric_value, read_run
from drawbar.util.best_score import BestScore
from drawbar.util.byte_sizes import bytes_below
from drawbar.util.run_dir import FIRST_SAMPLES_FILE, STATUS_FILE, checkpoint_folders, plan_file

MOST_PREDICTIONS = 300
"""Records of a split that are shown."""
MOST_TEXTS = 100
"""Texts of ``eval.samples`` that are shown."""
MOST_COLUMNS = 12
MOST_CHARACTERS = 2000
"""Characters of one value that are shown."""
MOST_TEXT = 2_000_000
"""Characters of the predictions of one split."""
_ROWS = re.compile(r"(\d+) samples in (\d+) rows")
_TOKENS = re.compile(r".* ([\d,]+) tokens$")


@dataclass(frozen=True)
class StoredCheckpoint:
    """A checkpoint as it is on the disk."""

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
    texts: list[dict[str, Any]] = field(default_factory=list)
    """What the model wrote (``eval.samples``), newest first: ``step``, ``prompt``, ``text``."""


def _read_plan(run_dir: Path, problems: list[str]) -> StoredPlan | None:
    file = plan_file(run_dir)
    values = _read_object(file, problems)
    try:
        return StoredPlan(str(values["strategy"]), int(values["peak"]), bool(values["fits"]), values.get("hours"))
    except (ValueError, KeyError, TypeError):
        if values:
            problems.append(f"{file}: {file.name} is no plan of a run")
    return None


def _read_checkpoints(run_dir: Path, best: BestScore | None, problems: list[str]) -> list[StoredCheckpoint]:
    """The checkpoints, newest first. What is in them is not verified."""
    found = []
    for step, folder in checkpoint_folders(run_dir).items():
        try:
            size = bytes_below(folder)
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
                is_best=best is not None and step == best.step,
                processes=processes if isinstance(processes, int) else None,
                resolved=resolved if isinstance(resolved, dict) else {},
            )
        )
    return found[::-1]


def _read_evaluations(run_dir: Path, problems: list[str]) -> list[StoredEvaluation]:
    """The newest evaluation of each split. Raises OSError if predictions exist, and cannot be read."""
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
    found.texts = sorted(_read_texts(folder / "samples.jsonl", problems), key=itemgetter("step"), reverse=True)
    return found


def _read_texts(file: Path, problems: list[str]) -> list[dict[str, Any]]:
    with _noting(problems), suppress(FileNotFoundError):
        lines = file.read_text("utf-8").splitlines()
        with suppress(ValueError):
            return [json.loads(line) for line in lines[-MOST_TEXTS:]]
        problems.append(f"{file}: {file.name} is damaged")
    return []


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
    """A value as text; of a very long one its beginning, and how long it is."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]}… ({len(text):,} characters)"


@contextmanager
def _noting(problems: list[str]) -> Iterator[None]:
    """Context for reading a file: if that fails, adds to ``problems`` why."""
    try:
        yield
    except OSError as error:
        problems.append(f"{error.filename}: {error.strerror}")
    except UserError as error:
        problems.append(f"{error.where}: {error.what}")


def _read_object(file: Path, problems: list[str]) -> dict[str, Any]:
    """The JSON object of a file; empty if there is none that can be read."""
    with _noting(problems), suppress(FileNotFoundError):
        text = file.read_bytes()
        with suppress(ValueError, RecursionError):
            if isinstance(values := json.loads(text), dict):
                return values
        problems.append(f"{file}: {file.name} is damaged")
    return {}


def _read_list(file: Path, problems: list[str]) -> list[Any]:
    """The list in a JSON file; empty if there is no such file."""
    with _noting(problems), suppress(FileNotFoundError):
        text = file.read_text("utf-8")
        with suppress(ValueError):
            if isinstance(values := json.loads(text), list):
                return values
        problems.append(f"{file}: {file.name} is damaged")
    return []


@dataclass
class RecordedRun:
    """One run, as its files describe it when they are read."""

    folder: Path
    state: str
    """See ``RunView.state``."""
    progress: Progress
    metrics: RunMetrics = field(default_factory=RunMetrics)
    history: RunHistory = field(default_factory=RunHistory)
    checkpoints: Sequence[StoredCheckpoint] = ()
    evaluations: Sequence[StoredEvaluation] = ()
    first_samples: Sequence[Mapping[str, Any]] = ()
    """The first training samples as text: see ``drawbar.train.first_samples``."""
    plan: StoredPlan | None = None
    """What it was planned to take; None if it was not planned."""
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
        """A sentence about the share of padding in the batches, as far as the files show it."""
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
    view = read_run(folder)
    run = RecordedRun(folder, view.state, view.progress)
    if view.progress.run_state is None and (folder / STATUS_FILE).exists():
        run.problems.append(f"{folder / STATUS_FILE}: {STATUS_FILE} is damaged")
    with _noting(run.problems):
        run.history = read_history(folder)
    with _noting(run.problems):
        run.metrics = read_metrics(folder, run.history, max_buckets)
    run.checkpoints = _read_checkpoints(folder, run.progress.best, run.problems)
    with _noting(run.problems):
        run.evaluations = _read_evaluations(folder, run.problems)
    run.first_samples = _read_list(folder / FIRST_SAMPLES_FILE, run.problems)
    run.plan = _read_plan(folder, run.problems)
    with _noting(run.problems), config_of_run(folder) as path:
        run.settings = dict(_flatten(read_file(path).values))
    return run


def _flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", _text(show(value))
