"""The trainer: builds the parts of a run, and runs the training loop, the same for every strategy."""

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from drawbar.checkpoint.directory import CheckpointDirectory
from drawbar.checkpoint.format import step_name
from drawbar.checkpoint.space import check_space, explain_disk_errors, required_bytes
from drawbar.config.io.compare import check_new_steps, check_not_fewer_steps
from drawbar.config.parallel_dims import ParallelDims
from drawbar.config.rules.rule_table import RULES, TRAIN_RULES, check_rules, check_world
from drawbar.config.schema.run_config import RunConfig
from drawbar.data.loader import Loader
from drawbar.distributed.process_group import Distributed
from drawbar.distributed.rank_info import RankInfo, choose_device
from drawbar.engines.build import build_engine, check_machine
from drawbar.engines.engine import Engine
from drawbar.errors import ExitCode
from drawbar.evaluation.scoring import Evaluation, Split, evaluate
from drawbar.launch.node.allreduce_check import check_allreduce
from drawbar.runtime.log import errors_in_log, logger, open_log_file, start_logging
from drawbar.runtime.seed import rng_state, seed_everything, set_rng_state, use_deterministic_kernels
from drawbar.runtime.streams import ignore_output_errors
from drawbar.tasks.causal_lm import CausalLM
from drawbar.tasks.padding import choose_padding_free
from drawbar.tasks.task import Task
from drawbar.tasks.task_registry import task_class
from drawbar.tasks.user_methods import check_signatures, name_failing_method
from drawbar.tracking.console import Console, make_console
from drawbar.tracking.meters import Throughput
from drawbar.tracking.tracker import TrackedRun
from drawbar.tracking.trackers import Trackers, make_trackers
from drawbar.train.agreed_steps import agreed_steps, make_step
from drawbar.train.batches import eval_micro_batch, load_data, make_augment, open_data
from drawbar.train.callback import (
    Callback,
    GuardedCallback,
    RunHandle,
    check_callbacks,
    make_callbacks,
    share_failures,
)
from drawbar.train.callbacks import (
    EvaluateCallback,
    LogCallback,
    ProfileCallback,
    SaveCallback,
    SaveScoreCallback,
    StatusCallback,
    TimedSaveCallback,
    evaluation_is_due,
    patience_is_exhausted,
)
from drawbar.train.check import check_on_samples, compare_with_neighbours, with_rows_alone
from drawbar.train.checkpoint_layouts import checkpoint_bytes
from drawbar.train.compile_payoff import logging_compile_payoff
from drawbar.train.core_wait import CoreWaitCallback
from drawbar.train.eval_mode import resolve_mode
from drawbar.train.initial_model import InitialModel
from drawbar.train.memory_probe import fit_micro_batch, memory_of
from drawbar.train.remote_start import find_start_on_disk_or_store, finish_uploads
from drawbar.train.restore import restore_engine, restore_rest, with_original_choices
from drawbar.train.run_dir_lock import RunDirLock
from drawbar.train.rundir import RunStart, find_start, renamed, run_dir_of, without_data_rebuild, write_config
from drawbar.train.saver import Saver
from drawbar.train.setup import (
    build_task,
    check_script,
    count_steps,
    log_changed_schedule,
    save_task,
    warn_of_one_process,
    warn_of_untested_versions,
)
from drawbar.train.shared_disks import check_nodes_share_disk
from drawbar.train.step import RunProgress, StepInfo
from drawbar.train.stop import Reason, Stop
from drawbar.train.utilization import mfu_of_one_token_per_second


@dataclass(frozen=True)
class Outcome:
    """How a call of :meth:`Trainer.fit` ended."""

    exit_code: ExitCode
    run_dir: Path
    progress: RunProgress


