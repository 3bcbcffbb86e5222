"""Checkpoints: every few steps or minutes, at a better score, and at the end."""

import time
from pathlib import Path

from drawbar.config.schema.section import interval_seconds
from drawbar.train.callback import Callback, RunHandle
from drawbar.train.callbacks.nan_check import check_finite
from drawbar.train.run import Run
from drawbar.train.step import RunProgress, StepInfo
from drawbar.train.stop import Reason


class SaveCallback(Callback):
    """Saves a checkpoint every few steps, on a callback's request, and at the end; before the step is evaluated."""

    def __init__(self, run: Run) -> None:
        every = run.config.checkpoint.every
        self._every = every if isinstance(every, int) else None  # a length of time is for ``TimedSaveCallback``
        self._run = run
        self._newest: StepInfo | None = None

    def on_step(self, run: RunHandle, info: StepInfo) -> None:
        self._newest = info
        if info.step == self._run.saver.first_step:  # detect an unsavable run before hours of training
            self._run.saver.check_savable()
        is_due = self._every is not None and info.step % self._every == 0
        if info.last or is_due or self._run.stop.reason is Reason.SAVE:  # requested by a callback before this step
            save(self._run, info)

    def on_train_end(self, run: RunHandle) -> None:
        if self._newest is not None and not self._run.saver.has_saved(run.progress):
            save(self._run, self._newest)
        self._run.saver.wait()


class SaveScoreCallback(Callback):
    """After an evaluation: saves a checkpoint at a new best score, else updates the progress in this step's."""

    def __init__(self, run: Run) -> None:
        self._keep_best = run.config.checkpoint.keep_best
        self._run = run

    def on_train_start(self, run: RunHandle) -> None:
        # usually updates only the progress in that step's checkpoint; after ``--resume PATH`` of another run's best
        # checkpoint, saves a full one, which this run keeps as its own
        if run.step > 0 and self._is_due(run.progress):
            _save(self._run, run.progress)

    def on_step(self, run: RunHandle, info: StepInfo) -> None:
        if self._is_due(info.progress):
            save(self._run, info)

    def _is_due(self, progress: RunProgress) -> bool:
        saved = self._run.saver.last_saved_progress
        if saved is not None and saved.step == progress.step:
            return saved != progress
        return self._keep_best and progress.best_step == progress.step


class TimedSaveCallback(Callback):
    """Requests a checkpoint when the last one is older than ``checkpoint.every``, a duration. Only on rank 0, as clocks
    differ."""

    def __init__(self, run: Run) -> None:
        self._seconds = interval_seconds(str(run.config.checkpoint.every))
        self._last = time.monotonic()

    def on_train_start(self, run: RunHandle) -> None:
        self._last = time.monotonic()

    def on_step(self, run: RunHandle, info: StepInfo) -> None:
        if time.monotonic() - self._last >= self._seconds:
            run.request_save()
            self._last = time.monotonic()

    def on_save(self, run: RunHandle, checkpoint: Path) -> None:
        self._last = time.monotonic()


def save(run: Run, info: StepInfo) -> None:
    """Save this step; if it already has a checkpoint, update only the progress in it."""
    check_finite(info, run)
    _save(run, info.progress)


def _save(run: Run, progress: RunProgress) -> None:
    saved = run.saver.last_saved_progress
    with run.meter.paused():
        run.saver.save(progress)
    if saved is None or saved.step != progress.step:
        run.announce_save(progress.step)
