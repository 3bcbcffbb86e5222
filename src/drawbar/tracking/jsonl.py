"""``metrics.jsonl`` in the run directory, which every run writes (its schema is in ``docs/metrics.md``).

A run that was killed and resumed must read like one that never stopped. So a run that resumes at step s first drops the
lines of later steps, which it is about to repeat.
"""

import json
import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

from drawbar.errors import ExitCode, UserError
from drawbar.tracking.run_view import evaluation_scores, parse_metrics_line
from drawbar.tracking.tracker import TrackedRun, Tracker
from drawbar.util.atomic_files import replacing
from drawbar.util.strict_json import json_number

logger = logging.getLogger(__name__)


class JsonlTracker(Tracker):
    """Writes one JSON object per line, which the operating system has once ``log`` returns."""

    in_background: ClassVar[bool] = False

    def start(self, run: TrackedRun) -> None:
        """Raises ``UserError`` if the file cannot be written."""
        self._path = path = run.folder / "metrics.jsonl"
        with writing(path):
            if path.exists():
                _drop_lines_after(path, -1 if run.resume_step is None else run.resume_step, run.evaluated)
            self._file = path.open("a", encoding="utf-8")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        numbers = {name: json_number(value) for name, value in values.items()}
        line = json.dumps({"step": step, "time": time.time(), **numbers}, allow_nan=False)
        with writing(self._path):
            self._file.write(line + "\n")
            self._file.flush()

    def finish(self) -> None:
        with writing(self._path):
            self._file.close()


def _drop_lines_after(path: Path, last_step: int, evaluated: bool) -> None:
    """Atomically rewrite the file without unreadable lines and those of later steps; if ``last_step`` will be evaluated
    again (not ``evaluated``), also without the scores of that step."""
    with path.open("rb") as lines, replacing(path) as kept:
        for number, line in enumerate(lines, start=1):
            entry = parse_metrics_line(line)
            if entry is None:
                logger.warning("%s, line %d: cut off when the run was killed; dropped", path, number)
            elif entry["step"] < last_step or (
                entry["step"] == last_step and (evaluated or not evaluation_scores(entry))
            ):
                kept.write(line if line.endswith(b"\n") else line + b"\n")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise a UserError that says which file could not be written, and why."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"cannot write the metrics of the run: {error.strerror or error}",
            where=str(path),
            remedy="free some space, or make the folder writable",
            exit_code=ExitCode.FAILED,
        ) from error
