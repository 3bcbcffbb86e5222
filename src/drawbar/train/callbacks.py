"""drawbar's own callbacks: logging, evaluation with early stopping, saving, profiling.

The trainer calls them before the user's, in an order of its own; only the start of training is announced to the user's
first, as an evaluation may be due at once. A step is saved before it is evaluated, because the
evaluation may fail; the progress in its checkpoint (best score, evaluated step) is updated afterwards.
"""

import logging
import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from statistics import fmean

import torch

from drawbar.config.schema.interval import interval_seconds
from drawbar.config.schema.run_config import EvalSection, ProfileSection
from drawbar.data.loader import Loader
from drawbar.distributed.process_group import Distributed
from drawbar.evaluation.scoring import Evaluation, EvaluationFailed, unknown_metric, write_results
from drawbar.launch.jobs.progress import LoggedProgress
from drawbar.launch.jobs.run_status import RunState, RunStatus, write_run_status
from drawbar.runtime.log import log_to_file, logger
from drawbar.tracking.console import Console
from drawbar.tracking.meters import Throughput, peak_memory
from drawbar.tracking.trackers import Trackers
from drawbar.train.callback import Callback, RunHandle
from drawbar.train.nan_check import check_finite
from drawbar.train.saver import Saver
from drawbar.train.step import RunProgress, StepInfo
from drawbar.train.stop import Reason, Stop
from drawbar.util.run_dir import BestScore


class StatusCallback(Callback):
    """Writes the run's ``status.json``, for ``drawbar status`` and the like. Rank 0 alone has this callback.

    Args:
        is_complete: whether nothing is left to do.
    """

    def __init__(self, every: int, is_complete: Callable[[], bool]) -> None:
        self._every = every
        self._is_complete = is_complete
        self._started = round(time.time(), 3)

    def on_train_start(self, run: RunHandle) -> None:
        self._started = round(time.time(), 3)
        self._write(run, "training")

    def on_step(self, run: RunHandle, info: StepInfo) -> None:
        if info.step % self._every == 0 or info.step == 1:
            self._write(run, "training")

    def on_train_end(self, run: RunHandle) -> None:
        state: RunState = "complete" if self._is_complete() else "stopped"
        self._write(run, state)
        # a run that goes on writes another status: the log keeps this one
        log_to_file(LoggedProgress(step=run.step, total=run.total_steps).ended_as(state), logging.INFO)

    def on_exception(self, run: RunHandle, error: Exception) -> None:
        self._write(run, "failed")

    def write_if_complete(self, run: RunHandle) -> None:
        """Write that the run is complete, where it was so when this process began: the process before may have died
        before writing it."""
        known = RunStatus.read(run.run_dir)
        if known is not None and known.state != "complete":
            self._write(run, "complete")

    def _write(self, run: RunHandle, state: RunState) -> None:
        with suppress(OSError):  # such as a full disk: writing the checkpoint or the metrics will report it
            write_run_status(run.run_dir, state, run.step, run.total_steps, self._started)


class LogCallback(Callback):
    """Metrics every few steps: the loss is that of the step's own global batch, so a resumed run logs the same."""

    def __init__(
        self,
        every: int,
        loader: Loader,
        world: Distributed,
        meter: Throughput,
        trackers: Trackers,
        console: Console,
        saver: Saver,
        mfu_of_one_token_per_second: float | None,
    ) -> None:
        self._every = every
        self._mfu = mfu_of_one_token_per_second
        self._saver = saver
        self._loader = loader
        self._world = world
        self._meter = meter
        self._trackers = trackers
        self._console = console
        self._data_waits: list[float] = []

    def on_step(self, run: RunHandle, info: StepInfo) -> None:
        self._meter.add(info.num_tokens)
        self._data_waits.append(info.data_wait_seconds)
        self._console.advance(info.step)
        is_due = info.step % self._every == 0 or info.step == 1 or info.last
        if is_due or info.step == self._saver.first_step:
            check_finite(info, self._saver)
        if is_due:
            values = self._values(info)
            with self._world.working(f"logging step {info.step}"):
                self._trackers.log(info.step, values)
                self._console.log(info.step, values)
            self._data_waits.clear()

    def _values(self, info: StepInfo) -> dict[str, float]:
        speed = self._meter.read()
        mfu = {} if self._mfu is None else {"train/mfu": speed * self._mfu}
        failed = self._saver.failed_saves
        return {
            "train/loss": float(info.result.loss),
            "train/lr": info.result.lr,
            "train/grad_norm": float(info.result.grad_norm),
            "train/weight": info.result.num_targets,
            "train/epoch": self._loader.epoch,
            "train/skipped": info.progress.skipped,
            f"train/{'tokens' if self._loader.counts_tokens else 'samples'}_per_second": speed,
            **mfu,
            **({"train/failed_saves": failed} if failed else {}),
            "train/data_wait_seconds": fmean(self._data_waits),
            "train/peak_memory_gib": peak_memory(self._world.device) / 2**30,
        }


