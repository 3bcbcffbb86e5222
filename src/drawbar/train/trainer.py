"""The trainer: builds the parts of a run, and runs the training loop, which is the same for every strategy."""

import gc
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from drawbar.checkpoint.space import explain_disk_errors
from drawbar.config.parallel_dims import ParallelDims
from drawbar.config.rules.rule_table import RULES, TRAIN_RULES, check_rules, check_world
from drawbar.config.schema.run_config import RunConfig
from drawbar.distributed.process_group import Distributed
from drawbar.distributed.rank_info import RankInfo, choose_device
from drawbar.errors import ExitCode
from drawbar.launch.allreduce_check import check_allreduce
from drawbar.runtime.log import errors_in_log, ignore_output_errors, logger, start_logging
from drawbar.tasks.causal_lm import CausalLM
from drawbar.tasks.task import Task
from drawbar.tasks.task_registry import task_class
from drawbar.tasks.user_methods import check_signatures
from drawbar.tracking.console import make_console
from drawbar.tracking.tracker import TrackedRun
from drawbar.tracking.trackers import Trackers, make_trackers
from drawbar.train.callback import Callback, GuardedCallback, check_callbacks, make_callbacks, share_failures
from drawbar.train.callbacks import own_callbacks
from drawbar.train.callbacks.status import StatusCallback
from drawbar.train.compile_payoff import logging_compile_payoff
from drawbar.train.initial_model import InitialModel
from drawbar.train.prepare import Request, prepare_run
from drawbar.train.remote_start import finish_uploads
from drawbar.train.run import Run
from drawbar.train.run_dir_lock import RunDirLock
from drawbar.train.rundir import renamed
from drawbar.train.setup import warn_of_one_process, warn_of_untested_versions
from drawbar.train.spikes import SpikeWatch
from drawbar.train.step import RunProgress, StepInfo
from drawbar.train.stop import Reason, Stop
from drawbar.train.synchronized_steps import make_step, synchronized_steps


@dataclass(frozen=True)
class Outcome:
    """How a call of :meth:`Trainer.fit` ended."""

    exit_code: ExitCode
    run_dir: Path
    progress: RunProgress


class Trainer:
    """Trains one run.

    Args:
        config: the configuration: the ``config`` attribute of the result of ``drawbar.load_config``.
        task: the task's class; defaults to the one that ``task.type`` names.
        resume: ``auto`` (resume the run if it exists), ``never``, or a checkpoint: its path, ``latest``, ``best`` or a
            step; a checkpoint of the run itself other than the newest needs ``fork``.
        fork: name of a new run that starts from a checkpoint of the run that ``config`` names.
        weights_only: do not load the optimizer state of that checkpoint, or of the one that ``resume`` names.
        callbacks: called after those in the setting ``callbacks``.
        notes: lines for the log about the origin of ``config``.
    """

    def __init__(
        self,
        config: RunConfig,
        task: type[Task] | None = None,
        *,
        resume: str = "auto",
        fork: str | None = None,
        weights_only: bool = False,
        callbacks: Sequence[Callback] = (),
        notes: Sequence[str] = (),
    ) -> None:
        check_rules(config, RULES + TRAIN_RULES)
        self.callbacks = [*make_callbacks(config.callbacks), *callbacks]
        check_callbacks(self.callbacks)
        self.config = config if fork is None else renamed(config, fork)
        task_type = task or task_class(config.task.type)
        check_signatures(task_type)
        self._request = Request(self.config, config, task_type, resume, fork, weights_only)
        self._notes = notes

    def fit(self) -> Outcome:
        """Train until the last step, an early stop or a signal. Every rank must call it.

        Raises:
            UserError: the request is invalid, or the run failed for a reason that the user can fix.
        """
        trackers = make_trackers(self.config.tracking)
        rank_info = RankInfo.from_environment()
        check_world(self.config, rank_info.world_size)
        device = choose_device(self.config.device, rank_info)
        dims = ParallelDims.of(self.config.parallel, rank_info.world_size)
        ignore_output_errors()
        console = make_console(rank_info.is_rank0)
        start_logging(rank_info.rank, console.logging_handler())
        warn_of_one_process(self.config, device)
        warn_of_untested_versions()
        for note in self._notes:
            logger.info("%s", note)
        lock = RunDirLock(self.config.run_dir)
        launch = self.config.launch
        world = Distributed(rank_info, device, launch.timeout, dims, launch.limits)
        try:
            with (
                errors_in_log(),
                explain_disk_errors(self.config.run_dir),
                Stop(world) as stop,  # outside: a signal while the ranks part must not ask for a restart
                world,
                InitialModel(self.config.run_dir) as initial_model,
            ):
                check_allreduce(world, self.config.run_dir)
                request = self._request
                while True:
                    own_trackers = Trackers(trackers if world.is_rank0 else ())
                    run = prepare_run(request, lock, initial_model, world, stop, console, own_trackers)
                    train(run, self.callbacks)
                    run.engine.close()
                    if not run.goes_back:
                        return Outcome(_exit_code(run), run.config.run_dir, run.progress)
                    request, trackers = request.again(), make_trackers(self.config.tracking)
                    del run
                    gc.collect()  # the model is about to be built again
                    world.begin_step(0)
        finally:
            console.stop()
            lock.release()


