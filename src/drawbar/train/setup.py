"""Builds a run's task, and an engine with a checkpoint's weights for commands that do not train. Also steps of startup:
counting steps, saving the tokenizer, checking the script and the base model."""

import json
import math
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from drawbar.checkpoint.all_ranks import read_on_all_ranks, run_on_all_ranks
from drawbar.checkpoint.directory import CheckpointDirectory
from drawbar.checkpoint.format import Snapshot
from drawbar.checkpoint.read import explain_unusable, weights_to_use
from drawbar.checkpoint.space import rust_errors_as_oserror
from drawbar.config.io.compare import Difference
from drawbar.config.io.fields import show
from drawbar.config.io.load_config import SCRIPT_FILE, script_of_run
from drawbar.config.io.source import read_file
from drawbar.config.schema.run_config import OptimSection, ParallelSection, RunConfig, TaskConfig, TrainSection
from drawbar.config.schema.task_sections import CausalLMConfig, TokenizerTraining
from drawbar.data.tokenizer import load_tokenizer
from drawbar.distributed.process_group import Distributed
from drawbar.distributed.rank_info import has_rank
from drawbar.engines.build import build_engine
from drawbar.engines.engine import Engine
from drawbar.errors import UserError
from drawbar.models.folder import initial_model_of
from drawbar.models.lora import FrozenBaseInfo
from drawbar.optim.schedules import learning_rate_scale
from drawbar.runtime.log import logger
from drawbar.runtime.seed import seed_everything
from drawbar.tasks.causal_lm import CausalLM
from drawbar.tasks.chat import read_template
from drawbar.tasks.messages import known_columns
from drawbar.tasks.pretrained import PretrainedTask
from drawbar.tasks.task import Task
from drawbar.tasks.task_context import TaskContext
from drawbar.tasks.task_registry import is_named, task_class
from drawbar.tasks.user_methods import make_task, name_failing_method
from drawbar.train.resolve import with_cross_entropy_of
from drawbar.util.atomic_files import sync, write_durably
from drawbar.util.versions import untested_versions

METADATA_FILE = "task.json"
"""File in the run directory with the task's dataset metadata."""


def warn_of_one_process(config: RunConfig, device: torch.device) -> None:
    """Warn if a script or notebook sets ``launch.nproc`` to several processes: only the commands start them."""
    wanted = config.launch.nproc
    if wanted == "auto":
        one = device.type != "cuda" or config.parallel.features.one_process
        wanted = 1 if one else torch.cuda.device_count()
    if wanted > 1 and not has_rank():
        logger.warning(
            "training in this process only: a Trainer does not start the %d processes of launch.nproc; use "
            "`drawbar train`, or start this script with `torchrun --nproc_per_node=%d`",
            *(wanted, wanted),
        )


def warn_of_untested_versions() -> None:
    """Warn once about libraries older or newer than those that drawbar is tested with."""
    if untested := untested_versions():
        logger.warning("drawbar is not tested with %s: if something fails, check there first", ", ".join(untested))


def build_task(
    task_type: type[Task],
    config: RunConfig,
    world: Distributed,
    source_run_dir: Path,
    has_checkpoint: bool = False,
    has_labels: bool = True,
    trains: bool = True,
    initial_model: Path | None = None,
) -> Task:
    """Build the task with its tokenizer and dataset metadata, and with the detected columns of the data in its options.
    Tokenizer and metadata are loaded from ``source_run_dir``, the run directory of the weights, if saved there;
    otherwise the task of rank 0 makes them, and the other ranks receive them.

    Args:
        has_checkpoint, has_labels, trains: see ``TaskContext``.
        initial_model: see ``TaskContext``; None for that of the run directory, if any.

    Raises:
        UserError: the task cannot be built, one of its methods fails, or its metadata are not plain values.
    """
    options = config.task
    if task_type is CausalLM and isinstance(options, CausalLMConfig):
        before = _saved_options(source_run_dir) if has_checkpoint else None
        found = world.from_rank0(lambda: known_columns(options, config.data, before), "reading the first record")
        config = config.model_copy(update={"task": options.model_copy(update=found)})
    initial_model = initial_model or initial_model_of(config.run_dir, config.task)
    context = TaskContext(
        config, has_checkpoint=has_checkpoint, has_labels=has_labels, trains=trains, initial_model=initial_model
    )
    of_rank0: list[Task] = []

    def build() -> tuple[Any, Any]:
        saved = _saved_parts(task_type, config, source_run_dir)
        task = make_task(task_type, replace(context, **saved))
        of_rank0.append(task)
        with name_failing_method(task):
            parts = task.tokenizer, task.dataset_metadata
            if "tokenizer" not in saved and isinstance(task, PretrainedTask):
                _log_tokenizer(task)
        return parts

    tokenizer, metadata = world.from_rank0(build, "building the task")
    if of_rank0:
        return of_rank0[0]
    return make_task(task_type, replace(context, tokenizer=tokenizer, dataset_metadata=metadata))


