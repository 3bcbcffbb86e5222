"""Exports a checkpoint of a run as a folder that transformers loads."""

import sys
from contextlib import redirect_stdout
from pathlib import Path

import torch
from transformers.utils import logging as transformers_logging

from drawbar.commands.hub_push import Push
from drawbar.commands.model_card import model_card
from drawbar.commands.output_files import check_new_folder, writing
from drawbar.config.schema.run_config import RunConfig
from drawbar.distributed.process_group import Distributed
from drawbar.distributed.rank_info import RankInfo
from drawbar.errors import UserError
from drawbar.runtime.log import logger, start_logging
from drawbar.tasks.task import Task
from drawbar.tracking.console import make_console
from drawbar.train.checkpoint_export import CheckpointExport, ExportFormat
from drawbar.util.new_folder import new_folder


def export_run(
    config: RunConfig,
    task_type: type[Task] | None,
    folder: Path,
    checkpoint: str | None,
    form: ExportFormat,
    push: Push | None = None,
) -> None:
    """Write a checkpoint's model, tokenizer and model card as a folder for ``from_pretrained``, on one process and the
    CPU.

    Args:
        folder: absent or empty; it appears when it is complete.
        checkpoint: ``best``, ``latest``, a step or a path; None for the best, or the latest where there is no best one.
        push: where to upload the folder to, once it is complete; it stays where it is.

    Raises:
        UserError: the folder is not empty, there is no such checkpoint, there are no adapters to merge, a weight is too
            large for ``form.dtype``, or the model is none of transformers'; or it cannot be uploaded.
    """
    if push is not None:
        push.check()
    folder = folder.absolute()
    _check(config, folder, form.merge)
    rank_info = RankInfo()
    console = make_console(rank_info.is_rank0)
    start_logging(rank_info.rank, console.logging_handler())
    transformers_logging.disable_progress_bar()
    adapters = config.lora is not None and not form.merge
    with (
        Distributed(rank_info, torch.device("cpu"), config.launch.timeout) as world,
        redirect_stdout(sys.stderr),  # libraries must not write on the command's stdout
    ):
        opened = CheckpointExport(config, task_type, checkpoint, form, world)
        logger.info("checkpoint: %s", opened.path)
        card = model_card(config, opened.model, opened.step, form.dtype, adapters)
        with writing(folder, "--to"), new_folder(folder) as draft:
            opened.write(draft)
            card.save(draft / "README.md")
    console.message(f"{folder}: {'adapters' if adapters else 'model'} and tokenizer")
    if push is not None:
        with redirect_stdout(sys.stderr):
            address = push.upload(folder, f"{config.run.name}, step {opened.step:,}, exported by drawbar")
        console.message(f"{address}: uploaded")
    prefix = getattr(config.task, "source_prefix", "")
    if prefix:
        console.message(f"put {prefix!r} before every source, as in training: the tokenizer does not")


def _check(config: RunConfig, folder: Path, merge: bool) -> None:
    if merge and config.lora is None:
        raise UserError(
            f"the run {config.run.name} has no adapters to merge: its model is whole",
            where="--merge",
            remedy="leave out --merge",
        )
    check_new_folder(folder, "--to")
