"""From a run directory to a folder that transformers loads."""

import os
import shutil
import sys
from contextlib import closing, redirect_stdout
from pathlib import Path

import torch
from transformers.utils import logging as transformers_logging

from drawbar.checkpoint.space import rust_errors
from drawbar.commands.output_files import writing
from drawbar.config.schema.run_config import RunConfig
from drawbar.distributed.process_group import Distributed
from drawbar.distributed.rank_info import RankInfo
from drawbar.engines.engine import Engine
from drawbar.errors import UserError
from drawbar.models.lora import merged, save_adapter
from drawbar.models.saving import save_transformers
from drawbar.runtime.log import start_logging
from drawbar.tasks.pretrained import PretrainedTask
from drawbar.tasks.task import Task
from drawbar.tracking.console import make_console
from drawbar.train.setup import on_one_process, open_checkpoint, task_of_run

LARGEST_FILE = "5GB"
"""A larger model is exported in several files, so that those who load it need not read all of it to have a part."""


def export_run(
    config: RunConfig, task_type: type[Task] | None, folder: Path, checkpoint: str | None, merge: bool
) -> None:
    """Write a checkpoint's model and tokenizer as a folder for ``from_pretrained``, on one process and the CPU.

    Args:
        folder: absent or empty; it appears when it is complete.
        checkpoint: see ``open_checkpoint``.
        merge: for a LoRA run, write the whole model with the adapters in its weights, not the adapters alone.

    Raises:
        UserError: the folder is not empty, there is no such checkpoint, there are no adapters to merge, or the model
            is none of transformers'.
    """
    # fp32: in a lower precision the frozen weights would be rounded before the adapters are merged into them
    config = on_one_process(config).model_copy(update={"precision": "fp32"})
    folder = folder.absolute()
    _check(config, folder, merge)
    rank_info = RankInfo()
    console = make_console(rank_info.is_rank0)
    start_logging(rank_info.rank, console.logging_handler())
    transformers_logging.disable_progress_bar()
    with Distributed(rank_info, torch.device("cpu"), config.launch.timeout) as world:
        task = task_of_run(task_type, config, world)
        engine, _ = open_checkpoint(task, config, checkpoint, world)
        with closing(engine), redirect_stdout(sys.stderr):  # libraries must not write on the command's stdout
            _write(engine, task, folder, merge)
    console.message(f"{folder}: {'adapters' if config.lora and not merge else 'model'} and tokenizer")
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
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file", where="--to", remedy="name a new folder")
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder} is not empty", where="--to", remedy="name a new folder")


def _write(engine: Engine, task: Task, folder: Path, merge: bool) -> None:
    draft = folder.with_name(f"{folder.name}.tmp-{os.getpid()}")
    try:
        with writing(folder, "--to"), rust_errors(draft):
            draft.mkdir(parents=True)
            _save_model(engine, draft, getattr(task.config, "model", ""), merge)
            if hasattr(task.tokenizer, "save_pretrained"):
                tokenizer = task.tokenizer_to_export() if isinstance(task, PretrainedTask) else task.tokenizer
                tokenizer.save_pretrained(str(draft))
            _apply_umask(draft)
            draft.rename(folder)  # an empty folder gives way
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _save_model(engine: Engine, folder: Path, base_name: str, merge: bool) -> None:
    """Save a folder that transformers loads: for a LoRA run the adapter of the model ``base_name`` alone, or, with
    ``merge``, the whole model; the engine cannot be used after that."""
    model = engine.module
    if not hasattr(model, "save_pretrained"):
        raise UserError(
            f"a {type(model).__name__} is no transformers model, and has no format to export to",
            where="RUN",
            remedy="its weights are in the run's checkpoints, as safetensors",
        )
    if engine.config.lora is None:
        save_transformers(model, folder, LARGEST_FILE)
    elif merge:
        save_transformers(merged(model), folder, LARGEST_FILE)
    else:
        save_adapter(model, folder, base_name)


def _apply_umask(folder: Path) -> None:
    """Let the user's umask decide who may read the files, as for the folder: safetensors lets only the owner."""
    for path in folder.iterdir():
        path.chmod(folder.stat().st_mode & 0o666)