class EvaluateCallback(Callback):
    """Evaluation every few steps and at the end, never twice at one step; keeps the best score, and stops early.

    Args:
        evaluate: runs the evaluation; returns None if a stop request interrupted it (the resumed run then evaluates
            again).
        confirm_best: ``Saver.confirm_best``.
        announce: calls ``on_evaluate`` of all callbacks.
    """

    def __init__(
        self,
        config: EvalSection,
        evaluate: Callable[[], Evaluation | None],
        run_dir: Path,
        world: Distributed,
        trackers: Trackers,
        console: Console,
        stop: Stop,
        confirm_best: Callable[[RunProgress], None],
        announce: Callable[[Mapping[str, float]], None],
    ) -> None:
        self._config = config
        self._evaluate = evaluate
        self._confirm_best = confirm_best
        self._announce = announce
        self._folder = run_dir / "eval" / "validation"
        self._world = world
        self._trackers = trackers
        self._console = console
        self._stop = stop
        self._warned_of_nan = False

    def on_train_start(self, run: RunHandle) -> None:
        self._show_best(run.progress)
        last = run.step >= run.total_steps
        is_due = self._config.at_start if run.step == 0 else evaluation_is_due(self._config, run.progress, last)
        if is_due:
            self._run(run.progress)

    def on_step(self, run: RunHandle, info: StepInfo) -> None:
        if evaluation_is_due(self._config, info.progress, info.last):
            self._run(info.progress)

    def _run(self, progress: RunProgress) -> None:
        try:
            evaluation = self._evaluate()
            if evaluation is None:
                logger.info("the evaluation of step %d is given up, and made when the run goes on", progress.step)
                return
            score = self._score(evaluation.scores)
        except EvaluationFailed as error:
            logger.warning("the evaluation of step %d failed: the run saves, and ends", progress.step)
            log_to_file(error.trace)
            self._stop.fail(error)
            return
        progress.evaluated_step = progress.step
        values = {f"eval/validation/{name}": score for name, score in evaluation.scores.items()}
        with self._world.working("writing the scores"):
            self._trackers.log(progress.step, values)
            self._console.evaluation(progress.step, values)
            if self._world.is_rank0:
                self._write(evaluation, progress.step)
        self._confirm_best(progress)
        self._compare(progress, score)
        self._show_best(progress)
        self._announce(values)

    def _show_best(self, progress: RunProgress) -> None:
        if progress.best_score is not None and progress.best_step is not None:
            self._console.best(
                BestScore(step=progress.best_step, metric=self._config.metric, score=progress.best_score)
            )

    def _score(self, scores: dict[str, float]) -> float:
        if self._config.metric not in scores:
            remedy = "set eval.metric to one of them, and begin again under another run.name"
            raise EvaluationFailed.of(unknown_metric(self._config.metric, scores, remedy), self._world)
        return scores[self._config.metric]

    def _write(self, evaluation: Evaluation, step: int) -> None:
        try:
            write_results(self._folder, evaluation, step)
        except OSError as error:
            logger.warning("%s could not be written, and the run goes on: %s", self._folder, error.strerror)

    def _compare(self, progress: RunProgress, score: float) -> None:
        if math.isnan(score) and not self._warned_of_nan:
            self._warned_of_nan = True
            what = "the %s of step %d is nan (as where all predictions are the same), so this step cannot be the best"
            logger.warning(what, self._config.metric, progress.step)
        best = progress.best_score
        better = best is None or (score < best if self._config.mode == "min" else score > best)
        if better and not math.isnan(score):
            progress.best_score, progress.best_step = score, progress.step
            progress.evaluations_since_best = 0
            return
        progress.evaluations_since_best += 1
        if patience_is_exhausted(self._config, progress):
            logger.info(
                "early stop: no better %s in %d evaluations", self._config.metric, progress.evaluations_since_best
            )
            self._stop.request(Reason.EARLY)


def evaluation_is_due(config: EvalSection, progress: RunProgress, last: bool) -> bool:
    """Whether an evaluation is due at the current step and has not been made yet."""
    due = last or (config.every is not None and progress.step % config.every == 0)
    return due and progress.evaluated_step != progress.step


def patience_is_exhausted(config: EvalSection, progress: RunProgress) -> bool:
    """Whether early stopping is due: no better score in the last ``eval.patience`` evaluations."""
    return config.patience is not None and progress.evaluations_since_best >= config.patience


