"""The trainer: it puts the parts of a run together, and runs the loop. Nothing in it depends on the strategy."""

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import torch

from drawbar.checkpoint.directory import CheckpointDirectory
from drawbar.checkpoint.format import step_name
from drawbar.checkpoint.space import check_space, check_writable, explain_full_disk, required_bytes
from drawbar.config.io.compare import check_length
from drawbar.config.parallel_dims import ParallelDims
from drawbar.config.rules.rule_table import RULES, TRAIN_RULES, check_rules, check_world
from drawbar.config.schema.run_config import RunConfig
from drawbar.data.loader import Loader
from drawbar.distributed.process_group import Distributed
from drawbar.distributed.rank_info import RankInfo, choose_device
from drawbar.engines.build import build_engine
from drawbar.engines.engine import Engine
from drawbar.errors import ExitCode
from drawbar.evaluation.scoring import Evaluation, Split, evaluate
from drawbar.launch.node.allreduce_check import check_links
from drawbar.parallel.precision import choose_formats
from drawbar.runtime.log import errors_in_log, logger, open_log_file, start_logging
from drawbar.runtime.seed import rng_state, seed_everything, set_rng_state, use_deterministic_kernels
from drawbar.runtime.streams import ignore_output_errors
from drawbar.tasks.overrides import check_signatures, name_failing_method
from drawbar.tasks.padding import choose_padding_free
from drawbar.tasks.task import Task
from drawbar.tasks.task_registry import task_class
from drawbar.tracking.console import Console, make_console
from drawbar.tracking.meters import Throughput
from drawbar.tracking.tracker import TrackedRun
from drawbar.tracking.trackers import Trackers, make_trackers
from drawbar.train.agreed_steps import agreed_steps
from drawbar.train.batch_making import make_augment
from drawbar.train.batches import OpenedSplit, eval_micro_batch, first_samples, load_data, open_data
from drawbar.train.best import check_mode, settle_mode
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
    out_of_patience,
    owes_evaluation,
)
from drawbar.train.check import check_evaluation, check_task
from drawbar.train.compile_payoff import logging_compile_payoff
from drawbar.train.core_wait import CoreWaitCallback
from drawbar.train.memory_probe import fit_micro_batch, memory_of
from drawbar.train.node_local import Disks, find_start_on_all_disks, look_at_disks
from drawbar.train.rundir import RunStart, find_start, lock_run_dir, renamed, without_rebuild, write_config
from drawbar.train.saver import Saver, as_it_began, checkpoint_bytes, restore_engine, restore_position
from drawbar.train.setup import (
    build_task,
    count_steps,
    explain_chat_label_change,
    log_changed_length,
    save_task,
    warn_of_one_process,
)
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
        resume: ``auto`` (go on with the run if it exists), ``never``, or the path of a checkpoint.
        fork: name of a new run, which begins from a checkpoint of the run that ``config`` names.
        callbacks: called after those that the setting ``callbacks`` names.
    """

    def __init__(
        self,
        config: RunConfig,
        task: type[Task] | None = None,
        *,
        resume: str = "auto",
        fork: str | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        check_rules(config, RULES + TRAIN_RULES)
        self.callbacks = [*make_callbacks(config.callbacks), *callbacks]
        check_callbacks(self.callbacks)
        self.source = config
        self.config = config if fork is None else renamed(config, fork)
        self.task_type = task or task_class(config.task.type)
        check_signatures(self.task_type)
        self.resume = resume
        self.fork = fork
        self._lock: IO[str] | None = None

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
        try:
            with (
                errors_in_log(),
                explain_full_disk(self.config.run_dir),
                Distributed(rank_info, device, self.config.launch.timeout, dims) as world,
                Stop(world) as stop,
            ):
                check_links(world, self.config.run_dir)
                return self._fit(world, stop, console, Trackers(trackers if world.is_rank0 else ()))
        finally:
            console.stop()
            if self._lock is not None:
                self._lock.close()
                self._lock = None  # another ``fit`` takes it anew

    def _fit(self, world: Distributed, stop: Stop, console: Console, trackers: Trackers) -> Outcome:
        config = self.config
        disks = look_at_disks(Path(config.run.dir), world)
        start = find_start_on_all_disks(self._find_start, disks, world)
        settled = settle_mode(config.eval, start.eval_mode)
        self.config = config = config.model_copy(update={"eval": settled})
        if config.data.rebuild and world.from_rank0((config.run_dir / "config.yaml").exists, "looking for the run"):
            logger.info("data.rebuild is ignored, as the run exists already; `drawbar prepare` encodes its data anew")
            config = without_rebuild(config)
        if config.run.deterministic:
            use_deterministic_kernels()
        seed_everything(config.run.seed)

        if start.checkpoint is not None and not start.forked:
            config = as_it_began(config, start.checkpoint, world.device)  # "auto" becomes what the run began with
        config = choose_formats(config, world.device)
        origin = config.run_dir if start.checkpoint is None else start.checkpoint.resolve().parent.parent
        task = build_task(self.task_type, config, world, origin, has_checkpoint=start.checkpoint is not None)
        config = choose_padding_free(task, config, world.device)
        opened = open_data(task, config, world)
        with name_failing_method(task):
            engine = build_engine(task, config, world)
        if start.checkpoint is not None:
            rest = restore_engine(start.checkpoint, start.forked, engine, world)
        self._try_out(task, engine, opened, config, world, console)
        loader, validation = load_data(task, opened, config, world, console)
        engine.total_steps = total_steps = count_steps(config.train, loader.steps_per_epoch)
        resumed = start.checkpoint is not None and not start.forked
        found = fit_micro_batch(loader, engine, memory_of(world.device), origin if resumed else config.run_dir, resumed)

        seed_everything(config.run.seed, world.dims.seed_rank(world.rank))  # ranks' dropout differs from here on
        progress = RunProgress()
        if start.checkpoint is not None:
            of_run = (start.checkpoint, rest, start.forked, config.run.seed)
            with explain_chat_label_change(task, origin):
                progress = restore_position(*of_run, loader, validation, world)
            check_length(progress.step, total_steps, config.train)
            log_changed_length(start.changed_length, progress.step, total_steps, config.optim)
        self._open(task, engine, world, disks, start)
        if found is not None and disks.is_writer:
            found.save(config.run_dir)
        parts = (config, world, disks, stop, console, trackers, task, engine, loader)
        _Run(*parts, found is not None, validation, progress, total_steps, self.callbacks).train()
        engine.close()
        return Outcome(stop.exit_code, config.run_dir, progress)

    def _try_out(
        self,
        task: Task,
        engine: Engine,
        opened: tuple[OpenedSplit, OpenedSplit | None],
        config: RunConfig,
        world: Distributed,
        console: Console,
    ) -> None:
        """Find what is wrong with the task, the model or the settings on a few samples: encoding all samples may take
        hours, and a wrong request must leave no files behind."""
        train, validation = opened
        check_task(task, engine, first_samples(train, task, config, world, console))
        if validation is not None:
            first = first_samples(validation, task, config, world, console)
            check_evaluation(task, engine, first, config.eval.metric)
            check_mode(config.eval)

    def _find_start(self) -> RunStart:
        check_writable(Path(self.config.run.dir))
        if self.config.run_dir.is_dir():
            self._lock = lock_run_dir(self.config.run_dir)  # first: another process may be writing a checkpoint
        return find_start(self.source, self.resume, self.fork)

    def _open(self, task: Task, engine: Engine, world: Distributed, disks: Disks, start: RunStart) -> None:
        """Create or update the run directory; call it only when everything is ready to train."""
        folder = self.config.run_dir
        checkpoints = CheckpointDirectory(folder / "checkpoints")
        world.barrier("loading the checkpoint")  # all ranks have read it: clean() below may rename it
        with world.barrier_after("opening the run directory"):
            if disks.is_writer:
                checkpoints.set_aside(start.unusable)
                saved = len(checkpoints.steps())
                check_space(folder, required_bytes(checkpoint_bytes(engine), self.config.checkpoint.keep, saved))
                folder.mkdir(parents=True, exist_ok=True)
                self._lock = self._lock or lock_run_dir(folder)
                write_config(self.config)  # first: from here on the same command resumes this run
                save_task(task, folder)
                checkpoints.clean()
        open_log_file(folder, world.rank)


@dataclass
class _Run:
    """The parts of a run, ready to train."""

    config: RunConfig
    world: Distributed
    disks: Disks
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
                StatusCallback(self.config.tracking.log_every, self._is_complete).on_nothing_left(self.handle)
            early = "" if self._made_all else ", and stopped early"
            self.console.message(f"{self.config.run.name} is complete: it has made {self.progress.step} steps{early}")
            return
        resume_step = self.progress.step or None  # None without a checkpoint: trackers then drop all older values
        settings = self.config.model_dump(mode="json")
        self.trackers.start(TrackedRun(self.config.run_dir, settings, resume_step, evaluated=not self._owes_evaluation))
        try:
            self._train()
        except Exception as error:
            for callback in self.callbacks:
                callback.on_exception(self.handle, error)
            raise
        finally:
            with self.world.working("finishing the trackers"):
                self.trackers.finish()
        self.console.message(self._farewell())

    @property
    def _made_all(self) -> bool:
        return self.progress.step >= self.total_steps

    @property
    def _owes_evaluation(self) -> bool:
        return self.validation is not None and owes_evaluation(self.config.eval, self.progress, last=self._made_all)

    def _is_complete(self) -> bool:
        """Whether nothing is left to do: all steps are made, and evaluated, or the run stopped early."""
        return (self._made_all and not self._owes_evaluation) or out_of_patience(self.config.eval, self.progress)

    def _train(self) -> None:
        saver = Saver(
            self.config, self.engine, self.loader, self.world, self.disks, self.stop, self.progress, self.validation
        )
        with closing(saver), closing(self.loader):  # a save that has begun is finished, even where a step fails
            self.callbacks += self._own_callbacks(saver)
            guarded = [GuardedCallback(callback, self.stop, self.world) for callback in self.user_callbacks]
            self.callbacks += guarded
            self._loop(guarded)
        failure = self.stop.failure()
        if failure is not None:
            raise failure

    def _farewell(self) -> str:
        """The last line: where the run is, and what it came to."""
        step, best = self.progress.step, self.progress.best_step
        if step == 0:
            return f"{self.config.run_dir}: stopped before its first step; the same command begins again"
        if not self._is_complete():
            return f"{self.config.run_dir}: saved at step {step}; the same command goes on from there"
        score = f"; best {self.config.eval.metric}: {self.progress.best_score:.4g}, at step {best}" if best else ""
        return f"{self.config.run_dir}: {step:,} steps made{score}"

    def _loop(self, guarded: Sequence[GuardedCallback]) -> None:
        """The loop, the same for every strategy."""
        self.console.start(self.total_steps, self.progress.step)
        for callback in self.callbacks:
            callback.on_train_start(self.handle)
        self.stop.begin()
        steps = self.loader.steps(self.progress.step, self.total_steps)
        steps = logging_compile_payoff(steps, self.engine, self.meter, self.uncompiled_step_fits)
        for agreed in agreed_steps(steps, self.loader, self.engine, self.stop, self.world):
            # forward, backward, reduce, clip, update
            result = self.engine.train_step(agreed.micro_batches, agreed.num_targets)
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
        log_every = config.tracking.log_every
        save = SaveCallback(config.checkpoint.every, saver, self.meter, stop, self._announce_save)
        mfu = mfu_of_one_token_per_second(self.engine, config, world)
        callbacks: list[Callback] = [
            LogCallback(log_every, self.loader, world, self.meter, self.trackers, self.console, saver, mfu),
            save,
        ]
        if self.validation is not None:
            shown = (self.trackers, self.console)
            callbacks += [
                EvaluateCallback(config.eval, self._evaluate, run_dir, world, *shown, stop, self._announce_scores),
                SaveScoreCallback(config.checkpoint.keep_best, saver, save.save),
            ]
        if world.device.type == "cpu" and torch.get_num_threads() > 1:
            callbacks.append(CoreWaitCallback())
        if world.is_rank0:
            callbacks.append(StatusCallback(log_every, self._is_complete))
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
        samples = self.validation.samples
        state = rng_state(self.world.device)
        try:
            with self.meter.paused():
                return evaluate(
                    self.engine,
                    self.task,
                    self.validation,
                    self.world,
                    eval_micro_batch(self.config, in_tokens="input_ids" in samples.fields),
                    make_augment(self.task, self.config, train=False),
                    progress=lambda done, total: self.console.phase("evaluating", done, total),
                    stop_wanted=lambda: self.stop.wanted,
                )
        finally:
            set_rng_state(state, self.world.device)
