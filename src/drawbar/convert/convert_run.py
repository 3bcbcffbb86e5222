"""Converts a checkpoint of a run to a folder of another format."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import Tensor

from drawbar.checkpoint.directory import CheckpointDirectory
from drawbar.checkpoint.read import explain_unusable, read_snapshot
from drawbar.commands.output_files import check_new_folder, writing
from drawbar.config.schema.run_config import RunConfig
from drawbar.convert.dcp_folders import write_dcp
from drawbar.errors import UserError
from drawbar.runtime.safetensors_reader import OnDemandTensors
from drawbar.util.atomic_files import new_folder


def convert_run(config: RunConfig, checkpoint: str, to: str, folder: Path) -> int:
    """Write one checkpoint of a run as a folder of another format, tensor by tensor; returns its step.

    Args:
        checkpoint: ``latest``, ``best``, a step, or a path.
        to: ``dcp`` or ``deepspeed``.
        folder: absent or empty; it appears when it is complete.

    Raises:
        UserError: there is no such checkpoint, or it is damaged; or the folder cannot be written.
    """
    folder = folder.absolute()
    check_new_folder(folder, "--output")
    if config.lora is not None:
        raise UserError(
            "a LoRA run has adapters alone, which are no whole model's state",
            where="--to",
            remedy="`drawbar export` writes them for peft, and with --merge the whole model",
        )
    if (config.optim.name, config.optim.state_dtype) != ("adamw", "fp32"):
        raise UserError(
            f"--to {to} writes the state of AdamW with moments in fp32, and the run's optimizer is {config.optim.name}"
            + (f" with moments in {config.optim.state_dtype}" if config.optim.name == "adamw" else ""),
            where="--to",
            remedy="`drawbar export` writes the weights",
        )
    path = CheckpointDirectory(config.run_dir / "checkpoints").resolve(checkpoint)
    snapshot = read_snapshot(path)
    model, optimizer = (_with_explained_errors(tensors, path) for tensors in (snapshot.model, snapshot.optimizer))
    with writing(folder, "--output"), _disk_errors(), new_folder(folder) as draft:
        if to == "dcp":
            write_dcp(draft, model, optimizer)
        else:
            from drawbar.deepspeed.folders import write_universal  # a guest, which may not be there

            write_universal(draft, snapshot.step, model, optimizer)
    return snapshot.step


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