class SaveCallback(Callback):
    """A checkpoint every few steps, where a callback asked for one, and at the end; before the evaluation of that step.

    Args:
        every: ``checkpoint.every``; a length of time is for ``TimedSaveCallback``.
        announce: calls ``on_save`` of all callbacks.
    """

    def __init__(
        self, every: int | str | None, saver: Saver, meter: Throughput, stop: Stop, announce: Callable[[int], None]
    ) -> None:
        self._every = every if isinstance(every, int) else None
        self._saver = saver
        self._meter = meter
        self._stop = stop
        self._announce = announce
        self._newest: StepInfo | None = None

    def on_step(self, run: RunHandle, info: StepInfo) -> None:
        self._newest = info
        if info.step == self._saver.first_step:  # before hours of steps that could not be saved
            self._saver.check_buffers()
        is_due = self._every is not None and info.step % self._every == 0
        if info.last or is_due or self._stop.reason is Reason.SAVE:  # a callback asked for it before this step
            self.save(info)

    def on_train_end(self, run: RunHandle) -> None:
        if self._newest is not None and not self._saver.has_saved(run.progress):
            self.save(self._newest)
        self._saver.wait()

    def save(self, info: StepInfo) -> None:
        """Save this step; if its checkpoint exists already, update only the progress in it."""
        check_finite(info, self._saver)
        is_new = self._saver.last_saved_progress is None or self._saver.last_saved_progress.step != info.step
        with self._meter.paused():
            self._saver.save(info.progress)
        if is_new:
            self._announce(info.step)


class TimedSaveCallback(Callback):
    """Requests a checkpoint when the last one is older than ``interval``. Rank 0 alone has this callback, as clocks
    differ.

    Args:
        interval: a length of time as in settings: ``30min``.
    """

    def __init__(self, interval: str) -> None:
        self._seconds = interval_seconds(interval)
        self._last = time.monotonic()

    def on_train_start(self, run: RunHandle) -> None:
        self._last = time.monotonic()

    def on_step(self, run: RunHandle, info: StepInfo) -> None:
        if time.monotonic() - self._last >= self._seconds:
            run.request_save()
            self._last = time.monotonic()

    def on_save(self, run: RunHandle, checkpoint: Path) -> None:
        self._last = time.monotonic()


class SaveScoreCallback(Callback):
    """After an evaluation: saves a checkpoint at a new best score, else updates the progress in this step's one."""

    def __init__(self, keep_best: bool, saver: Saver, save: Callable[[StepInfo], None]) -> None:
        self._keep_best = keep_best
        self._saver = saver
        self._save = save

    def on_train_start(self, run: RunHandle) -> None:
        # only the progress in that step's checkpoint changes; except after ``--resume PATH`` of another run's best one:
        # there a whole checkpoint is saved, which this run keeps as its own
        if run.step > 0 and self._is_due(run.progress):
            self._saver.save(run.progress)

    def on_step(self, run: RunHandle, info: StepInfo) -> None:
        if self._is_due(info.progress):
            self._save(info)

    def _is_due(self, progress: RunProgress) -> bool:
        saved = self._saver.last_saved_progress
        if saved is not None and saved.step == progress.step:
            return saved != progress
        return self._keep_best and progress.best_step == progress.step


class ProfileCallback(Callback):
    """A torch.profiler trace of some steps, one file a rank, for chrome://tracing or Perfetto."""

    def __init__(self, config: ProfileSection, run_dir: Path, world: Distributed) -> None:
        self._start = config.start
        self._last = config.start + config.steps - 1
        self._world = world
        self._path = run_dir / "profile" / f"rank-{world.rank:04d}.json"
        self._profiler: torch.profiler.profile | None = None

    def on_train_start(self, run: RunHandle) -> None:
        self._begin_if_next(run.step)

    def _begin_if_next(self, step: int) -> None:
        if step + 1 == self._start:
            self._profiler = torch.profiler.profile(record_shapes=True, profile_memory=True)
            self._profiler.start()

    def on_step(self, run: RunHandle, info: StepInfo) -> None:
        if info.step == self._last:
            self._finish()
        self._begin_if_next(info.step)

    def on_train_end(self, run: RunHandle) -> None:
        self._finish()

    def _finish(self) -> None:
        if self._profiler is None:
            return
        profiler, self._profiler = self._profiler, None
        with self._world.barrier_after("writing the profile"):
            try:
                profiler.stop()
                self._path.parent.mkdir(parents=True, exist_ok=True)
                profiler.export_chrome_trace(str(self._path))
            except (OSError, RuntimeError) as error:
                logger.warning("the profile could not be written, and the run goes on: %s", error)
                return
        logger.info("profile of steps %d to %d: %s", self._start, self._last, self._path)
