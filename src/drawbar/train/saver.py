"""From a running trainer to a checkpoint, and back."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from drawbar.checkpoint.directory import CheckpointDirectory
from drawbar.checkpoint.format import Snapshot, decode_state, encode_state
from drawbar.checkpoint.load import read_state, read_together
from drawbar.checkpoint.writer import AsyncWriter
from drawbar.config.io.source import read_file
from drawbar.config.schema.data_section import DataSection
from drawbar.config.schema.run_config import RunConfig
from drawbar.data.loader import Loader
from drawbar.distributed.process_group import Distributed
from drawbar.engines.engine import Engine
from drawbar.engines.results import EngineState
from drawbar.errors import UserError
from drawbar.evaluation.scoring import Split
from drawbar.parallel.precision import choose_precision
from drawbar.runtime.log import logger
from drawbar.runtime.seed import rng_state, seed_everything, set_rng_state
from drawbar.train.node_local import Disks
from drawbar.train.setup import check_base, with_cross_entropy_of
from drawbar.train.step import RunProgress
from drawbar.train.stop import Reason, Stop
from drawbar.util.atomic_files import sync


class Saver:
    """Saves in a background thread of rank 0, and of one rank for each other disk; training waits for a copy to
    host memory, and for an earlier save that is still being written.

    A save that fails asks for a stop, so that all ranks end at the same step, once they have tried to save that one.

    Args:
        progress: where the run stands as this process begins; in a resumed run that step has a checkpoint already.
        validation: what is evaluated on.
    """

    def __init__(
        self,
        config: RunConfig,
        engine: Engine,
        loader: Loader,
        world: Distributed,
        disks: Disks,
        stop: Stop,
        progress: RunProgress,
        validation: Split | None,
    ) -> None:
        self._config = config.checkpoint
        self._formats = {
            "precision": config.precision,
            "muon_precision": config.optim.muon_precision,
            "cross_entropy": engine.cross_entropy,
            "padding_free": config.data.padding_free,
        }
        self._directory = CheckpointDirectory(config.run_dir / "checkpoints")
        self._metrics = config.run_dir / "metrics.jsonl"
        self._metric = config.eval.metric
        self._validation = None if validation is None else validation.samples.fingerprint
        self._disks = disks
        self._engine = engine
        self._loader = loader
        self._world = world
        self._stop = stop
        self._writer = AsyncWriter()
        world.end_only_after(self._writer.is_writing)
        resumed = world.from_rank0(lambda: progress.step in self._directory.steps(), "looking at the checkpoints")
        self._saved: RunProgress | None = replace(progress) if resumed else None

    @property
    def saved(self) -> RunProgress | None:
        """The progress of the newest save; None before the first one, and once all ranks know that a save failed."""
        return None if self._stop.reason is Reason.UNSAVED else self._saved

    def save(self, progress: RunProgress) -> None:
        """Save this step; if its checkpoint exists already, update only the progress in it. Every rank must
        call it."""
        best = (progress.best_step, progress.best_score)
        if self.saved is not None and self.saved.step == progress.step:
            self._saved = replace(progress)
            if self._disks.is_writer:
                amend = partial(self._directory.amend, progress.step, {"progress": progress.state()})
                self._writer.follow(partial(self._write, progress.step, *best, amend))
            return
        with self._world.barrier_after(self._writing):
            self._writer.wait()  # never two copies in host memory
        state = self._engine.state(self._disks.writers)
        own = rng_state(self._world.device)
        generators = self._world.gather(own) if self._disks.shared else self._world.all_gather(own)
        self._saved = replace(progress)
        if generators is None or not self._disks.is_writer:
            return
        values = {
            "progress": progress.state(),
            "data": self._loader.state(),
            "engine": state.values,
            "world_size": self._world.size,
            "formats": self._formats,
            "validation": self._validation,
            "base": None if self._engine.base is None else self._engine.base.digest,
        }
        rng = {
            f"{_generator(self._world, rank)}/{name}": tensor
            for rank, part in enumerate(generators)
            for name, tensor in part.items()
        }
        plain = decode_state(encode_state(values))  # a copy; what JSON cannot hold fails here, not in the thread
        snapshot = Snapshot(progress.step, state.model, state.optimizer, rng, plain)
        self._writer.submit(partial(self._write, progress.step, *best, partial(self._directory.write, snapshot)))

    def _write(self, step: int, best_step: int | None, best_score: float | None, write: Callable[[], None]) -> None:
        """Runs in the background thread: write or amend a step's checkpoint, mark the best one, delete old ones."""
        try:
            with suppress(OSError):  # a failing metrics file must not cost a checkpoint
                sync(self._metrics)  # first: a run that resumes from this step does not write these lines again
            write()
            protected = {step}
            if self._config.keep_best and best_step is not None and best_score is not None:
                protected.add(best_step)
                if best_step in self._directory.steps():
                    self._directory.set_best(best_step, self._metric, best_score)
            self._directory.rotate(self._config.keep, protected)
        except Exception as error:
            reason = error.what if isinstance(error, UserError) else repr(error)
            logger.warning("the save of step %d failed, so the run saves where it is, and ends: %s", step, reason)
            self._stop.request(Reason.UNSAVED)
            raise

    def wait(self) -> None:
        """Wait until the newest save is on every disk. Every rank must call it; the UserError of any save is raised on
        all ranks, another error on its own rank."""
        with self._world.barrier_after(self._writing):  # ranks that write nothing wait here as long as it takes
            self._writer.wait()
            error = self._with_resume_hint(self._writer.take_error())
        for failure in self._world.all_gather(error if isinstance(error, UserError) else None):
            if failure is not None:
                raise failure
        if error is not None:
            raise error

    def close(self) -> None:
        """Wait until this rank's writes are on its disk, then end the background thread. Raises the error of a save."""
        with self._world.working(self._writing):
            self._writer.close()
            error = self._with_resume_hint(self._writer.take_error())
        if error is not None:
            raise error

    def _with_resume_hint(self, error: BaseException | None) -> BaseException | None:
        """The error, its text extended by the checkpoints to resume from: a later save may have succeeded."""
        if not isinstance(error, UserError):
            return error
        what = f"{error.what}. {self._directory.describe_newest()}"
        return UserError(what, where=error.where, remedy=error.remedy, exit_code=error.exit_code)

    @property
    def _writing(self) -> str:
        return "saving" if self._saved is None else f"writing the checkpoint of step {self._saved.step}"


