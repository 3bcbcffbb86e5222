"""Converts a checkpoint of a run to a folder of another format."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from pydantic import ValidationError
from torch import Tensor

from drawbar.checkpoint.directory import CheckpointDirectory
from drawbar.checkpoint.format import Snapshot
from drawbar.checkpoint.load import explain_unusable, read
from drawbar.checkpoint.part_commit import begin_parts, commit_parts
from drawbar.checkpoint.part_writer import meta_boxes, write_part
from drawbar.commands.conversion.dcp_folders import write_dcp
from drawbar.commands.conversion.deepspeed_folders import write_universal
from drawbar.commands.output_files import check_new_folder, writing
from drawbar.config.io.load_config import SCRIPT_FILE, dump_yaml
from drawbar.config.schema.run_config import RUN_NAME, RunConfig, RunSection
from drawbar.errors import UserError
from drawbar.models.folder import INITIAL_MODEL
from drawbar.runtime.on_demand_tensors import OnDemandTensors
from drawbar.runtime.safetensors_reader import StoredTensors
from drawbar.train.setup import METADATA_FILE
from drawbar.util.new_folder import new_folder

OWN_FORMATS = ("whole", "parts")
_RUN_FILES = ("tokenizer", INITIAL_MODEL, METADATA_FILE, SCRIPT_FILE)
"""What a run needs besides its configuration and its checkpoints."""


def convert_run(config: RunConfig, checkpoint: str, to: str, folder: Path) -> int:
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
    keeps_adamw_state = config.optim.name == "adamw" and config.optim.state_dtype == "fp32"
    if to not in OWN_FORMATS and not keeps_adamw_state:
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
    with writing(folder, "--output"), _disk_errors(), new_folder(folder) as draft:
        if to in OWN_FORMATS:
            _write_run(draft, config, snapshot, to, folder)
        elif to == "dcp":
            write_dcp(draft, model, optimizer)
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


def _write_run(draft: Path, config: RunConfig, snapshot: Snapshot, layout: str, folder: Path) -> None:
    """Write a run in ``draft`` that has this one checkpoint, and will be ``folder``."""
    checkpoints = CheckpointDirectory(draft / "checkpoints")
    if layout == "parts":
        _write_parts(checkpoints, snapshot)
    else:
        checkpoints.write(snapshot)
    run = config.run.model_copy(update={"dir": str(folder.parent), "name": folder.name})
    (draft / "config.yaml").write_text(dump_yaml(config.model_copy(update={"run": run})), "utf-8")
    for name in _RUN_FILES:
        if (config.run_dir / name).is_dir():
            shutil.copytree(config.run_dir / name, draft / name)
        elif (config.run_dir / name).exists():
            shutil.copy(config.run_dir / name, draft / name)


def _write_parts(checkpoints: CheckpointDirectory, snapshot: Snapshot) -> None:
    """Write a checkpoint of one part, as a single rank would that holds the whole model; one tensor at a time
    is in memory."""
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


def _with_explained_errors(tensors: Any, path: Path) -> OnDemandTensors:
    """The tensors of the checkpoint ``path``, read on demand. Reading one raises a ``UserError`` if the
    checkpoint is damaged or the disk fails."""

    def get(name: str) -> Tensor:
        with explain_unusable(path):
            return tensors[name]

    return OnDemandTensors.of(tensors, get)


@contextmanager
def _disk_errors() -> Iterator[None]:
    """Context that raises the OSError behind an error of torch's file writers: after a failed write, they
    raise an error of their own, about what they could not write then."""
    try:
        yield
    except dcp.CheckpointException as error:  # torch puts together what has failed on each rank
        first = next(iter(error.failures.values()))[0]
        raise _disk_error(first) or first from error
    except RuntimeError as error:
        raise _disk_error(error) or error from error


def _disk_error(error: BaseException | None) -> OSError | None:
    """The OSError that led to ``error``, by its chain of causes; None if there is none."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error
