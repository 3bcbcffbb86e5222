"""``status.json``: the progress of a run, for other processes."""

import logging
import time
from contextlib import suppress

from drawbar.runtime.log import log_to_file
from drawbar.tracking.run_view import RunState, RunStatus, write_run_status
from drawbar.train.callback import Callback, RunHandle
from drawbar.train.run import Run
from drawbar.train.step import StepInfo


class StatusCallback(Callback):
    """Writes the run's ``status.json``, for ``drawbar status`` and the like. Only on rank 0."""

    def __init__(self, run: Run) -> None:
        self._every = run.config.tracking.log_every
        self._run = run
        self._started = round(time.time(), 3)

    def on_train_start(self, run: RunHandle) -> None:
        self._started = round(time.time(), 3)
        self._write(run, "training")

    def on_step(self, run: RunHandle, info: StepInfo) -> None:
        if info.step % self._every == 0 or info.step == 1:
            self._write(run, "training")

    def on_train_end(self, run: RunHandle) -> None:
        state: RunState = "complete" if self._run.is_complete() else "stopped"
        self._write(run, state)
        # a resumed run overwrites the status; the log keeps this one
        log_to_file(RunStatus(state, run.step, run.total_steps, time.time(), self._started).summary, logging.INFO)

    def on_exception(self, run: RunHandle, error: Exception) -> None:
        self._write(run, "failed")

    def write_if_complete(self, run: RunHandle) -> None:
        """Write that the run is complete, if it already was when this process started: the previous process may have
        died before writing it."""
        known = RunStatus.read(run.run_dir)
        if known is not None and known.state != "complete":
            self._write(run, "complete")

    def _write(self, run: RunHandle, state: RunState) -> None:
        if not self._run.owns_directory():
            return
        with suppress(OSError):  # such as a full disk: writing the checkpoint or the metrics will report it
            write_run_status(run.run_dir, state, run.step, run.total_steps, self._started)
