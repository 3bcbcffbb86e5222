"""``drawbar export``."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from drawbar.tasks.task import Task


@click.command(
    short_help="Write a run's model for transformers to load.",
    epilog="""\b
Examples:
  drawbar export runs/demo --to demo-model
  drawbar export runs/demo --to demo-model --checkpoint latest
  drawbar export runs/lora --to lora-adapter                 the adapters alone, for peft
  drawbar export runs/lora --to lora-model --merge           the whole model

\b
Start a new run from the folder by task.model=demo-model, or load it by transformers' from_pretrained.
""",
)
@click.argument("run")
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
    "--checkpoint",
    metavar="best|latest|STEP",
    help="Which checkpoint to export. Default: the best, or the latest where no evaluation chose one.",
)
@click.pass_obj
def export(task: "type[Task] | None", run: str, folder: Path, merge: bool, checkpoint: str | None) -> int:
    """Write the model of RUN (a run directory) as a folder that transformers loads."""
    from drawbar.cli.arguments import load_run
    from drawbar.util.torch_imports import quick_imports

    # the weights are fp32 whatever the run computed with; and a machine without a GPU can export
    loaded = load_run(run, ("launch.nproc=1", "device=cpu", "precision=fp32"), task)

    with quick_imports():
        from drawbar.commands.export_run import export_run

    export_run(loaded.config, task, folder, checkpoint, merge)
    return 0