class Trainer:
    """Trains one run.

    Args:
        config: the whole configuration: ``config`` of what ``drawbar.load_config`` returns.
        task: the task's class; by default the one that ``task.type`` names.
        resume: ``auto`` (go on with the run if it exists), ``never``, or a checkpoint: its path, ``latest``,
            ``best`` or a step; one of the run's own that is not the newest needs ``fork``.
        fork: name of a new run, which begins from a checkpoint of the run that ``config`` names.
        weights_only: do not take the optimizer's state of that checkpoint, or of the one that ``resume`` names.
        callbacks: called after those that the setting ``callbacks`` names.
        notes: lines for the log, about where ``config`` comes from.
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
        self.source_config = config
        self.config = config if fork is None else renamed(config, fork)
        self.task_type = task or task_class(config.task.type)
        check_signatures(self.task_type)
        self.resume = resume
        self.fork = fork
        self.weights_only = weights_only
        self.notes = notes
        self._lock = RunDirLock(self.config.run_dir)

    def fit(self) -> Outcome:
        """Train until the last step, an early stop or a signal; every rank calls it.

        Raises:
            UserError: the request is wrong, or the run failed for a reason that the user can mend.
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
        for note in self.notes:
            logger.info("%s", note)
        try:
            with (
                errors_in_log(),
                explain_disk_errors(self.config.run_dir),
                Distributed(rank_info, device, self.config.launch.timeout, dims) as world,
                Stop(world) as stop,
                InitialModel(self.config.run_dir) as self._initial_model,
            ):
                check_allreduce(world, self.config.run_dir)
                return self._fit(world, stop, console, Trackers(trackers if world.is_rank0 else ()))
        finally:
            console.stop()
            self._lock.release()

    def _fit(self, world: Distributed, stop: Stop, console: Console, trackers: Trackers) -> Outcome:
        config = self.config
        shares_disk = check_nodes_share_disk(config, world)
        start = world.from_rank0(self._find_start, "looking for the newest checkpoint")
        if start.refusal is not None:
            raise start.refusal
        self.config = config = config.model_copy(update={"eval": resolve_mode(config.eval, start.eval_mode)})
        if config.data.rebuild and world.from_rank0((config.run_dir / "config.yaml").exists, "looking for the run"):
            logger.info("data.rebuild is ignored, as the run exists already; `drawbar prepare` encodes its data anew")
            config = without_data_rebuild(config)
        source_run_dir = run_dir_of(start.checkpoint, config.run_dir)
        initial_model = self._initial_model.provide(config, source_run_dir, self._lock.take, world)
        if config.run.deterministic:
            use_deterministic_kernels()
        seed_everything(config.run.seed)
        if start.checkpoint is not None and not start.forked:
            check_script(self.task_type, config)
            config = with_original_choices(config, start.checkpoint, world)
        config = check_machine(config, world)
        has_checkpoint = start.checkpoint is not None
        task = build_task(
            self.task_type, config, world, source_run_dir, has_checkpoint=has_checkpoint, initial_model=initial_model
        )
        of_data = {"task": task.run_config.task}  # with the columns that the data have
        config, self.config = config.model_copy(update=of_data), self.config.model_copy(update=of_data)
        config = choose_padding_free(task, config, world.device)
        opened = open_data(task, config, world)
        with name_failing_method(task):
            engine = build_engine(task, config, world)
        config = with_rows_alone(task, engine, config)
        if start.checkpoint is not None:
            start, rest = restore_engine(start, engine, world)
        tried = check_on_samples(task, engine, opened, config, world, console)
        loader, train, validation = load_data(task, opened, config, world, console)
        compare_with_neighbours(task, engine, train or tried)
        engine.total_steps = total_steps = count_steps(config.train, loader.steps_per_epoch)
        resumed = start.checkpoint is not None and not start.forked
        micro_batch_dir = source_run_dir if resumed else config.run_dir
        found = fit_micro_batch(loader, engine, memory_of(world.device), micro_batch_dir, resumed)

        seed_everything(config.run.seed, world.dims.seed_rank(world.rank))  # dropout differs by rank, but for tp ranks
        progress = RunProgress()
        if start.checkpoint is not None:
            progress = restore_rest(start, rest, config.run.seed, loader, validation, world)
            check_not_fewer_steps(progress.step, total_steps, config.train)
            if source_run_dir != config.run_dir:
                check_new_steps(progress.step, total_steps, config.train)
            log_changed_schedule(start.changed_schedule, progress.step, total_steps, config.optim)
        self._open(task, engine, world, start)
        if found is not None and world.is_rank0:
            found.save(config.run_dir)
        parts = (config, world, shares_disk, stop, console, trackers, task, engine, loader)
        _Run(*parts, found is not None, validation, progress, total_steps, self.callbacks).train()
        engine.close()
        return Outcome(stop.exit_code, config.run_dir, progress)

    def _find_start(self) -> RunStart:
        find = partial(find_start, self.source_config, self.resume, self.fork, self.weights_only)
        self._lock.take_if_run()  # before the disk is searched: another process may write there
        start = find_start_on_disk_or_store(find, self.config, self.resume)
        self._lock.take_if_run()  # the run directory may have been downloaded from the object store just now
        return start

    def _open(self, task: Task, engine: Engine, world: Distributed, start: RunStart) -> None:
        """Create or update the run directory; call it only when everything is ready to train."""
        folder = self.config.run_dir
        checkpoints = CheckpointDirectory(folder / "checkpoints")
        world.barrier("loading the checkpoint")  # all ranks have read it: remove_leftovers() below may rename it
        with world.barrier_after("opening the run directory"):
            if world.is_rank0:
                checkpoints.set_aside(start.unusable)
                saved = len(checkpoints.steps())
                check_space(folder, required_bytes(checkpoint_bytes(engine), self.config.checkpoint.keep, saved))
                self._lock.take()
                write_config(self.config, start)  # first: from here on the same command resumes this run
                save_task(task, folder)
                checkpoints.remove_leftovers()
        open_log_file(folder, world.rank)


