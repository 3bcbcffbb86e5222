"""From a configuration to the parts of a run besides its data: task and engine."""

import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from drawbar.checkpoint.directory import CheckpointDirectory
from drawbar.checkpoint.format import Snapshot
from drawbar.checkpoint.load import read_together
from drawbar.checkpoint.space import rust_errors
from drawbar.config.deepspeed.meaning import laid_out
from drawbar.config.io.compare import Difference
from drawbar.config.io.fields import show
from drawbar.config.io.load_config import SCRIPT_FILE
from drawbar.config.io.source import read_file
from drawbar.config.schema.run_config import OptimSection, ParallelSection, RunConfig, TaskConfig, TrainSection
from drawbar.data.loader import OtherData
from drawbar.data.tokenizer import load_tokenizer
from drawbar.distributed.process_group import Distributed
from drawbar.distributed.rank_info import has_rank
from drawbar.engines.build import build_engine
from drawbar.engines.engine import Engine
from drawbar.errors import UserError
from drawbar.optim.schedules import learning_rate_scale
from drawbar.runtime.log import logger
from drawbar.runtime.seed import seed_everything
from drawbar.tasks.chat import read_template
from drawbar.tasks.overrides import name_failing_method
from drawbar.tasks.pretrained import PretrainedTask
from drawbar.tasks.task import Task
from drawbar.tasks.task_context import TaskContext
from drawbar.tasks.task_registry import is_named, task_class
from drawbar.util.atomic_files import sync, write_durably

TASK_FILE = "task.json"
WRAPS_TEXTS = "wraps_texts"
"""Marker file of a tokenizer that adds the special tokens itself; where it is missing (older runs), the task did."""


def warn_of_one_process(config: RunConfig, device: torch.device) -> None:
    """Warn a script or notebook whose ``launch.nproc`` asks for several processes: only the commands start them."""
    wanted = config.launch.nproc
    if wanted == "auto":
        one = device.type != "cuda" or config.parallel.features.one_process
        wanted = 1 if one else torch.cuda.device_count()
    if wanted > 1 and not has_rank():
        logger.warning(
            "training on this one process: a Trainer starts no others, though launch.nproc asks for %d; "
            "`drawbar train` does, or start this script with `torchrun --nproc_per_node=%d`",
            *(wanted, wanted),
        )


def build_task(
    task_type: type[Task],
    config: RunConfig,
    world: Distributed,
    origin: Path,
    has_checkpoint: bool = False,
    has_labels: bool = True,
    trains: bool = True,
) -> Task:
    """The task with its tokenizer and dataset metadata: loaded from ``origin``, the run directory that the weights come
    from, if saved there; otherwise made by the task of rank 0. The other ranks then build their tasks with both.

    Args:
        has_checkpoint, has_labels, trains: see ``TaskContext``.

    Raises:
        UserError: a method of the task fails, or finds metadata that are no plain values.
    """
    context = TaskContext(config, has_checkpoint=has_checkpoint, has_labels=has_labels, trains=trains)
    if world.is_rank0:
        with world.working("building the task"):
            context = replace(context, **_saved_parts(task_type, config, origin))
            task = task_type(context)
            with name_failing_method(task):
                parts = task.tokenizer, task.dataset_metadata
    tokenizer, metadata = world.from_rank0(lambda: parts, "building the task")
    if not world.is_rank0:
        return task_type(replace(context, tokenizer=tokenizer, dataset_metadata=metadata))
    if context.tokenizer is None and isinstance(task, PretrainedTask):
        logger.info("a text is read as: %s", task.describe_special_tokens())
    return task


def task_of_run(task_type: type[Task] | None, config: RunConfig, world: Distributed, has_labels: bool = True) -> Task:
    """The task of a run that was trained, of the class that ``task.type`` names or of ``task_type``."""
    found = task_type or task_class(config.task.type)
    known = {"has_checkpoint": True, "has_labels": has_labels, "trains": False}
    return build_task(found, config, world, config.run_dir, **known)


