"""What the model that training starts from says about each sample (``Task.reference_fields``): computed once, before
training, and kept in the run directory."""

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from drawbar.config.schema.run_config import RunConfig
from drawbar.data.dataset import RESERVED_FIELDS
from drawbar.distributed.process_group import Distributed
from drawbar.engines.engine import Engine
from drawbar.errors import ExitCode, UserError
from drawbar.evaluation.scoring import Split, predict
from drawbar.parallel.fsdp import free_gathered
from drawbar.runtime.log import logger
from drawbar.tasks.task import Task
from drawbar.tracking.console import Console
from drawbar.train.batches import eval_batching
from drawbar.util.atomic_files import write_atomically

_FINGERPRINT = "samples"
_PROBE = "probe."
"""What the names of the first sample's own fields begin with, which tell whether a model is the one that was asked."""
_TOLERANCE, _OF_FP32 = 0.02, 1e-3
"""Relative difference of what a model says in another precision, or, of fp32, under another strategy."""


def with_reference(
    task: Task,
    split: Split,
    config: RunConfig,
    world: Distributed,
    console: Console,
    engine: Engine | None,
    kept_in: Path | None,
) -> Split:
    """The split with the reference fields of its samples, where the task uses such. Collective.

    Args:
        engine: with the weights that training starts from; None if there are others.
        kept_in: the directory of the run whose reference model it is; None for a run that begins.

    Raises:
        UserError: the fields are not in the run directory, and there is no engine with the weights that were asked, or
            nothing that tells whether it has them.
    """
    if not task.uses_reference:
        return split
    path = None if kept_in is None else _path(kept_in, split.name)
    fields = world.from_rank0(lambda: _read(path, split.samples.fingerprint), "reading what the reference model said")
    if fields is None:
        if engine is None:
            raise UserError(
                f"the {split.name} data needs the model that training started from, and only the trained one is open",
                where=f"data.{split.name}",
                remedy="use `drawbar eval` or `drawbar predict`, which open both",
            )
        if kept_in is not None:
            _check_is_reference(task, engine, world, _path(kept_in, "train"))
        fields = _compute(task, split, config, world, console, engine)
    return replace(split, samples=split.samples.with_numbers(fields), reference=fields)


def keeps_reference(run_dir: Path) -> bool:
    """Whether a run has asked a reference model."""
    return any(run_dir.glob("reference-*.safetensors"))


def save_reference(split: Split, run_dir: Path) -> None:
    """Keep the fields for processes that have other weights. Call on rank 0, which holds the run's lock."""
    if split.reference:
        first = {name: np.asarray(value) for name, value in split.samples[0].items() if name not in RESERVED_FIELDS}
        probe = {f"{_PROBE}{name}": value for name, value in first.items() if name not in split.reference}
        content = save({**split.reference, **probe}, {_FINGERPRINT: split.samples.fingerprint})
        write_atomically(_path(run_dir, split.name), content)


def _check_is_reference(task: Task, engine: Engine, world: Distributed, path: Path) -> None:
    """Ask the model about a sample that the run's reference model was asked about, by the file ``path``. Raises
    UserError if it says something else, or the file is lost."""
    kept = world.from_rank0(lambda: _read(path, None), "reading what the reference model said")
    if kept is None:
        raise UserError(
            "what the reference model said is lost, and another model than that one would train for something else",
            where=str(path),
            remedy="restore the file from a copy of the run directory; or begin another run with --fork, whose "
            "reference model is the checkpoint that it begins with",
            exit_code=ExitCode.FAILED,
        )
    sample = {name.removeprefix(_PROBE): value for name, value in kept.items() if name.startswith(_PROBE)}
    batch = task.collate([{**sample, "id": 0, "ids": [0]}])
    (said,) = engine.predict_step(batch, task.reference_fields)
    limit = _OF_FP32 if engine.config.precision == "fp32" else _TOLERANCE
    if all(math.isclose(value, kept[name][0], rel_tol=limit, abs_tol=limit) for name, value in said.items()):
        return
    raise UserError(
        "task.model is not the model that this run's training started from, to which its rewards compare",
        where="task.model",
        remedy="restore that model; a run that began as a fork can be evaluated on its own validation data alone",
        exit_code=ExitCode.FAILED,
    )


def _compute(
    task: Task, split: Split, config: RunConfig, world: Distributed, console: Console, engine: Engine
) -> dict[str, NDArray[Any]]:
    what = f"asking the reference model about {split.name}"
    logger.info("%s", what)
    how = eval_batching(task, split, config)
    progress = partial(console.phase, what)
    own_weights = partial(free_gathered, engine.module)  # not their averages: training goes on from the weights
    found = predict(engine, task, split, world, *how, task.reference_fields, progress, own_weights)

    def columns() -> dict[str, NDArray[Any]]:
        rows = [fields for _, fields in sorted(found, key=lambda pair: pair[0])]
        return {name: np.array([row[name] for row in rows], np.float64) for name in rows[0]}

    return world.from_rank0(columns, what)


def _path(run_dir: Path, split: str) -> Path:
    return run_dir / f"reference-{split}.safetensors"


def _read(path: Path | None, fingerprint: str | None) -> dict[str, NDArray[Any]] | None:
    """The fields in a file, with its probe; None if there is none, or it is that of other samples.

    Args:
        fingerprint: of the samples, without the probe; None for any, with the probe.
    """
    if path is None:
        return None
    try:
        with safe_open(path, "numpy") as file:
            names = [name for name in file.keys() if fingerprint is None or not name.startswith(_PROBE)]  # noqa: SIM118
            if fingerprint in (None, (file.metadata() or {}).get(_FINGERPRINT)):
                return {name: file.get_tensor(name) for name in names}
    except FileNotFoundError:
        pass
    except (OSError, SafetensorError) as error:
        logger.warning("%s cannot be read: %s", path, error)
    return None
