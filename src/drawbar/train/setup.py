"""From a configuration to the parts of a run: task, data, engine. Used by training, evaluation and generation alike."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from drawbar.checkpoint.directory import CheckpointDirectory
from drawbar.checkpoint.load import read
from drawbar.checkpoint.space import rust_errors
from drawbar.config.rules import resolve_micro_batch
from drawbar.config.schema import RunConfig, TrainSection
from drawbar.data.dataset import encode_records
from drawbar.data.loader import TrainLoader
from drawbar.data.packing import PackedDataset, plan_packs
from drawbar.data.tokenizer import load_tokenizer
from drawbar.engines.choose import choose_engine
from drawbar.engines.engine import Engine
from drawbar.errors import UserError
from drawbar.evaluation.evaluate import Split
from drawbar.runtime.dist import World
from drawbar.runtime.log import logger
from drawbar.tasks.task import Task
from drawbar.tracking.console import Console


def build_task(task_type: type[Task], config: RunConfig, world: World, origin: Path) -> Task:
    """The task with its tokenizer: that of the run directory ``origin``, which the weights come from, where there is
    one; else built once, on rank 0, for all."""
    task = task_type(config)
    saved = origin / "tokenizer"
    build: Callable[[], Any] = (lambda: load_tokenizer(str(saved))) if saved.is_dir() else task.build_tokenizer
    task.tokenizer = world.from_first(build)
    return task


def save_tokenizer(task: Task, run_dir: Path) -> None:
    """Keep the tokenizer with the run, so that it can be resumed and sampled without the place it came from."""
    if hasattr(task.tokenizer, "save_pretrained") and not (run_dir / "tokenizer").exists():
        draft = run_dir / "tokenizer.tmp"
        with rust_errors(draft):
            task.tokenizer.save_pretrained(str(draft))
        draft.rename(run_dir / "tokenizer")


def load_split(task: Task, name: str, config: RunConfig, world: World, console: Console) -> Split:
    """Read, encode and (where asked) pack one part of the data.

    Raises:
        UserError: it cannot be read, has no samples, or differs between processes.
    """
    records = task.records(name)
    samples = encode_records(
        records,
        lambda record: task.encode(record, train=name == "train"),
        describe=getattr(records, "where", lambda number: f"{name} record {number}"),
        progress=lambda done, total: console.phase(f"encoding {name}", done, total),
    )
    rows: Any = samples
    if config.data.packing:
        rows = PackedDataset(samples, plan_packs(samples.lengths, config.data.sequence_length, config.run.seed))
    logger.info("%s: %s", name, describe_split(records, samples, rows))
    fingerprints = world.gather(samples.fingerprint)
    if fingerprints is not None and len(set(fingerprints)) > 1:
        odd = next(rank for rank, found in enumerate(fingerprints) if found != fingerprints[0])
        raise UserError(
            f"rank {odd} reads other {name} data than rank 0",
            where=f"data.{name}",
            remedy="give every process the same files; task.encode() must not depend on the process or on chance",
        )
    return Split(name, records, samples, rows)


def describe_split(records: Any, samples: Any, rows: Any) -> str:
    """Counts, for people: ``655 records, 4,012 samples in 3,870 rows, 1,980,312 tokens``."""
    text = f"{len(records):,} records, {len(samples):,} samples"
    if rows is not samples:
        text += f" in {len(rows):,} rows"
    if samples.dropped:
        text += f" ({samples.dropped:,} records dropped)"
    return text + f", {int(samples.lengths.sum()):,} tokens"


def make_loader(task: Task, train: Split, config: RunConfig, world: World) -> TrainLoader:
    """The training batches of this rank."""
    return TrainLoader(
        train.rows,
        seed=config.run.seed,
        global_batch=config.train.global_batch,
        micro_batch=resolve_micro_batch(config, world.size),
        rank=world.rank,
        world_size=world.size,
        shuffle=config.data.shuffle,
        collate=task.collate,
    )


def count_steps(config: TrainSection, steps_per_epoch: int) -> int:
    """Optimizer steps of the whole run, from ``steps`` or ``epochs``."""
    if config.steps is not None:
        return config.steps
    return math.ceil((config.epochs or 0) * steps_per_epoch)


def eval_micro_batch(config: RunConfig, world: World) -> int:
    """Rows in one evaluation forward on one process."""
    return config.eval.micro_batch or resolve_micro_batch(config, world.size)


def open_checkpoint(task: Task, config: RunConfig, which: str | None, world: World) -> tuple[Engine, int]:
    """An engine with the weights of a checkpoint, and its step.

    Args:
        which: ``best``, ``latest``, a step or a path; None for the best, or the latest where no evaluation chose one.
    """
    checkpoints = CheckpointDirectory(config.run_dir / "checkpoints")
    path = world.from_first(
        lambda: (checkpoints.best() if which is None else None) or checkpoints.resolve(which or "latest")
    )
    snapshot = read(path)
    engine = choose_engine(task, config, world, total_steps=1)
    engine.load_model(snapshot.model)
    logger.info("checkpoint: %s", path)
    return engine, snapshot.step
