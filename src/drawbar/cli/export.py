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
  drawbar export runs/demo --to demo-model --push me/demo    also upload it to a private repository on the Hub

\b
Start a new run from the folder with task.model=demo-model, or load it with transformers' from_pretrained.
Export needs memory for about one file of weights (--shard-size), whatever the model's size, or for the
whole model if transformers merges or splits stored weights or the task cannot read the base model's files.
""",
)
@click.argument("run", shell_complete=complete_run)
@click.option(
    "--to",
    "folder",
    type=click.Path(path_type=Path),
    required=True,
    metavar="DIR",
    help="Folder to write; must be new or empty.",
)
@click.option("--merge", is_flag=True, help="LoRA runs: merge the adapters into the weights of the full model.")
@click.option(
    "--dtype",
    type=click.Choice(["fp32", "bf16", "fp16"]),
    default="fp32",
    show_default=True,
    help="Dtype of the weights.",
)
@click.option(
    "--shard-size",
    default="5GB",
    show_default=True,
    metavar="SIZE",
    help="Maximum size of one file of weights, in MB or GB; larger models are split into several files.",
)
@checkpoint_option
@click.option(
    "--push",
    metavar="OWNER/NAME",
    help="Also upload the folder to this model repository on the Hugging Face Hub; new repositories are private.",
)
@click.option("--public", is_flag=True, help="With --push: make a new repository public.")
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
    """Write the model of RUN (a run directory), its tokenizer and a model card to a folder that transformers loads."""
    from drawbar.cli.arguments import load_run
    from drawbar.errors import UserError
    from drawbar.util.torch_imports import quick_imports

    if not re.fullmatch(r"(?=.*[1-9])\d+(\.\d+)?[MG]B", shard_size):
        raise UserError(
            f"{shard_size} is not a valid file size", where="--shard-size", remedy="write it as 500MB or 5GB"
        )
    if public and push is None:
        raise UserError("nothing is uploaded", where="--public", remedy="add --push OWNER/NAME, or leave out --public")
    # weights are fp32 regardless of the run's precision; and exporting needs no GPU
    loaded = load_run(run, ("launch.nproc=1", "device=cpu", "precision=fp32"), task)

    with quick_imports():
        from drawbar.commands.export_run import ExportFormat, Push, export_run

    target = None if push is None else Push(push, public)
    export_run(loaded.config, task, folder, checkpoint, ExportFormat(merge, dtype, shard_size), target)
    return 0
