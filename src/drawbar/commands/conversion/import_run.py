"""Makes a run from a checkpoint of another program, which `drawbar train` then goes on with."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from drawbar.checkpoint.format import RESOLVED, Snapshot
from drawbar.commands.conversion.convert_run import write_run
from drawbar.commands.conversion.dcp_folders import read_dcp
from drawbar.commands.conversion.deepspeed_folders import read_deepspeed
from drawbar.commands.conversion.foreign_state import ForeignState, convert_to_model, keeps_adamw_state
from drawbar.commands.conversion.trainer_folders import read_trainer
from drawbar.commands.output_files import check_new_folder, writing
from drawbar.config.io.compare import check_not_fewer_steps
from drawbar.config.schema.run_config import RunConfig
from drawbar.distributed.process_group import Distributed
from drawbar.distributed.rank_info import RankInfo, choose_device
from drawbar.engines.local_model import build_meta_model, prepared_meta_model
from drawbar.engines.results import saved_values
from drawbar.errors import UserError
from drawbar.tasks.task import Task
from drawbar.tasks.task_registry import task_class
from drawbar.train.rundir import without_data_rebuild
from drawbar.train.setup import build_task, on_one_process
from drawbar.train.step import RunProgress
from drawbar.util.new_folder import new_folder

READERS: dict[str, Callable[[Path, nn.Module, Path], ForeignState]] = {
    "dcp": lambda folder, model, scratch: read_dcp(folder, model),
    "deepspeed": read_deepspeed,
    "trainer": lambda folder, model, scratch: read_trainer(folder, model),
}
"""Format → a function that reads a folder of that format. It gets the folder, the model on the meta device, and an
empty folder for temporary files."""


def import_run(source: Path, form: str, config: RunConfig, task_type: type[Task] | None) -> int:
    """Make a run from a checkpoint that another program has written; returns its step.

    Args:
        form: a key of ``READERS``.
        config: decides model, optimizer and strategy. Its run directory must not exist, or be empty; it appears when it
            is complete.

    Raises:
        UserError: the folder does not hold the state of this model and of AdamW; ``train.steps`` asks for fewer steps
            than were made; or the disk takes no more.
    """
    _check(source, config)
    alone = on_one_process(config)
    with Distributed(RankInfo(), choose_device("cpu", RankInfo()), config.launch.timeout) as world:
        task = build_task(task_type or task_class(config.task.type), alone, world, config.run_dir, has_checkpoint=True)
        model = prepared_meta_model(build_meta_model(task), alone, None)
    with (
        writing(config.run_dir, "run.name"),
        new_folder(config.run_dir.absolute()) as draft,
        tempfile.TemporaryDirectory(prefix=".convert-", dir=draft) as scratch,  # removed with the draft after a kill
    ):
        state = READERS[form](source, model, Path(scratch))
        if config.train.steps is not None:
            check_not_fewer_steps(state.step, config.train.steps, config.train)
        weights, optimizer = convert_to_model(state, model, config, source)
        snapshot = Snapshot(state.step, weights, optimizer, {}, _values(state.step, config))
        write_run(
            draft, without_data_rebuild(config), snapshot, "parts" if config.checkpoint.layout == "parts" else "whole"
        )
    return state.step


def _check(source: Path, config: RunConfig) -> None:
    if not source.is_dir():
        raise UserError(f"there is no folder {source}", where="SOURCE", remedy="name the folder of a checkpoint")
    if config.lora is not None:
        raise UserError(
            "a run with adapters cannot go on from the state of a whole model", where="lora", remedy="leave lora out"
        )
    if not keeps_adamw_state(config):
        raise UserError(
            "only the state of AdamW with moments in fp32 can be taken over",
            where="optim",
            remedy="set optim.name=adamw and optim.state_dtype=fp32",
        )
    check_new_folder(config.run_dir, "run.name")


def _values(step: int, config: RunConfig) -> dict[str, Any]:
    """What a checkpoint holds besides tensors. Under ``RESOLVED``, which has what the run's ``auto`` settings stand
    for, a value may still be ``auto``: the run resolves it when it starts. ``data`` is None: the loader then skips as
    many global batches as steps were made. ``validation`` (the fingerprint of the validation samples) is not known, and
    there is no ``base`` (a model under adapters)."""
    return {
        "progress": RunProgress(step=step, evaluated_step=step).state(),
        "data": None,
        "world_size": 1,
        RESOLVED: {
            "precision": config.precision,
            "muon_precision": config.optim.muon_precision,
            "cross_entropy": getattr(config.task, "cross_entropy", "plain"),
            "padding_free": config.data.padding_free,
        },
        "validation": None,
        "base": None,
        "engine": saved_values(step, config, {}),
    }