def _saved_parts(task_type: type[Task], config: RunConfig, origin: Path) -> dict[str, Any]:
    """What a run directory holds of a task's context."""
    parts: dict[str, Any] = {}
    if (origin / "tokenizer").is_dir():
        parts["tokenizer"] = _saved_tokenizer(task_type, config.task, origin)
    if (origin / TASK_FILE).exists():
        parts["dataset_metadata"] = json.loads((origin / TASK_FILE).read_text("utf-8"))
    return parts


def _saved_tokenizer(task_type: type[Task], options: TaskConfig, origin: Path) -> Any:
    """The saved tokenizer of a run. In older runs the task added special tokens; now the tokenizer is set up to do so.
    A chat template configured after the tokenizer was saved replaces the saved one."""
    tokenizer = load_tokenizer(str(origin / "tokenizer"))
    if not issubclass(task_type, PretrainedTask):
        return tokenizer
    if not _wraps_texts(origin):
        tokenizer = task_type.upgrade_tokenizer(tokenizer)
    template = getattr(options, "chat_template", None)
    if template is not None and template != _saved_options(origin).get("chat_template"):
        tokenizer.chat_template = read_template(template)
    return tokenizer


def _wraps_texts(origin: Path) -> bool:
    return (origin / "tokenizer" / WRAPS_TEXTS).exists()


def _saved_options(origin: Path) -> dict[str, Any]:
    """The options of a run's task, as they were written down; none where they were not."""
    path = origin / "config.yaml"
    return read_file(path).values.get("task", {}) if path.exists() else {}


@contextmanager
def explain_chat_label_change(task: Task, origin: Path) -> Iterator[None]:
    """Explain why a chat run of an older drawbar cannot be resumed: its labels changed, not its data."""
    try:
        yield
    except OtherData as error:
        if _wraps_texts(origin) or getattr(task.config, "messages_column", None) is None:
            raise
        raise UserError(
            "the chats of this run have other labels now (unless its data changed): it was begun by an older drawbar, "
            "which also trained what stands between an answer's end token and the next message",
            where=str(origin),
            remedy="start a new run from these weights with `--fork NEWNAME`",
        ) from error


def save_task(task: Task, run_dir: Path) -> None:
    """Keep tokenizer and dataset metadata with the run, so that it can be resumed and used without the place they came
    from."""
    if hasattr(task.tokenizer, "save_pretrained") and not (run_dir / "tokenizer").exists():
        draft = run_dir / "tokenizer.tmp"
        with rust_errors(draft):
            task.tokenizer.save_pretrained(str(draft))
        (draft / WRAPS_TEXTS).touch()
        for path in (*draft.iterdir(), draft):
            sync(path)
        draft.rename(run_dir / "tokenizer")
        sync(run_dir)
    defined_in = getattr(sys.modules[type(task).__module__], "__file__", None)
    if not is_named(task) and defined_in is not None:
        script = {"script": str(Path(defined_in).absolute()), "class": type(task).__qualname__}
        write_durably(run_dir / SCRIPT_FILE, json.dumps(script, ensure_ascii=False) + "\n")
    if task.dataset_metadata and not (run_dir / TASK_FILE).exists():
        write_durably(run_dir / TASK_FILE, json.dumps(task.dataset_metadata, ensure_ascii=False, indent=2) + "\n")


def on_one_process(config: RunConfig) -> RunConfig:
    """The same run without parallelism, for commands that are one process: a checkpoint fits any strategy."""
    return laid_out(config, ParallelSection(strategy="single"))


def count_steps(config: TrainSection, steps_per_epoch: int | None) -> int:
    """Optimizer steps of the whole run, from ``steps`` or ``epochs``."""
    if config.steps is not None:
        return config.steps
    assert steps_per_epoch is not None, "a rule refuses epochs of a stream"
    return math.ceil((config.epochs or 0) * steps_per_epoch)