def checkpoint_bytes(engine: Engine) -> int:
    """About how large a full checkpoint is."""
    sizes = {True: 0, False: 0}
    for parameter in engine.meta_model.parameters():
        sizes[parameter.requires_grad] += parameter.numel() * parameter.element_size()
    # the optimizer keeps up to two more numbers for each trained weight, or two of half the size
    optimizer = (2 if engine.config.optim.state_dtype == "fp32" else 1) * sizes[True]
    # with LoRA, frozen weights are not saved
    return optimizer + sizes[True] + (sizes[False] if engine.config.lora is None else 0)


def as_it_began(config: RunConfig, checkpoint: Path, device: torch.device) -> RunConfig:
    """The configuration, ``auto`` replaced by what the run began with: number formats, plain cross-entropy, padding. On
    other hardware, or with a newer drawbar, a resumed run then still computes the same.

    Raises:
        UserError: the checkpoint is damaged.
    """
    state = read_state(checkpoint)
    # older checkpoints have no "formats": Muon's precision was always bf16 then
    before = state.get("formats", {"precision": state["engine"].get("precision", "auto"), "muon_precision": "bf16"})
    muon = config.optim.muon_precision
    padded = config.data.padding_free == "auto" and not before.get("padding_free", False)
    begun = config.model_copy(
        update={
            "precision": before["precision"] if config.precision == "auto" else config.precision,
            "optim": config.optim.model_copy(
                update={"muon_precision": before["muon_precision"]} if muon == "auto" else {}
            ),
            "data": config.data.model_copy(update={"padding_free": False} if padded else {}),
        }
    )
    begun = with_cross_entropy_of(begun, state)
    fastest = choose_precision(config.precision, device)
    if begun.precision not in ("auto", fastest):
        logger.warning("precision: %s, as the run began; here %s would be faster", begun.precision, fastest)
    return begun


def restore_engine(checkpoint: Path, forked: bool, engine: Engine, world: Distributed) -> Snapshot:
    """Put back weights and optimizer. A fork takes the weights, and the optimizer where it fits.

    Returns:
        What else is in the checkpoint, for ``restore_position``.

    Raises:
        UserError: the checkpoint is damaged, or belongs to another model or optimizer, or to adapters on other weights.
    """
    snapshot = read_together(checkpoint, world)
    with world.working(f"loading {checkpoint}"):
        if forked:
            _load_what_fits(engine, snapshot)
        else:
            check_base(snapshot, engine)
            engine.load(_engine_state(snapshot))
    return replace(snapshot, model={}, optimizer={})


