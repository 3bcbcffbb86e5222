"""Where metrics are written: ``metrics.jsonl`` (its schema is in ``docs/metrics.md``) and TensorBoard event files.

A run that was killed and resumed must read like one that never stopped. So a tracker that resumes at step s first
drops what was written about steps after s: the run is about to make them again.
"""

import json
import logging
import math
import textwrap
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from drawbar.config.imports import cause
from drawbar.config.schema import TrackingSection
from drawbar.errors import ExitCode, UserError
from drawbar.runtime.files import replacing

logger = logging.getLogger(__name__)


class Tracker(ABC):
    """Keeps what a run measures. Only rank 0 has trackers."""

    @abstractmethod
    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Keep ``values`` by their flat names, such as ``train/loss``, for the state after ``step`` steps."""

    @abstractmethod
    def text(self, step: int, name: str, text: str) -> None:
        """Keep a text, such as a generated sample."""

    @abstractmethod
    def close(self) -> None:
        """Write what is still buffered. Nothing can be logged afterwards."""


class Trackers(Tracker):
    """Several trackers as one that never fails: what goes wrong with one is said, and training goes on."""

    def __init__(self, trackers: Iterable[Tracker] = ()) -> None:
        self._trackers = list(trackers)
        self._failing: set[Tracker] = set()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._tell_all(lambda tracker: tracker.log(step, values))

    def text(self, step: int, name: str, text: str) -> None:
        self._tell_all(lambda tracker: tracker.text(step, name, text))

    def close(self) -> None:
        self._tell_all(lambda tracker: tracker.close())

    def _tell_all(self, tell: Callable[[Tracker], None]) -> None:
        for tracker in self._trackers:
            try:
                tell(tracker)
            except Exception as error:  # noqa: BLE001 - whatever it is, it is worth no step
                if tracker not in self._failing:
                    logger.warning("%s\n  the run goes on, and tries it again with each line", _told(error, tracker))
                self._failing.add(tracker)
            else:
                self._failing.discard(tracker)


def _told(error: Exception, tracker: Tracker) -> str:
    return str(error) if isinstance(error, UserError) else f"{type(tracker).__name__}: {cause(error)}"


class JsonlTracker(Tracker):
    """One JSON object a line, on disk (as far as the operating system goes) when ``log`` returns."""

    def __init__(self, path: Path, resume_step: int | None, evaluated: bool = True) -> None:
        """Continue after ``resume_step``, or begin the file anew where that is None.

        Args:
            evaluated: the checkpoint knows of the evaluation of its step; else that is made again.

        Raises:
            UserError: the file cannot be written.
        """
        self._path = path
        with _writing(path):
            if path.exists():
                _drop_lines_after(path, -1 if resume_step is None else resume_step, evaluated)
            self._file = path.open("a", encoding="utf-8")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._write(step, {name: json_number(value) for name, value in values.items()})

    def text(self, step: int, name: str, text: str) -> None:
        self._write(step, {name: text})

    def _write(self, step: int, values: Mapping[str, float | str]) -> None:
        line = json.dumps({"step": step, "time": time.time(), **values}, allow_nan=False)
        with _writing(self._path):
            self._file.write(line + "\n")
            self._file.flush()

    def close(self) -> None:
        with _writing(self._path):
            self._file.close()


class TensorBoardTracker(Tracker):
    """Event files for TensorBoard. Each resume adds a file, whose first event voids the steps made again."""

    def __init__(self, folder: Path, purge_step: int) -> None:
        """Void every event of ``purge_step`` and later in the files already in ``folder``.

        Raises:
            UserError: the folder cannot be written.
        """
        # Imported here because it loads TensorFlow wherever that is installed: seconds, and pages of warnings, that a
        # run without TensorBoard need not pay. Otherwise it costs 0.15 s once torch is loaded, no more than the parts
        # of `tensorboard` that it is made of.
        from torch.utils.tensorboard import SummaryWriter

        self._folder = folder
        self._excepthook = threading.excepthook
        threading.excepthook = self._report
        with _writing(folder):
            self._writer = SummaryWriter(str(folder), purge_step=purge_step)

    def _report(self, error: threading.ExceptHookArgs) -> None:
        """TensorBoard's writing thread hands its error to ``log``, too, which says what to do: no traceback before."""
        if not (isinstance(error.exc_value, OSError) and type(error.thread).__module__.startswith("tensorboard.")):
            self._excepthook(error)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        with _writing(self._folder):
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)
            # Without this a killed run loses up to two minutes that no resume writes again.
            self._writer.flush()

    def text(self, step: int, name: str, text: str) -> None:
        with _writing(self._folder):
            # TensorBoard renders Markdown; indented by four, a text keeps its line breaks and its characters.
            self._writer.add_text(name, textwrap.indent(text, "    ", lambda line: True), step)
            self._writer.flush()

    def close(self) -> None:
        with _writing(self._folder):
            self._writer.close()
        threading.excepthook = self._excepthook


def make_trackers(
    run_dir: Path, config: TrackingSection, resume_step: int | None, evaluated: bool = True
) -> list[Tracker]:
    """The trackers that the configuration asks for, writing into ``run_dir``.

    Args:
        run_dir: an existing folder.
        config: says which trackers.
        resume_step: number of steps that the checkpoint has made; None where the run starts from the beginning, and
            then anything that an earlier attempt wrote is dropped.
        evaluated: see :class:`JsonlTracker`.
    """
    trackers: list[Tracker] = [JsonlTracker(run_dir / "metrics.jsonl", resume_step, evaluated)]
    if config.tensorboard:
        purge_step = 0 if resume_step is None else resume_step + 1
        trackers.append(TensorBoardTracker(run_dir / "tensorboard", purge_step))
    return trackers


def json_number(value: float) -> float | str:
    """The value itself, or ``"nan"``, ``"inf"`` or ``"-inf"``, for which JSON has no number."""
    return value if math.isfinite(value) else str(float(value))


def _drop_lines_after(path: Path, last_step: int, evaluated: bool) -> None:
    """Rewrite the file, atomically, without the lines of later steps and without unreadable ones; and, where that step
    is to be evaluated again, without its scores."""
    with path.open("rb") as lines, replacing(path) as kept:
        for number, line in enumerate(lines, start=1):
            entry = _entry(line)
            if entry is None:
                logger.warning("%s, line %d: cut off when the run was killed; dropped", path, number)
            elif entry["step"] < last_step or (entry["step"] == last_step and (evaluated or not _is_of_scores(entry))):
                kept.write(line if line.endswith(b"\n") else line + b"\n")


def _entry(line: bytes) -> dict[str, Any] | None:
    """What a line says; None where it is not a complete line of metrics."""
    try:
        entry = json.loads(line)
    except ValueError:  # not JSON, or not even UTF-8
        return None
    return entry if isinstance(entry, dict) and isinstance(entry.get("step"), int) else None


def _is_of_scores(entry: dict[str, Any]) -> bool:
    return any(name.startswith("eval/") for name in entry)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Say which file could not be written, and why."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"cannot write the metrics of the run: {error.strerror or error}",
            where=str(path),
            remedy="free some space, or make the folder writable",
            exit_code=ExitCode.FAILED,
        ) from error