def train(run: Run, user_callbacks: Sequence[Callback]) -> None:
    """Train, unless the run is complete. Collective."""
    if run.is_complete():
        if run.world.is_rank0:
            StatusCallback(run).write_if_complete(run.handle)
        finish_uploads(run.config, run.world, run.stop)
        early = "" if run.all_steps_done else ", and stopped early"
        run.console.message(f"{run.config.run.name} is complete: it has made {run.progress.step} steps{early}")
        return
    resume_step = run.progress.step or None  # None without a checkpoint: trackers then drop all older values
    settings = run.config.model_dump(mode="json")
    run.trackers.start(TrackedRun(run.config.run_dir, settings, resume_step, evaluated=not run.evaluation_is_due))
    try:
        with closing(run.make_saver()), closing(run.loader):  # a save in progress is finished even if a step fails
            guarded = [GuardedCallback(callback, run.stop, run.world) for callback in user_callbacks]
            own = own_callbacks(run)
            run.callbacks += [*own, *guarded]
            _loop(run, own, guarded)
        failure = run.stop.failure()
        if failure is not None:
            raise failure
    except Exception as error:
        for callback in run.callbacks:
            callback.on_exception(run.handle, error)
        raise
    finally:
        with run.world.working("finishing the trackers"):
            run.trackers.finish()
    if not run.goes_back:
        run.console.message(_final_message(run))


def _loop(run: Run, own: Sequence[Callback], guarded: Sequence[GuardedCallback]) -> None:
    """The training loop, the same for every strategy."""
    run.console.start(run.total_steps, run.progress.step)
    for callback in (*guarded, *own):  # the user's first: an evaluation may be due immediately
        callback.on_train_start(run.handle)
    run.stop.begin()
    steps = run.loader.steps(run.progress.step, run.total_steps)
    steps = logging_compile_payoff(steps, run.engine, run.meter, run.uncompiled_step_fits)
    spikes = SpikeWatch(run)
    for agreed in synchronized_steps(steps, run.loader, run.engine, run.stop, run.world):
        result = make_step(run.engine, agreed)  # forward, backward, reduce, clip, update
        if spikes.look(agreed, result):
            asked_before = run.stop.reason
            run.goes_back = not run.stop.agree()
            if Reason.SAVE in (asked_before, run.stop.reason):
                run.stop.request(Reason.SAVE)  # a callback's: the next step is saved
            break
        run.progress.advance(result)
        last, waited = agreed.step == run.total_steps, run.loader.waited
        info = StepInfo(agreed.step, result, run.progress, last, agreed.num_tokens, data_wait_seconds=waited)
        for callback in run.callbacks:
            callback.on_step(run.handle, info)
    spikes.warn()
    if run.stop.reason >= Reason.FAILED:
        share_failures(guarded, run.world)
    for callback in own if run.goes_back else run.callbacks:
        callback.on_train_end(run.handle)


def _exit_code(run: Run) -> ExitCode:
    """DONE for a complete run, even if a signal came in its last step: there is nothing to start again for."""
    was_signalled = run.stop.reason in (Reason.REQUEUE, Reason.INTERRUPTED)
    return ExitCode.DONE if was_signalled and run.is_complete() else run.stop.exit_code


def _final_message(run: Run) -> str:
    """The last line of output: the run directory and the final scores."""
    folder, step, best = run.config.run_dir, run.progress.step, run.progress.best_step
    if run.saver.last_saved_progress is None:
        return f"{folder}: stopped before its first step; the same command starts over"
    if not run.is_complete():
        return f"{folder}: saved at step {step}; the same command resumes from there"
    score = f"; best {run.config.eval.metric}: {run.progress.best_score:.4g}, at step {best}" if best else ""
    return f"{folder}: {step:,} steps made{score}; next: {_next_command(run)}"


def _next_command(run: Run) -> str:
    if hasattr(run.engine.meta_model, "generate") and isinstance(run.task, CausalLM):
        return f'drawbar generate {run.config.run_dir} --prompt "…"'
    if run.task.predicts:
        return f"drawbar predict {run.config.run_dir} --input FILE --output FILE"
    return f"drawbar report {run.config.run_dir}"
