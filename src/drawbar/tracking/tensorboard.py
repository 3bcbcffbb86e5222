"""TensorBoard event files in ``tensorboard/`` of the run directory."""

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from drawbar.tracking.jsonl import writing
from drawbar.tracking.tracker import TrackedRun, Tracker


class TensorBoardTracker(Tracker):
    """Event files for TensorBoard. Each resume adds a file whose first event voids the steps that are repeated."""

    in_background: ClassVar[bool] = False

    def start(self, run: TrackedRun) -> None:
        """Raises ``UserError`` if the folder cannot be written."""
        # Imported here because it loads TensorFlow if that is installed, which takes seconds and prints pages of
        # warnings: not for a run without TensorBoard. Without TensorFlow it takes 0.15 s once torch is loaded, no
        # longer than importing only the parts of `tensorboard` that it uses.
        from torch.utils.tensorboard import SummaryWriter

        self._folder: Path = run.folder / "tensorboard"
        self._excepthook = threading.excepthook
        threading.excepthook = self._report
        with writing(self._folder):
            purge_step = 0 if run.resume_step is None else run.resume_step + 1
            self._writer = SummaryWriter(str(self._folder), purge_step=purge_step)

    def _report(self, error: threading.ExceptHookArgs) -> None:
        """Drop the traceback of TensorBoard's writing thread: ``log`` gets the same error and raises ``UserError``."""
        if not (isinstance(error.exc_value, OSError) and type(error.thread).__module__.startswith("tensorboard.")):
            self._excepthook(error)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        with writing(self._folder):
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)
            # Without this, a killed run loses up to two minutes of metrics that no resume writes again.
            self._writer.flush()

    def log_texts(self, step: int, texts: Mapping[str, str]) -> None:
        with writing(self._folder):
            for name, text in texts.items():
                self._writer.add_text(name, text, step)
            self._writer.flush()

    def finish(self) -> None:
        with writing(self._folder):
            self._writer.close()
        threading.excepthook = self._excepthook
