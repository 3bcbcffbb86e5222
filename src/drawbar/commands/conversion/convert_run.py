"""Converts a checkpoint of a run to a folder of another format."""

import shutil
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from drawbar.checkpoint.directory import CheckpointDirectory
from drawbar.checkpoint.format import Snapshot
from drawbar.checkpoint.load import explain_unusable, read
from drawbar.checkpoint.part_commit import begin_parts, commit_parts
from drawbar.checkpoint.part_writer import meta_boxes, write_part
from drawbar.commands.conversion.dcp_folders import write_dcp
from drawbar.commands.conversion.deepspeed_folders import write_universal
from drawbar.commands.conversion.foreign_state import keeps_adamw_state
from drawbar.commands.output_files import check_new_folder, writing
from drawbar.config.io.load_config import SCRIPT_FILE, dump_yaml
from drawbar.config.schema.run_config import RUN_NAME, RunConfig, RunSection
from drawbar.distributed.process_group import Distributed
from drawbar.distributed.rank_info import RankInfo
from drawbar.engines.local_model import build_meta_model, prepared_meta_model
from drawbar.errors import UserError
from drawbar.models.folder import INITIAL_MODEL
from drawbar.optim.optimizers import build_optimizers
from drawbar.runtime.on_demand_tensors import OnDemandTensors
from drawbar.runtime.safetensors_reader import StoredTensors
from drawbar.tasks.task import Task
from drawbar.train.setup import METADATA_FILE, on_one_process, task_of_run
from drawbar.util.new_folder import new_folder

OWN_FORMATS = ("whole", "parts")
_RUN_FILES = ("tokenizer", INITIAL_MODEL, METADATA_FILE, SCRIPT_FILE)
"""What a run needs besides its configuration and its checkpoints."""


def convert_run(config: RunConfig, task: type[Task] | None, checkpoint: str, to: str, folder: Path) -> int:
    """Write one checkpoint of a run as a folder of another format, tensor by tensor; returns its step.

    Args:
        checkpoint: ``latest``, ``best``, a step, or a path.
        to: ``whole`` or ``parts``: a run that has this one checkpoint; ``dcp`` or ``deepspeed``.
        folder: absent or empty; it appears when it is complete.

    Raises:
        UserError: there is no such checkpoint, or it is damaged; or the folder cannot be written.
    """
    folder = folder.absolute()
    check_new_folder(folder, "--output")
    if config.lora is not None and to not in OWN_FORMATS:
        raise UserError(
            "a LoRA run has adapters alone, which are no whole model's state",
            where="--to",
            remedy="`drawbar export` writes them for peft, and with --merge the whole model",
        )
    if to not in OWN_FORMATS and not keeps_adamw_state(config):
        raise UserError(
            f"--to {to} writes the state of AdamW with moments in fp32, and the run's optimizer is {config.optim.name}"
            + (f" with moments in {config.optim.state_dtype}" if config.optim.name == "adamw" else ""),
            where="--to",
            remedy="--to whole and --to parts keep the state of any optimizer, and `drawbar export` writes the weights",
        )
    if to in OWN_FORMATS:
        _check_name(folder, config)
    path = CheckpointDirectory(config.run_dir / "checkpoints").resolve(checkpoint)
    snapshot = read(path)
    model, optimizer = (_with_explained_errors(tensors, path) for tensors in (snapshot.model, snapshot.optimizer))
    snapshot = Snapshot(snapshot.step, model, optimizer, snapshot.rng, snapshot.state)
    groups = _param_groups(config, task) if to == "dcp" else []
    with writing(folder, "--output"), new_folder(folder) as draft:
        if to in OWN_FORMATS:
            named = {"dir": str(folder.parent), "name": folder.name}
            copy = config.model_copy(update={"run": config.run.model_copy(update=named)})
            write_run(draft, copy, snapshot, to)
            _copy_run_files(config.run_dir, draft)
        elif to == "dcp":
            write_dcp(draft, model, optimizer, groups)
        else:
            write_universal(draft, snapshot.step, model, optimizer)
    return snapshot.step


def _check_name(folder: Path, config: RunConfig) -> None:
    """Refuse a folder for a run whose name no run can have: no command would open it."""
    try:
        RunSection.model_validate({**config.run.model_dump(), "name": folder.name})
    except ValidationError as error:
        raise UserError(
            f"{folder.name!r} cannot be the name of a run", where="--output", remedy=f"use {RUN_NAME}"
        ) from error


def write_run(draft: Path, config: RunConfig, snapshot: Snapshot, layout: str) -> None:
    """Write a run that has this one checkpoint.

    Args:
        draft: what will be its directory.
        layout: ``whole`` or ``parts``.
        snapshot: tensors that are read when they are written.
    """
    checkpoints = CheckpointDirectory(draft / "checkpoints")
    if layout == "parts":
        _write_parts(checkpoints, snapshot)
    else:
        checkpoints.write(snapshot)
    (draft / "config.yaml").write_text(dump_yaml(config), "utf-8")


def _write_parts(checkpoints: CheckpointDirectory, snapshot: Snapshot) -> None:
    """Write a checkpoint of one part, as a single rank would that holds the whole model; one tensor at a time is in
    memory."""
    model, optimizer = snapshot.model, snapshot.optimizer
    assert isinstance(model, StoredTensors)
    assert isinstance(optimizer, StoredTensors)
    tensors = {**dict.fromkeys(model, model), **dict.fromkeys(optimizer, optimizer)}
    record = write_part(
        begin_parts(checkpoints, snapshot.step),
        0,
        meta_boxes(model),
        meta_boxes(optimizer),
        model.tied(),
        load=lambda shard: tensors[shard.name][shard.name],
    )
    commit_parts(checkpoints, snapshot.step, [record], snapshot.state, snapshot.rng)


def _copy_run_files(run: Path, draft: Path) -> None:
    for name in _RUN_FILES:
        if (run / name).is_dir():
            shutil.copytree(run / name, draft / name)
        elif (run / name).exists():
            shutil.copy(run / name, draft / name)


def _with_explained_errors(tensors: Any, path: Path) -> OnDemandTensors:
    """The tensors of the checkpoint ``path``, read on demand. Reading one raises a ``UserError`` if the checkpoint is
    damaged or the disk fails."""

    def get(name: str) -> Tensor:
        with explain_unusable(path):
            return tensors[name]

    return OnDemandTensors.of(tensors, get)


def _param_groups(config: RunConfig, task_type: type[Task] | None) -> list[dict[str, Any]]:
    """``param_groups`` of the optimizers as torch's ``get_state_dict`` returns them, with names of parameters. Their
    learning rates are the peak ones, without warm-up and decay."""
    config = on_one_process(config)
    with Distributed(RankInfo(), torch.device("cpu"), config.launch.timeout) as world:
        task = task_of_run(task_type, config, world)
        model = prepared_meta_model(build_meta_model(task), config, None)
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups = [group for optimizer in build_optimizers(model, config.optim) for group in optimizer.param_groups]
    return [
        {"params": [names[parameter] for parameter in group["params"]]}
        | {key: value for key, value in group.items() if key not in ("params", "param_names")}
        for group in groups
    ]
