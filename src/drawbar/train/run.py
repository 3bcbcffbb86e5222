"""``Run``: the parts of a run, ready to train, shared by the trainer and drawbar's own callbacks."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from drawbar.checkpoint.format import step_name
from drawbar.config.schema.run_config import EvalSection, RunConfig
from drawbar.data.loader import Loader
from drawbar.distributed.process_group import Distributed
from drawbar.engines.engine import Engine
from drawbar.evaluation.samples import write_samples
from drawbar.evaluation.scoring import Evaluation, Split, evaluate
from drawbar.runtime.seed import rng_state, set_rng_state
from drawbar.tasks.task import Task
from drawbar.tracking.console import Console
from drawbar.tracking.meters import Throughput
from drawbar.tracking.trackers import Trackers
from drawbar.train.batches import eval_batching
from drawbar.train.callback import Callback, RunHandle
from drawbar.train.run_dir_lock import RunDirLock
from drawbar.train.saver import Saver
from drawbar.train.step import RunProgress
from drawbar.train.stop import Stop


@dataclass
class Run:
    """The parts of a run."""

    config: RunConfig
    """The configuration to train, with ``auto`` resolved."""
    world: Distributed
    stop: Stop
    console: Console
    trackers: Trackers
    task: Task
    engine: Engine
    loader: Loader
    validation: Split | None
    progress: RunProgress
    total_steps: int
    shares_disk: bool
    """Whether all nodes see the run directory."""
    lock: RunDirLock
    make_run_dir: Callable[[str], Path]
    """Makes the directory of a run of another name, with the files of this one that it takes to resume."""
    uncompiled_step_fits: bool
    """Whether uncompiled trial steps chose the micro-batch size."""
    goes_back: bool = False
    """Whether the run must start again from its newest checkpoint: see ``train.on_spike``."""
    meter: Throughput = field(default_factory=Throughput)
    callbacks: list[Callback] = field(default_factory=list)
    """drawbar's own, then the user's."""
    saver: Saver = field(init=False)
    """Set when training starts."""

    def __post_init__(self) -> None:
        world, log = self.world, self.trackers.log
        self.handle = RunHandle(
            self.config, self.progress, world.rank, world.size, self.total_steps, _stop=self.stop, _log=log
        )

    def make_saver(self) -> Saver:
        """Create ``saver``, which the caller must close."""
        self.saver = Saver(
            self.config,
            engine=self.engine,
            loader=self.loader,
            world=self.world,
            shares_disk=self.shares_disk,
            stop=self.stop,
            progress=self.progress,
            validation=self.validation,
            lock=self.lock,
            make_run_dir=self.make_run_dir,
        )
        return self.saver

    @property
    def all_steps_done(self) -> bool:
        return self.progress.step >= self.total_steps

    @property
    def evaluation_is_due(self) -> bool:
        return self.validation is not None and evaluation_is_due(
            self.config.eval, self.progress, last=self.all_steps_done
        )

    def is_complete(self) -> bool:
        """Whether all steps are done and evaluated, or the run has stopped early."""
        return (self.all_steps_done and not self.evaluation_is_due) or patience_is_exhausted(
            self.config.eval, self.progress
        )

    def announce_scores(self, scores: Mapping[str, float]) -> None:
        for callback in self.callbacks:
            callback.on_evaluate(self.handle, scores)

    def announce_save(self, step: int) -> None:
        for callback in self.callbacks:
            callback.on_save(self.handle, self.config.run_dir / "checkpoints" / step_name(step))

    def owns_directory(self) -> bool:
        """Whether the run directory is still this run's. If not, the run stops, with its state saved elsewhere."""
        return self.lock.is_still_held(self.stop.fail)

    def evaluate(self) -> Evaluation | None:
        """Evaluate on the validation data, preserving every random generator's state. None if a rank wants to stop; the
        resumed run then evaluates again."""
        assert self.validation is not None
        state = rng_state(self.world.device)
        try:
            with self.meter.paused():
                evaluation = evaluate(
                    self.engine,
                    self.task,
                    self.validation,
                    self.world,
                    *eval_batching(self.task, self.validation, self.config),
                    progress=lambda done, total: self.console.phase("evaluating", done, total),
                    stop_wanted=lambda: self.stop.wanted,
                )
                if evaluation is None:
                    return None
                section = self.config.eval
                texts = write_samples(self.engine, self.task, self.validation, evaluation.records, section)
                return replace(evaluation, texts=texts)
        finally:
            set_rng_state(state, self.world.device)


def evaluation_is_due(config: EvalSection, progress: RunProgress, last: bool) -> bool:
    """Whether an evaluation is due at the current step and has not run yet."""
    due = last or (config.every is not None and progress.step % config.every == 0)
    return due and progress.evaluated_step != progress.step


def patience_is_exhausted(config: EvalSection, progress: RunProgress) -> bool:
    """Whether early stopping is due: no better score in the last ``eval.patience`` evaluations."""
    return config.patience is not None and progress.evaluations_since_best >= config.patience
