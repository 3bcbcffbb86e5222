"""``drawbar export``."""

import re
from pathlib import Path
from typing import TYPE_CHECKING

import click

from drawbar.cli.arguments import checkpoint_option
from drawbar.cli.complete_words import complete_run

if TYPE_CHECKING:
    from drawbar.tasks.task import Task


@click.command(
    short_help="Write a run's model for transformers to load.",
    epilog="""\b
Examples:
  drawbar export runs/demo --to demo-model
  drawbar export runs/demo --to demo-model --checkpoint latest
  drawbar export runs/demo --to demo-model --dtype bf16 --shard-size 2GB
  drawbar export runs/lora --to lora-adapter                 the adapters alone, for peft
  drawbar export runs/lora --to lora-model --merge           the whole model
  drawbar export runs/demo --to demo-model --push me/demo    and to the Hugging Face Hub, as a private repository

\b
Start a new run from the folder by task.model=demo-model, or load it by transformers' from_pretrained.
In memory is about one file of weights (--shard-size), however large the model; all of it where
transformers computes stored weights from several, or a task cannot read a base model's files.
""",
)
@click.argument("run", shell_complete=complete_run)
@click.option(
    "--to",
    "folder",
    type=click.Path(path_type=Path),
    required=True,
    metavar="DIR",
    help="The folder to write: a new one, or an empty one.",
)
@click.option("--merge", is_flag=True, help="Of a LoRA run: the whole model, with the adapters in its weights.")
@click.option(
    "--dtype",
    type=click.Choice(["fp32", "bf16", "fp16"]),
    default="fp32",
    show_default=True,
    help="The dtype of the weights.",
)
@click.option(
    "--shard-size",
    default="5GB",
    show_default=True,
    metavar="SIZE",
    help="The most that one file of weights holds, in MB or GB; larger models are divided into several files.",
)
@checkpoint_option
@click.option(
    "--push",
    metavar="OWNER/NAME",
    help="Upload the folder to this model repository of the Hugging Face Hub, too; a new one is private.",
)
@click.option("--public", is_flag=True, help="With --push: a new repository is one that everybody sees.")
@click.pass_obj
def export(
    task: "type[Task] | None",
    run: str,
    folder: Path,
    merge: bool,
    dtype: str,
    shard_size: str,
    checkpoint: str | None,
    push: str | None,
    public: bool,
) -> int:
    """Write the model of RUN (a run directory), its tokenizer and a model card as a folder that transformers loads."""
    from drawbar.cli.arguments import load_run
    from drawbar.errors import UserError
    from drawbar.util.torch_imports import quick_imports

    if not re.fullmatch(r"(?=.*[1-9])\d+(\.\d+)?[MG]B", shard_size):
        raise UserError(f"{shard_size} is no size of a file", where="--shard-size", remedy="give it as 500MB or 5GB")
    if public and push is None:
        raise UserError("nothing is uploaded", where="--public", remedy="add --push OWNER/NAME, or leave out --public")
    # the weights are fp32 whatever the run computed with; and a machine without a GPU can export
    loaded = load_run(run, ("launch.nproc=1", "device=cpu", "precision=fp32"), task)

    with quick_imports():
        from drawbar.commands.export_run import ExportFormat, Push, export_run

    target = None if push is None else Push(push, public)
    export_run(loaded.config, task, folder, checkpoint, ExportFormat(merge, dtype, shard_size), target)
    return 0