@dataclass
class _Run:
    """The parts of a run, ready to train."""

    config: RunConfig
    world: Distributed
    shares_disk: bool
    stop: Stop
    console: Console
    trackers: Trackers
    task: Task
    engine: Engine
    loader: Loader
    uncompiled_step_fits: bool  # true where trial steps (not compiled) chose the micro-batch's size
    validation: Split | None
    progress: RunProgress
    total_steps: int
    user_callbacks: Sequence[Callback]
    callbacks: list[Callback] = field(default_factory=list)
    meter: Throughput = field(default_factory=Throughput)

    def __post_init__(self) -> None:
        rank_and_size = (self.world.rank, self.world.size)
        self.handle = RunHandle(
            self.config, self.progress, *rank_and_size, self.total_steps, _stop=self.stop, _log=self.trackers.log
        )

    def train(self) -> None:
        """Train, unless the run is complete."""
        if self._is_complete():
            if self.world.is_rank0:
                StatusCallback(self.config.tracking.log_every, self._is_complete).write_if_complete(self.handle)
            finish_uploads(self.config, self.world, self.stop)
            early = "" if self._all_steps_done else ", and stopped early"
            self.console.message(f"{self.config.run.name} is complete: it has made {self.progress.step} steps{early}")
            return
        resume_step = self.progress.step or None  # None without a checkpoint: trackers then drop all older values
        settings = self.config.model_dump(mode="json")
        self.trackers.start(
            TrackedRun(self.config.run_dir, settings, resume_step, evaluated=not self._evaluation_is_due)
        )
        try:
            has_saved = self._train()
        except Exception as error:
            for callback in self.callbacks:
                callback.on_exception(self.handle, error)
            raise
        finally:
            with self.world.working("finishing the trackers"):
                self.trackers.finish()
        self.console.message(self._final_message(has_saved))

    @property
    def _all_steps_done(self) -> bool:
        return self.progress.step >= self.total_steps

    @property
    def _evaluation_is_due(self) -> bool:
        return self.validation is not None and evaluation_is_due(
            self.config.eval, self.progress, last=self._all_steps_done
        )

    def _is_complete(self) -> bool:
        """Whether the run is complete: all steps made and evaluated, or stopped early."""
        return (self._all_steps_done and not self._evaluation_is_due) or patience_is_exhausted(
            self.config.eval, self.progress
        )

    def _train(self) -> bool:
        """Train, and say whether the run has a checkpoint."""
        saver = Saver(
            self.config,
            self.engine,
            self.loader,
            self.world,
            self.shares_disk,
            self.stop,
            self.progress,
            self.validation,
        )
        with closing(saver), closing(self.loader):  # a save that has begun is finished, even where a step fails
            guarded = [GuardedCallback(callback, self.stop, self.world) for callback in self.user_callbacks]
            self.callbacks += [*self._own_callbacks(saver), *guarded]
            self._loop(guarded)
        failure = self.stop.failure()
        if failure is not None:
            raise failure
        return saver.last_saved_progress is not None

    def _final_message(self, has_saved: bool) -> str:
        """The last line of output: where the run directory is, and the final scores."""
        step, best = self.progress.step, self.progress.best_step
        if not has_saved:
            return f"{self.config.run_dir}: stopped before its first step; the same command begins again"
        if not self._is_complete():
            return f"{self.config.run_dir}: saved at step {step}; the same command goes on from there"
        score = f"; best {self.config.eval.metric}: {self.progress.best_score:.4g}, at step {best}" if best else ""
        return f"{self.config.run_dir}: {step:,} steps made{score}; next: {self._next_command()}"

    def _next_command(self) -> str:
        if hasattr(self.engine.meta_model, "generate") and isinstance(self.task, CausalLM):
            return f'drawbar generate {self.config.run_dir} --prompt "…"'
        if self.task.predicts:
            return f"drawbar predict {self.config.run_dir} --input FILE --output FILE"
        return f"drawbar report {self.config.run_dir}"

    def _loop(self, guarded: Sequence[GuardedCallback]) -> None:
        """The loop, the same for every strategy."""
        self.console.start(self.total_steps, self.progress.step)
        own = [callback for callback in self.callbacks if callback not in guarded]
        for callback in (*guarded, *own):  # the user's first: an evaluation may be due at once
            callback.on_train_start(self.handle)
        self.stop.begin()
        steps = self.loader.steps(self.progress.step, self.total_steps)
        steps = logging_compile_payoff(steps, self.engine, self.meter, self.uncompiled_step_fits)
        for agreed in agreed_steps(steps, self.loader, self.engine, self.stop, self.world):
            result = make_step(self.engine, agreed)  # forward, backward, reduce, clip, update
            self.progress.advance(result)
            last, waited = agreed.step == self.total_steps, self.loader.waited
            info = StepInfo(agreed.step, result, self.progress, last, agreed.num_tokens, data_wait_seconds=waited)
            for callback in self.callbacks:
                callback.on_step(self.handle, info)
        if self.stop.reason >= Reason.FAILED:
            share_failures(guarded, self.world)
        for callback in self.callbacks:
            callback.on_train_end(self.handle)

    def _own_callbacks(self, saver: Saver) -> list[Callback]:
        config, world, stop, run_dir = self.config, self.world, self.stop, self.config.run_dir
        log_every, save_every = config.tracking.log_every, config.checkpoint.every
        save = SaveCallback(save_every, saver, self.meter, stop, self._announce_save)
        mfu = mfu_of_one_token_per_second(self.engine, config, world)
        callbacks: list[Callback] = [
            LogCallback(log_every, self.loader, world, self.meter, self.trackers, self.console, saver, mfu),
            save,
        ]
        if self.validation is not None:
            parts = (self.trackers, self.console, stop, saver.confirm_best)
            callbacks += [
                EvaluateCallback(config.eval, self._evaluate, run_dir, world, *parts, self._announce_scores),
                SaveScoreCallback(config.checkpoint.keep_best, saver, save.save),
            ]
        if world.device.type == "cpu" and torch.get_num_threads() > 1:
            callbacks.append(CoreWaitCallback())
        if world.is_rank0:
            callbacks.append(StatusCallback(log_every, self._is_complete))
            if isinstance(save_every, str):
                callbacks.append(TimedSaveCallback(save_every))
        if config.tracking.profile is not None:  # first, so that a trace ends before an evaluation or a save
            callbacks.insert(0, ProfileCallback(config.tracking.profile, run_dir, world))
        return callbacks

    def _announce_scores(self, scores: Mapping[str, float]) -> None:
        for callback in self.callbacks:
            callback.on_evaluate(self.handle, scores)

    def _announce_save(self, step: int) -> None:
        for callback in self.callbacks:
            callback.on_save(self.handle, self.config.run_dir / "checkpoints" / step_name(step))

    def _evaluate(self) -> Evaluation | None:
        """Evaluate on the validation data, leaving every random generator as it was; None if a rank wants to stop."""
        assert self.validation is not None
        state = rng_state(self.world.device)
        try:
            with self.meter.paused():
                return evaluate(
                    self.engine,
                    self.task,
                    self.validation,
                    self.world,
                    eval_micro_batch(self.config, has_tokens="input_ids" in self.validation.samples.fields),
                    make_augment(self.task, self.config, train=False),
                    progress=lambda done, total: self.console.phase("evaluating", done, total),
                    stop_wanted=lambda: self.stop.wanted,
                )
        finally:
            set_rng_state(state, self.world.device)