def restore_position(
    checkpoint: Path,
    rest: Snapshot,
    forked: bool,
    seed: int,
    loader: Loader,
    validation: Split | None,
    world: Distributed,
) -> RunProgress:
    """Restore everything else (data position, RNG, progress), so that training continues exactly where it stopped.

    A fork takes the position in the data where that fits, and forgets the scores of the run it came from.

    Args:
        rest: what ``restore_engine`` has left of the checkpoint.

    Raises:
        UserError: the checkpoint belongs to other data.
    """
    values = rest.state
    if forked:
        _load_where_it_fits(loader, _with_lanes(values["data"], checkpoint))
    else:
        loader.load(values["data"])
        _check_validation(values.get("validation"), validation)
    _restore_generators(rest.rng, seed, rest.step, world)
    progress = RunProgress.of_state(values["progress"])
    if forked:
        progress.best_step = progress.best_score = None
        progress.evaluations_since_best = 0
        progress.evaluated_step = progress.step  # a fork is not evaluated before its own first step
    if values["world_size"] != world.size:
        logger.info("saved by %d processes, resumed by %d", values["world_size"], world.size)
    logger.info("resumed from %s at step %d", checkpoint, progress.step)
    return progress


def _check_validation(saved: str | None, validation: Split | None) -> None:
    """Refuse changed validation data: scores before and after the change could not be compared."""
    if validation is not None and saved is not None and saved != validation.samples.fingerprint:
        raise UserError(
            "the validation data changed since the checkpoint was written: its fingerprint "
            f"was {saved} and is now {validation.samples.fingerprint}",
            where="data.validation",
            remedy="restore the data (and the settings that encode it), "
            "or start a new run from these weights with `--fork NEWNAME`",
        )


def _with_lanes(data: dict[str, Any], checkpoint: Path) -> dict[str, Any]:
    """The data position; a stream's that was saved without lanes (see ``data.stream``) gets those of config.yaml."""
    if "cursor" not in data:  # no stream
        return data
    path = checkpoint.resolve().parent.parent / "config.yaml"
    saved = read_file(path).values.get("data", {}) if path.exists() else {}
    if not saved.keys() >= {"stream_lanes", "shuffle_buffer"}:
        return data
    then = DataSection(stream_lanes=saved["stream_lanes"], shuffle_buffer=saved["shuffle_buffer"])
    return {"lanes": then.stream_lanes, "records": then.records_per_lane, **data}


def _engine_state(snapshot: Snapshot) -> EngineState:
    return EngineState(snapshot.model, snapshot.optimizer, snapshot.state["engine"])


def _load_what_fits(engine: Engine, snapshot: Snapshot) -> None:
    """For a fork: only the weights are taken if the optimizer, or the base model of the adapters, is another one."""
    state = _engine_state(snapshot)
    try:
        check_base(snapshot, engine)
        engine.load(state)
    except UserError as error:
        logger.warning("only the weights are taken over: %s", error.what)
        engine.load_model(state.model)


def _load_where_it_fits(loader: Loader, data: dict[str, Any]) -> None:
    """For a fork: go on in the same data, or begin other data at its first sample."""
    try:
        loader.load(data)
    except UserError as error:
        logger.warning("the data begins at its first sample: %s", error.what)


def _restore_generators(rng: dict[str, torch.Tensor], seed: int, step: int, world: Distributed) -> None:
    seed_rank = world.dims.seed_rank
    first = next(rank for rank in range(world.size) if seed_rank(rank) == seed_rank(world.rank))
    for prefix in (f"{_generator(world, world.rank)}/", f"rank-{first:04d}/"):  # older checkpoints kept them by rank
        own = {name.removeprefix(prefix): tensor for name, tensor in rng.items() if name.startswith(prefix)}
        if own:
            set_rng_state(own, world.device)
            return
    seed_everything(seed + step, seed_rank(world.rank))  # the saving run had fewer generators


def _generator(world: Distributed, rank: int) -> str:
    """The key of a rank's RNG state in a checkpoint: its seed rank, so that ranks that must draw the same
    numbers restore the same state, whatever the parallel layout at saving was."""
    return f"seed-{world.dims.seed_rank(rank):04d}"