def check_script(task_type: type[Task], config: RunConfig) -> None:
    """Raise UserError if the run started with a task class defined in a script, and would resume with another."""
    found = script_of_run(config.run_dir)
    if found is None or found[1] == task_type.__qualname__:
        return
    script, name = found
    raise UserError(
        f"the task of the run {config.run.name} is the class {name} of the script {script}, and this is "
        f"{task_type.__qualname__}",
        where=str(config.run_dir),
        remedy=f"to resume the run, use the script: `python {script} train …`; for a new run, choose another run.name",
    )


def _log_tokenizer(task: PretrainedTask) -> None:
    logger.info("a text is read as: %s", task.describe_special_tokens())
    if not task.learns_to_stop:
        logger.warning(
            "the training targets have no end token, so the model will not learn to stop: every generated text will "
            "have max_new_tokens tokens; set eos_token in the tokenizer's tokenizer_config.json, and leave "
            "task.add_special_tokens at auto"
        )


def task_of_run(task_type: type[Task] | None, config: RunConfig, world: Distributed, has_labels: bool = True) -> Task:
    """The task of a trained run, of the class ``task_type`` or the one that ``task.type`` names."""
    found = task_type or task_class(config.task.type)
    return build_task(found, config, world, config.run_dir, has_checkpoint=True, has_labels=has_labels, trains=False)


def _saved_parts(task_type: type[Task], config: RunConfig, source_run_dir: Path) -> dict[str, Any]:
    """The saved tokenizer and dataset metadata of a run directory."""
    parts: dict[str, Any] = {}
    if (source_run_dir / "tokenizer").is_dir() and not _has_other_tokenizer(config.task, source_run_dir):
        parts["tokenizer"] = _saved_tokenizer(task_type, config.task, source_run_dir)
    if (source_run_dir / METADATA_FILE).exists():
        parts["dataset_metadata"] = json.loads((source_run_dir / METADATA_FILE).read_text("utf-8"))
    return parts


def _has_other_tokenizer(options: TaskConfig, source_run_dir: Path) -> bool:
    """Whether ``task.tokenizer`` differs from that of the run in ``source_run_dir``; only a fork may change it."""
    named, before = getattr(options, "tokenizer", None), _saved_options(source_run_dir)
    if isinstance(named, TokenizerTraining):
        _refuse_other_training(named, before.get("tokenizer", named.model_dump()))
    if not isinstance(named, str) or named in (before.get("tokenizer", named), before.get("model")):
        return False
    logger.warning("task.tokenizer: %s, which is not the tokenizer of the run that the weights come from", named)
    return True


def _refuse_other_training(wanted: TokenizerTraining, before: Any) -> None:
    """Refuse to train a new tokenizer for a fork: its weights belong to the tokenizer of the source run."""
    if isinstance(before, dict) and TokenizerTraining.model_validate(before) == wanted:
        return
    raise UserError(
        f"the weights belong to the tokenizer of the run that they come from ({show(before)}); "
        f"a fork cannot train a new one ({show(wanted.model_dump(mode='json'))})",
        where="task.tokenizer",
        remedy="leave task.tokenizer as it was in that run, or set it to the folder of an existing tokenizer",
    )


def _saved_tokenizer(task_type: type[Task], options: TaskConfig, source_run_dir: Path) -> Any:
    """The saved tokenizer of a run. A chat template configured since then replaces the saved one."""
    tokenizer = load_tokenizer(str(source_run_dir / "tokenizer"))
    template = getattr(options, "chat_template", None) if issubclass(task_type, PretrainedTask) else None
    if template is not None and template != _saved_options(source_run_dir).get("chat_template"):
        tokenizer.chat_template = read_template(template)
    return tokenizer


def _saved_options(source_run_dir: Path) -> dict[str, Any]:
    """The task options stored in a run directory; empty if there are none."""
    path = source_run_dir / "config.yaml"
    return read_file(path).values.get("task", {}) if path.exists() else {}


def save_task(task: Task, run_dir: Path) -> None:
    """Save tokenizer and dataset metadata in the run directory, so that the run no longer depends on their source."""
    if hasattr(task.tokenizer, "save_pretrained") and not (run_dir / "tokenizer").exists():
        draft = run_dir / "tokenizer.tmp"
        with rust_errors_as_oserror(draft):
            task.tokenizer.save_pretrained(str(draft))
        for path in (*draft.iterdir(), draft):
            sync(path)
        draft.rename(run_dir / "tokenizer")
        sync(run_dir)
    defined_in = getattr(sys.modules[type(task).__module__], "__file__", None)
    if is_named(task):
        (run_dir / SCRIPT_FILE).unlink(missing_ok=True)  # another class may have failed before its first checkpoint
    elif defined_in is not None:
        script = {"script": str(Path(defined_in).absolute()), "class": type(task).__qualname__}
        write_durably(run_dir / SCRIPT_FILE, json.dumps(script, ensure_ascii=False) + "\n")
    if task.dataset_metadata and not (run_dir / METADATA_FILE).exists():
        write_durably(run_dir / METADATA_FILE, json.dumps(task.dataset_metadata, ensure_ascii=False, indent=2) + "\n")


def on_one_process(config: RunConfig) -> RunConfig:
    """The same run without parallelism, for single-process commands: a checkpoint fits any strategy."""
    return config.with_parallel(ParallelSection(strategy="single"))


