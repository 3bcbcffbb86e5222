"""Restores a run from a checkpoint that was written under any strategy."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from drawbar.checkpoint.all_ranks import read_on_all_ranks, run_on_all_ranks
from drawbar.checkpoint.directory import CheckpointDirectory
from drawbar.checkpoint.format import Snapshot, Unusable
from drawbar.data.loader import Loader
from drawbar.distributed.process_group import Distributed
from drawbar.engines.engine import Engine
from drawbar.engines.results import EngineState
from drawbar.errors import UserError
from drawbar.evaluation.scoring import Split
from drawbar.runtime.log import logger
from drawbar.runtime.seed import seed_everything, set_rng_state
from drawbar.train.checkpoint_layouts import rng_key
from drawbar.train.rundir import RunStart
from drawbar.train.setup import check_base
from drawbar.train.step import RunProgress


def restore_engine(start: RunStart, engine: Engine, world: Distributed) -> tuple[RunStart, Snapshot]:
    """Restore weights and optimizer state; each rank reads its part of them. A fork takes the weights and, unless only
    the weights are requested, the optimizer state if it fits.

    If a rank finds the checkpoint damaged, all ranks fall back to the next older one.

    Returns:
        The start actually used, and the rest of its checkpoint, for ``restore_rest``.

    Raises:
        UserError: on every rank: the checkpoint is damaged and there is no older one, or belongs to another model or
            optimizer, or to adapters on other weights.
    """
    while True:
        assert start.checkpoint is not None
        try:
            return start, _restore_from(start.checkpoint, start, engine, world)
        except Unusable as reason:
            start = start.next_older_start(reason)


def _restore_from(checkpoint: Path, start: RunStart, engine: Engine, world: Distributed) -> Snapshot:
    def load() -> None:
        if start.weights_only:
            logger.info("the optimizer state in %s is not loaded: the optimizer starts fresh", checkpoint)
            _load_weights(engine, snapshot)
        elif start.forked:
            _load_what_fits(engine, snapshot)
        else:
            check_base(snapshot, engine.base)
            engine.load(_engine_state(snapshot))

    with read_on_all_ranks(checkpoint, world) as snapshot:
        run_on_all_ranks(checkpoint, world, f"loading {checkpoint}", load)
    return replace(snapshot, model={}, optimizer={})


def restore_rest(
    start: RunStart,
    rest: Snapshot,
    seed: int,
    loader: Loader,
    validation: Split | None,
    world: Distributed,
) -> RunProgress:
    """Restore everything else (data position, RNG, progress), so that training continues exactly where it stopped.

    A fork takes the position in the data if it fits, and drops the scores of its source run.

    Args:
        rest: the rest of the checkpoint, as ``restore_engine`` returned it.

    Raises:
        UserError: the checkpoint belongs to other data.
    """
    values, forked = rest.state, start.forked
    assert start.checkpoint is not None
    if forked:
        _load_where_it_fits(loader, values["data"])
    else:
        loader.load(values["data"])
        _check_validation(values.get("validation"), validation)
    _restore_generators(rest.rng, seed, rest.step, world)
    progress = RunProgress(**values["progress"])
    if forked:
        progress.best_step = progress.best_score = None
        progress.evaluations_since_best = 0
        progress.recent, progress.went_back_to = [], None
        progress.evaluated_step = progress.step  # do not evaluate a fork before its own first step
    else:
        find_best = partial(_best_with_checkpoint, progress, CheckpointDirectory(start.checkpoint.parent))
        progress.best_step, progress.best_score = world.from_rank0(find_best, "looking for the best checkpoint")
    if values["world_size"] != world.size:
        saved_by = values["world_size"]
        logger.info("saved by %d process%s, resumed by %d", saved_by, "es" * (saved_by != 1), world.size)
    logger.info("resumed from %s at step %d", start.checkpoint, progress.step)
    return progress


def _best_with_checkpoint(progress: RunProgress, directory: CheckpointDirectory) -> tuple[int | None, float | None]:
    """The best step and score of a resumed run: those of ``progress`` if that step has a checkpoint. If not, because
    its save failed, those of ``best.json``, provided it names an existing checkpoint that is not newer."""
    steps = directory.steps()
    try:
        recorded = directory.best_record()
    except UserError:
        recorded = None  # the next save rewrites it
    if progress.best_step in steps or recorded is None or recorded.step not in steps or recorded.step > progress.step:
        return progress.best_step, progress.best_score
    return recorded.step, recorded.score


def _check_validation(saved: str | None, validation: Split | None) -> None:
    """Refuse changed validation data: scores before and after the change would not be comparable."""
    if validation is not None and saved is not None and saved != validation.samples.fingerprint:
        raise UserError(
            "the validation data changed since the checkpoint was written: its fingerprint "
            f"was {saved} and is now {validation.samples.fingerprint}",
            where="data.validation",
            remedy="restore the data (and the settings that encode it), "
            "or start a new run from these weights with `--fork NEWNAME`",
        )


def _engine_state(snapshot: Snapshot) -> EngineState:
    return EngineState(snapshot.model, snapshot.optimizer, snapshot.state["engine"])


def _load_what_fits(engine: Engine, snapshot: Snapshot) -> None:
    """For a fork: load only the weights if the optimizer, or the base model of the adapters, is a different one."""
    state = _engine_state(snapshot)
    try:
        check_base(snapshot, engine.base)
        engine.load(state)
    except UserError as error:
        _load_weights(engine, snapshot)  # first: raises if the weights do not fit either; then no warning
        logger.warning("only the weights are loaded: %s", error.what)


def _load_weights(engine: Engine, snapshot: Snapshot) -> None:
    """Load only the weights: the optimizer state starts empty, and the learning rate continues its schedule."""
    engine.load_model(snapshot.model)
    engine.step = snapshot.state["engine"]["step"]


def _load_where_it_fits(loader: Loader, data: dict[str, Any]) -> None:
    """For a fork: continue in the same data, or start other data at its first sample."""
    try:
        loader.load(data)
    except UserError as error:
        logger.warning("the data starts at its first sample: %s", error.what)


def _restore_generators(rng: dict[str, torch.Tensor], seed: int, step: int, world: Distributed) -> None:
    seed_rank = world.dims.seed_rank
    prefix = f"{rng_key(world, world.rank)}/"
    own = {name.removeprefix(prefix): tensor for name, tensor in rng.items() if name.startswith(prefix)}
    if own:
        set_rng_state(own, world.device)
    else:
        seed_everything(seed + step, seed_rank(world.rank))  # the saving run had fewer generators
