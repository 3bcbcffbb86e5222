"""drawbar's own callbacks: logging, evaluation with early stopping, saving, profiling.

The trainer calls them before the user's, in an order of its own. A step is saved before it is evaluated, because the
evaluation may fail; the scores are added to the checkpoint afterwards.
"""

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from statistics import fmean

import torch

from drawbar.config.schema.run_config import EvalSection, ProfileSection
from drawbar.data.loader import Loader
from drawbar.distributed.process_group import Distributed
from drawbar.errors import ExitCode, UserError
from drawbar.evaluation.scoring import Evaluation, EvaluationFailed, unknown_metric, write_results
from drawbar.launch.jobs.run_status import RunState, RunStatus, write_run_status
from drawbar.runtime.log import log_to_file, logger
from drawbar.tracking.console import Console
from drawbar.tracking.meters import Throughput, peak_memory
from drawbar.tracking.trackers import Trackers
from drawbar.train.callback import Callback, RunHandle
from drawbar.train.saver import Saver
from drawbar.train.step import RunProgress, StepInfo
from drawbar.train.stop import Reason, Stop


class StatusCallback(Callback):
    """``status.json`` of the run, for those who look at it from outside. Rank 0 alone has this callback.

    Args:
        is_complete: whether nothing is left to do.
    """

    def __init__(self, every: int, is_complete: Callable[[], bool]) -> None:
        self._every = every
        self._is_complete = is_complete

    def on_train_start(self, run: RunHandle) -> None:
        self._write(run, "training")

    def on_step(self, run: RunHandle, info: StepInfo) -> None:
        if info.step % self._every == 0 or info.step == 1:
            self._write(run, "training")

    def on_train_end(self, run: RunHandle) -> None:
        self._write(run, "complete" if self._is_complete() else "stopped")

    def on_exception(self, run: RunHandle, error: Exception) -> None:
        self._write(run, "failed")

    def on_nothing_left(self, run: RunHandle) -> None:
        """The run was complete when this process began; the process before it may have died before writing that."""
        known = RunStatus.read(run.run_dir)
        if known is not None and known.state != "complete":
            self._write(run, "complete")

    def _write(self, run: RunHandle, state: RunState) -> None:
        with suppress(OSError):  # such as a full disk: writing the checkpoint or the metrics will report it
            write_run_status(run.run_dir, state, run.step, run.total_steps)


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
        if info.step % self._every == 0 or info.step == 1 or info.last:
            check_finite(info, self._saver)
            values = self._values(info)
            with self._world.working(f"logging step {info.step}"):
                self._trackers.log(info.step, values)
                self._console.log(info.step, values)
            self._data_waits.clear()

    def _values(self, info: StepInfo) -> dict[str, float]:
        speed = self._meter.read()
        mfu = {} if self._mfu is None else {"train/mfu": speed * self._mfu}
        return {
            "train/loss": float(info.result.loss),
            "train/lr": info.result.lr,
            "train/grad_norm": float(info.result.grad_norm),
            "train/weight": info.result.num_targets,
            "train/epoch": self._loader.epoch,
            "train/skipped": info.progress.skipped,
            "train/tokens_per_second": speed,
            **mfu,
            "train/data_wait_seconds": fmean(self._data_waits),
            "train/peak_memory_gib": peak_memory(self._world.device) / 2**30,
        }


def check_finite(info: StepInfo, saver: Saver) -> None:
    """Stop a run whose loss or gradient norm is not finite, before it overwrites a good checkpoint."""
    found = {"loss": float(info.result.loss)}
    if not info.result.skipped:  # a skipped step (fp16 overflowed) has no finite norm, and does no harm
        found["gradient norm"] = float(info.result.grad_norm)
    for name, value in found.items():
        if not math.isfinite(value):
            raise UserError(
                f"the run has diverged, and stops: the {name} of step {info.step} is {value}",
                where="every checkpoint was written before that" if saver.saved else "there is no checkpoint yet",
                remedy="lower optim.lr, lengthen optim.warmup or set a smaller train.gradient_clip; "
                + (
                    "go on from the newest checkpoint with --fork NEWNAME, or begin again under another run.name"
                    if saver.saved
                    else "begin again under another run.name, or under this one when its folder is deleted"
                ),
                exit_code=ExitCode.FAILED,
            )