def count_steps(config: TrainSection, steps_per_epoch: int | None) -> int:
    """Number of optimizer steps of the whole run, from ``steps`` or ``epochs``."""
    if config.steps is not None:
        return config.steps
    assert steps_per_epoch is not None, "a rule refuses epochs of a stream"
    return math.ceil((config.epochs or 0) * steps_per_epoch)


def log_changed_schedule(changed: Sequence[Difference], made: int, total_steps: int, optim: OptimSection) -> None:
    """Log that a resumed run has a different last step or schedule than it started with, and the consequences."""
    if not changed or made >= total_steps:
        return
    what = ", ".join(f"{one.key} was {show(one.old)} and is now {show(one.new)}" for one in changed)
    rate = optim.lr * learning_rate_scale(made, total_steps, optim)
    logger.info("%s: the run continues from step %s to step %s", what, f"{made:,}", f"{total_steps:,}")
    planned = optim.schedule_steps or total_steps
    logger.info(
        "the learning rate of these steps is that of a run of %s steps: it continues at %.2g%s",
        *(f"{planned:,}", rate, _how_to_keep(changed, optim)),
    )
    last = optim.lr * learning_rate_scale(total_steps - 1, total_steps, optim)
    if planned < total_steps and last < 0.01 * optim.lr:
        logger.warning(
            "after step %s the schedule is over, and the learning rate stays at %.2g: these steps change little",
            *(f"{planned:,}", last),
        )


def _how_to_keep(changed: Sequence[Difference], optim: OptimSection) -> str:
    """Advice on how an extended run can keep its original schedule."""
    before = next((one.old for one in changed if one.key == "train.steps"), None)
    keeps = f"; optim.schedule_steps={before} keeps the original schedule"
    return keeps if isinstance(before, int) and optim.schedule_steps is None else ""


def check_predicts(task: Task, probabilities: bool) -> None:
    """Refuse a task that makes no predictions or, if ``probabilities`` are requested, returns none."""
    if not task.predicts:
        or_generates = ", or set task.generation" if hasattr(task.config, "generation") else ""
        raise UserError(
            f"{type(task).__name__} makes no predictions",
            where="RUN",
            remedy=f"define predict() in the task{or_generates}; `drawbar eval` works without it",
        )
    if probabilities and not task.gives_probabilities:
        raise UserError(
            f"{type(task).__name__} returns no probabilities",
            remedy="only classifiers do; in your own task, define probabilities(model, batch)",
        )


def checkpoint_of(config: RunConfig, checkpoint: str | None, world: Distributed) -> Path:
    """The folder of a run's checkpoint. Collective.

    Args:
        checkpoint: ``best``, ``latest``, a step or a path; None for the best or, if there is no best one, the latest.
    """
    checkpoints = CheckpointDirectory(config.run_dir / "checkpoints")
    return world.from_rank0(
        lambda: (checkpoints.best() if checkpoint is None else None) or checkpoints.resolve(checkpoint or "latest"),
        "looking for the checkpoint",
    )


def open_checkpoint(
    task: Task,
    config: RunConfig,
    checkpoint: str | None,
    world: Distributed,
    before_loading: Callable[[Engine], None] = lambda engine: None,
) -> tuple[Engine, int]:
    """An engine with the weights of a checkpoint (see ``checkpoint_of``), and its step.

    Args:
        before_loading: called with the engine while it has the weights that training started from.
    """
    path = checkpoint_of(config, checkpoint, world)
    with ExitStack() as reading:
        with explain_unusable(path):
            snapshot = reading.enter_context(read_on_all_ranks(path, world))
        seed_everything(config.run.seed)  # as in training: checkpoints lack a task's randomly drawn frozen weights
        engine = build_engine(task, with_cross_entropy_of(config, snapshot.state), world)
        seed_everything(config.run.seed, world.dims.seed_rank(world.rank))
        warn_of_other_base(snapshot, engine.base)
        before_loading(engine)
        with explain_unusable(path):
            run_on_all_ranks(path, world, f"loading {path}", lambda: engine.load_model(weights_to_use(snapshot)))
    logger.info("checkpoint: %s", path)
    return engine, snapshot.step


def warn_of_other_base(snapshot: Snapshot, base: FrozenBaseInfo | None) -> None:
    """As ``check_base``, but with a warning instead of the error."""
    try:
        check_base(snapshot, base)
    except UserError as error:
        logger.warning("%s: scores and predictions will differ from those of the run", error.what)


def check_base(snapshot: Snapshot, base: FrozenBaseInfo | None) -> None:
    """Refuse adapters on a pretrained model other than the one they were trained on, which checkpoints do not contain.

    Raises:
        UserError: the pretrained weights differ.
    """
    if base is None:
        return
    if snapshot.state["base"] != base.digest:
        raise UserError(
            "the weights of the pretrained model are not those that the adapters of this run were trained on",
            where="task.model",
            remedy="restore that model (on the Hub, the name may now refer to another revision), or start a new "
            "run from these adapters with `--fork NEWNAME`",
        )
