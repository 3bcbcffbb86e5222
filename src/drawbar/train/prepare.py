"""From a configuration to a run that is ready to train: its starting point, its resolved ``auto`` settings, its task,
data and engine."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from drawbar.checkpoint.directory import CheckpointDirectory
from drawbar.checkpoint.space import check_space, required_bytes
from drawbar.config.io.compare import check_new_steps, check_not_fewer_steps
from drawbar.config.schema.run_config import RunConfig
from drawbar.distributed.process_group import Distributed
from drawbar.engines.build import build_engine
from drawbar.engines.engine import Engine
from drawbar.errors import ExitCode, UserError
from drawbar.evaluation.scoring import Split
from drawbar.optim.schedules import learning_rate_scale
from drawbar.runtime.log import open_log_file
from drawbar.runtime.seed import seed_everything, use_deterministic_kernels
from drawbar.tasks.padding import choose_padding_free
from drawbar.tasks.task import Task
from drawbar.tasks.user_methods import name_failing_method
from drawbar.tracking.console import Console
from drawbar.tracking.trackers import Trackers
from drawbar.train.batches import load_data, open_data
from drawbar.train.check import check_on_samples, compare_with_neighbours, with_rows_alone
from drawbar.train.checkpoint_layouts import checkpoint_bytes
from drawbar.train.first_samples import save_first_samples
from drawbar.train.initial_model import InitialModel
from drawbar.train.memory_probe import fit_micro_batch, memory_of
from drawbar.train.reference import keeps_reference, save_reference, with_reference
from drawbar.train.remote_start import find_start_on_disk_or_store
from drawbar.train.resolve import resolve
from drawbar.train.restore import restore_engine, restore_rest
from drawbar.train.run import Run
from drawbar.train.run_dir_lock import RunDirLock
from drawbar.train.rundir import RunStart, find_start, renamed, run_dir_of, write_config
from drawbar.train.setup import build_task, check_script, count_steps, log_changed_schedule, save_task
from drawbar.train.shared_disks import check_nodes_share_disk
from drawbar.train.step import RunProgress
from drawbar.train.stop import Stop


@dataclass(frozen=True)
class Request:
    """What the user asks to train: see ``Trainer``."""

    config: RunConfig
    source_config: RunConfig
    """The configuration of the run whose checkpoint a fork starts from; else ``config``."""
    task_type: type[Task]
    resume: str
    fork: str | None
    weights_only: bool

    def again(self) -> "Request":
        """To go on with the run that this request has made, from its newest checkpoint."""
        return replace(self, source_config=self.config, resume="auto", fork=None, weights_only=False)


def prepare_run(
    request: Request,
    lock: RunDirLock,
    initial_model: InitialModel,
    world: Distributed,
    stop: Stop,
    console: Console,
    trackers: Trackers,
) -> Run:
    """Build the run, restore it from its checkpoint, and open its directory. Nothing is written until the task, the
    model and the settings have been tried. Collective.

    Raises:
        UserError: the request is invalid, or incompatible with the checkpoint, the data or the machine.
    """
    shares_disk = check_nodes_share_disk(request.config, world)
    start = world.from_rank0(partial(_find_start, request, lock), "looking for the newest checkpoint")
    source_run_dir = run_dir_of(start.checkpoint, request.config.run_dir)
    resolved = resolve(request.config, start, world)
    model_folder = initial_model.provide(resolved.trained, source_run_dir, lock.take, world)
    task = _build_task(request, resolved.trained, start, source_run_dir, model_folder, world)

    config = choose_padding_free(task, task.run_config, world.device)
    opened = open_data(task, config, world)
    with name_failing_method(task):
        engine = build_engine(task, config, world)
    config = with_rows_alone(task, engine, config)
    find = partial(_keeps_reference, start, source_run_dir)
    asks_first = task.uses_reference and world.from_rank0(find, "looking for what the reference model said")
    if start.checkpoint is not None and not asks_first:
        start, rest = restore_engine(start, engine, world)
    tried = check_on_samples(task, engine, opened, config, world, console)
    complete = partial(
        with_reference, task, config=config, world=world, console=console, engine=engine,
        kept_in=source_run_dir if asks_first else None,
    )  # fmt: skip
    loader, train, validation = load_data(task, opened, config, world, console, complete)
    if start.checkpoint is not None and asks_first:  # the engine was built with the weights of the reference model
        start, rest = restore_engine(start, engine, world)
    compare_with_neighbours(task, engine, train or tried)
    engine.total_steps = total_steps = count_steps(config.train, loader.steps_per_epoch)
    learning_rate_scale(0, total_steps, config.optim)  # a schedule of the user's own may fail
    resumed = start.checkpoint is not None and not start.forked
    micro_batch_dir = source_run_dir if resumed else config.run_dir
    found = fit_micro_batch(loader, engine, memory_of(world.device), micro_batch_dir, resumed)

    seed_everything(config.run.seed, world.dims.seed_rank(world.rank))  # dropout: per rank, but equal on tp ranks
    progress = RunProgress()
    if start.checkpoint is not None:
        progress = restore_rest(start, rest, config.run.seed, loader, validation, world)
        _check_steps(config, start, progress.step, total_steps)
    _open_directory(resolved.written, start, progress, lock, task, engine, world, train, validation)
    if found is not None and world.is_rank0:
        found.save(config.run_dir)
    return Run(
        config, world, stop, console, trackers, task, engine, loader, validation, progress, total_steps, shares_disk,
        lock, partial(_make_run_dir, resolved.written, task, (train, validation)),
        uncompiled_step_fits=found is not None,
    )  # fmt: skip


def _keeps_reference(start: RunStart, source_run_dir: Path) -> bool:
    """Whether the run goes on with the reference model of the run that it comes from. A fork of a run that has none
    begins anew, as a new run does: its reference model is what it begins with."""
    return start.checkpoint is not None and (not start.forked or keeps_reference(source_run_dir))


def _find_start(request: Request, lock: RunDirLock) -> RunStart:
    find = partial(find_start, request.source_config, request.resume, request.fork, request.weights_only)
    lock.take_if_run()  # before the disk is searched: another process may write there
    start = find_start_on_disk_or_store(find, request.config, request.resume)
    lock.take_if_run()  # the run directory may just have been downloaded from the object store
    if start.refusal is not None:
        raise start.refusal
    return start


def _build_task(
    request: Request,
    config: RunConfig,
    start: RunStart,
    source_run_dir: Path,
    model_folder: Path | None,
    world: Distributed,
) -> Task:
    if config.run.deterministic:
        use_deterministic_kernels()
    seed_everything(config.run.seed)
    if start.checkpoint is not None and not start.forked:
        check_script(request.task_type, config)
    return build_task(
        request.task_type,
        config,
        world,
        source_run_dir,
        has_checkpoint=start.checkpoint is not None,
        initial_model=model_folder,
    )


def _check_steps(config: RunConfig, start: RunStart, made: int, total_steps: int) -> None:
    check_not_fewer_steps(made, total_steps, config.train)
    if run_dir_of(start.checkpoint, config.run_dir) != config.run_dir:
        check_new_steps(made, total_steps, config.train)
    log_changed_schedule(start.changed_schedule, made, total_steps, config.optim)


def _open_directory(
    config: RunConfig,
    start: RunStart,
    progress: RunProgress,
    lock: RunDirLock,
    task: Task,
    engine: Engine,
    world: Distributed,
    train: Split | None,
    validation: Split | None,
) -> None:
    """Create or update the run directory; call it only when everything is ready to train."""
    folder = config.run_dir
    checkpoints = CheckpointDirectory(folder / "checkpoints")

    def prepare() -> None:
        checkpoints.set_aside(start.unusable)
        saved = len(checkpoints.steps())
        check_space(folder, required_bytes(checkpoint_bytes(engine), config.checkpoint.keep, saved))
        lock.take()
        _write_files(config, task, start)
        for split in filter(None, (train, validation)):
            save_reference(split, folder)
        if train is not None:
            save_first_samples(task, train, folder)
        checkpoints.remove_leftovers()
        # the process before may have ended between the two writes of a new best step
        best = progress.best_step, config.eval.metric, progress.best_score
        checkpoints.update_best(*best, begin=config.checkpoint.keep_best)

    world.barrier("loading the checkpoint")  # all ranks have read it: remove_leftovers() may rename it
    world.from_rank0(prepare, "opening the run directory")
    open_log_file(folder, world.rank)


def _write_files(config: RunConfig, task: Task, start: RunStart) -> None:
    config = config.model_copy(update={"task": task.run_config.task})  # with the detected columns
    write_config(config, start)  # first: from here on the same command resumes this run
    save_task(task, config.run_dir)


def _make_run_dir(config: RunConfig, task: Task, splits: Iterable[Split | None], name: str) -> Path:
    """The directory of another run with the same settings. Raises UserError if the disk does not take it."""
    config = renamed(config, name)
    try:
        config.run_dir.mkdir(parents=True)
        _write_files(config, task, RunStart())
        for split in filter(None, splits):
            save_reference(split, config.run_dir)
    except OSError as error:
        raise UserError(
            f"the run's directory is lost, and another one cannot be made: {error.strerror}",
            where=str(config.run_dir),
            remedy="continue from a copy of an earlier checkpoint (--resume PATH), or start over",
            exit_code=ExitCode.FAILED,
        ) from error
    return config.run_dir