def log_changed_length(changed: Sequence[Difference], made: int, total_steps: int, optim: OptimSection) -> None:
    """Log that a resumed run trains to a different last step than it began with, and what follows from that."""
    if not changed or made >= total_steps:
        return
    what = ", ".join(f"{one.key} was {show(one.old)} and is now {show(one.new)}" for one in changed)
    rate = optim.lr * learning_rate_scale(made, total_steps, optim)
    logger.info("%s: the run goes on from step %s to step %s", what, f"{made:,}", f"{total_steps:,}")
    logger.info(
        "the learning rate of these steps is that of a run of %s steps: it goes on with %.2g", f"{total_steps:,}", rate
    )


def with_cross_entropy_of(config: RunConfig, state: Mapping[str, Any]) -> RunConfig:
    """The configuration with ``task.cross_entropy: plain`` in place of ``auto`` if a checkpoint's run was plain:
    other implementations add up the same loss in another order.

    Args:
        state: of the checkpoint; older ones do not say how the loss was computed: it was plain.
    """
    begun = state.get("formats", {}).get("cross_entropy", "plain")
    if begun != "plain" or getattr(config.task, "cross_entropy", None) != "auto":
        return config
    return config.model_copy(update={"task": config.task.model_copy(update={"cross_entropy": "plain"})})


def check_predicts(task: Task, probabilities: bool) -> None:
    """Refuse a task that makes no predictions, or, if ``probabilities`` are asked for, gives none."""
    if not task.predicts:
        raise UserError(
            f"{type(task).__name__} makes no predictions",
            where="RUN",
            remedy="define predict() in the task, or set task.generation; `drawbar eval` gives its scores",
        )
    if probabilities and not task.gives_probabilities:
        raise UserError(
            f"{type(task).__name__} does not say how likely its predictions are",
            where="--probabilities",
            remedy="classifiers do, for labels; in a task of your own, define probabilities(model, batch)",
        )


def open_checkpoint(task: Task, config: RunConfig, checkpoint: str | None, world: Distributed) -> tuple[Engine, int]:
    """An engine with the weights of a checkpoint, and its step.

    Args:
        checkpoint: ``best``, ``latest``, a step or a path; None for the best, or, if there is no best one, the latest.
    """
    checkpoints = CheckpointDirectory(config.run_dir / "checkpoints")
    path = world.from_rank0(
        lambda: (checkpoints.best() if checkpoint is None else None) or checkpoints.resolve(checkpoint or "latest"),
        "looking for the checkpoint",
    )
    snapshot = read_together(path, world)
    seed_everything(config.run.seed)  # as in training: frozen weights that a task draws are not saved with adapters
    engine = build_engine(task, with_cross_entropy_of(config, snapshot.state), world)
    seed_everything(config.run.seed, world.dims.seed_rank(world.rank))
    try:
        check_base(snapshot, engine)
    except UserError as error:
        logger.warning("%s: its scores and predictions will differ from those of the run", error.what)
    with world.barrier_after(f"loading {path}"):
        engine.load_model(snapshot.model)
    logger.info("checkpoint: %s", path)
    return engine, snapshot.step


def check_base(snapshot: Snapshot, engine: Engine) -> None:
    """Refuse adapters on a pretrained model that is not the one they were trained on: a checkpoint holds nothing of it.

    Raises:
        UserError: the pretrained weights differ, or neither their files nor the checkpoint has some parameter.
    """
    if engine.base is None:
        return
    lost = sorted(engine.base.new - snapshot.model.keys())
    if lost:
        raise UserError(
            f"neither the pretrained model nor this checkpoint has {lost[0]}: an older drawbar set it at random, and "
            "did not save it",
            where="task.model",
            remedy="train the run anew, under another run.name",
        )
    if snapshot.state.get("base") not in (None, engine.base.digest):  # older checkpoints do not say it
        raise UserError(
            "the weights of the pretrained model are not those that the adapters of this run were trained on",
            where="task.model",
            remedy="put back that model (on the hub, a name may stand for another revision by now), or start a new "
            "run from these adapters with `--fork NEWNAME`",
        )