class EvaluateCallback(Callback):
    """Evaluation every few steps and at the end, never twice at one step; keeps the best score, and stops early.

    Args:
        evaluate: makes the evaluation; None if a wish to stop interrupted it, and the resumed run makes it anew.
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
        announce: Callable[[Mapping[str, float]], None],
    ) -> None:
        self._config = config
        self._evaluate = evaluate
        self._announce = announce
        self._folder = run_dir / "eval" / "validation"
        self._world = world
        self._trackers = trackers
        self._console = console
        self._stop = stop
        self._said_nan = False

    def on_train_start(self, run: RunHandle) -> None:
        last = run.step >= run.total_steps
        if self._config.at_start if run.step == 0 else owes_evaluation(self._config, run.progress, last):
            self._run(run.progress)

    def on_step(self, run: RunHandle, info: StepInfo) -> None:
        if owes_evaluation(self._config, info.progress, info.last):
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
        self._compare(progress, score)
        self._announce(values)

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
        if math.isnan(score) and not self._said_nan:
            self._said_nan = True
            what = "the %s of step %d is nan (as where all predictions are the same), so this step cannot be the best"
            logger.warning(what, self._config.metric, progress.step)
        best = progress.best_score
        better = best is None or (score < best if self._config.mode == "min" else score > best)
        if better and not math.isnan(score):
            progress.best_score, progress.best_step = score, progress.step
            progress.evaluations_since_best = 0
            return
        progress.evaluations_since_best += 1
        if out_of_patience(self._config, progress):
            logger.info(
                "early stop: no better %s in %d evaluations", self._config.metric, progress.evaluations_since_best
            )
            self._stop.request(Reason.EARLY)


def owes_evaluation(config: EvalSection, progress: RunProgress, last: bool) -> bool:
    """Whether an evaluation is due at the current step and has not been made yet."""
    due = last or (config.every is not None and progress.step % config.every == 0)
    return due and progress.evaluated_step != progress.step


def out_of_patience(config: EvalSection, progress: RunProgress) -> bool:
    """Whether the run is to stop early: its score has not got better for too long."""
    return config.patience is not None and progress.evaluations_since_best >= config.patience


class SaveCallback(Callback):
    """A checkpoint every few steps, where a callback asked for one, and at the end; before the evaluation of that step.

    Args:
        announce: calls ``on_save`` of all callbacks.
    """

    def __init__(
        self, every: int | None, saver: Saver, meter: Throughput, stop: Stop, announce: Callable[[int], None]
    ) -> None:
        self._every = every
        self._saver = saver
        self._meter = meter
        self._stop = stop
        self._announce = announce
        self._newest: StepInfo | None = None

    def on_step(self, run: RunHandle, info: StepInfo) -> None:
        self._newest = info
        is_due = self._every is not None and info.step % self._every == 0
        if info.last or is_due or self._stop.reason is Reason.SAVE:  # a callback asked for it before this step
            self.save(info)

    def on_train_end(self, run: RunHandle) -> None:
        if self._newest is not None and self._saver.saved != run.progress:
            self.save(self._newest)
        self._saver.wait()

    def save(self, info: StepInfo) -> None:
        """Save this step; if its checkpoint exists already, update only the progress in it."""
        check_finite(info, self._saver)
        is_new = self._saver.saved is None or self._saver.saved.step != info.step
        with self._meter.paused():
            self._saver.save(info.progress)
        if is_new:
            self._announce(info.step)


class SaveScoreCallback(Callback):
    """After an evaluation: saves a checkpoint at a new best score, or adds the score to this step's checkpoint."""

    def __init__(self, keep_best: bool, saver: Saver, save: Callable[[StepInfo], None]) -> None:
        self._keep_best = keep_best
        self._saver = saver
        self._save = save

    def on_train_start(self, run: RunHandle) -> None:
        if run.step > 0 and self._is_due(run.progress):  # its checkpoint exists: only the progress in it changes
            self._saver.save(run.progress)

    def on_step(self, run: RunHandle, info: StepInfo) -> None:
        if self._is_due(info.progress):
            self._save(info)

    def _is_due(self, progress: RunProgress) -> bool:
        saved = self._saver.saved
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
