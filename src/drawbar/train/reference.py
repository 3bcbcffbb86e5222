"""What the model that training starts from says about each sample (``Task.reference_fields``): computed once, before
training, and kept in the run directory."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from drawbar.config.schema.run_config import RunConfig
from drawbar.distributed.process_group import Distributed
from drawbar.engines.engine import Engine
from drawbar.errors import UserError
from drawbar.evaluation.scoring import Split, predict_samples
from drawbar.runtime.log import logger
from drawbar.tasks.task import Task
from drawbar.tracking.console import Console
from drawbar.train.batches import eval_micro_batch, make_augment
from drawbar.util.atomic_files import write_atomically

_FINGERPRINT = "samples"


def with_reference(
    task: Task, split: Split, config: RunConfig, world: Distributed, console: Console, engine: Engine | None
) -> Split:
    """The split with the reference fields of its samples, where the task uses such. Collective.

    Args:
        engine: with the weights that training starts from; None if there are others.

    Raises:
        UserError: the fields are not in the run directory, and there is no such engine.
    """
    if not task.uses_reference:
        return split
    path = _path(config.run_dir, split.name)
    fields = world.from_rank0(lambda: _read(path, split.samples.fingerprint), "reading what the reference model said")
    if fields is None:
        if engine is None:
            raise UserError(
                f"the {split.name} data needs the model that training started from, and only the trained one is open",
                where=f"data.{split.name}",
                remedy="use `drawbar eval` or `drawbar predict`, which open both",
            )
        fields = _compute(task, split, config, world, console, engine)
    return replace(split, samples=split.samples.with_numbers(fields), reference=fields)


def save_reference(split: Split, run_dir: Path) -> None:
    """Keep the fields for processes that have other weights. Call on rank 0, which holds the run's lock."""
    if split.reference:
        content = save(dict(split.reference), {_FINGERPRINT: split.samples.fingerprint})
        write_atomically(_path(run_dir, split.name), content)


def _compute(
    task: Task, split: Split, config: RunConfig, world: Distributed, console: Console, engine: Engine
) -> dict[str, NDArray[Any]]:
    what = f"asking the reference model about {split.name}"
    logger.info("%s", what)
    found = predict_samples(
        engine,
        task,
        split,
        world,
        eval_micro_batch(config, has_tokens="input_ids" in split.samples.fields),
        make_augment(task, config, train=False),
        task.reference_fields,
        progress=lambda done, total: console.phase(what, done, total),
    )

    def columns() -> dict[str, NDArray[Any]]:
        rows = [fields for _, fields in sorted(found, key=lambda pair: pair[0])]
        return {name: np.array([row[name] for row in rows], np.float64) for name in rows[0]}

    return world.from_rank0(columns, what)


def _path(run_dir: Path, split: str) -> Path:
    return run_dir / f"reference-{split}.safetensors"


def _read(path: Path, fingerprint: str) -> dict[str, NDArray[Any]] | None:
    """The fields in a file; None if there is none, or it is that of other samples."""
    try:
        with safe_open(path, "numpy") as file:
            if (file.metadata() or {}).get(_FINGERPRINT) == fingerprint:
                return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dict
    except FileNotFoundError:
        pass
    except (OSError, SafetensorError) as error:
        logger.warning("%s cannot be read, and is made anew: %s", path, error)
    return None
