"""``drawbar checkpoint``."""

import sys
from pathlib import Path

import click

from drawbar.cli.complete_words import complete_run

_RUN = click.argument("run", shell_complete=complete_run)
_RUN_OR_URL = click.argument("run", metavar="RUN|URL", shell_complete=complete_run)


@click.group(
    short_help="List, verify or prune the checkpoints of a run.",
    epilog="""\b
Examples:
  drawbar checkpoint list runs/demo                  steps, sizes, and which is the best
  drawbar checkpoint verify runs/demo                reads every byte of all of them
  drawbar checkpoint prune runs/demo --keep 1        keeps the newest and the best one
""",
)
def checkpoint() -> None:
    """Look at the checkpoints of a run, and delete old ones."""


@checkpoint.command(
    "list",
    epilog="""\b
Examples:
  drawbar checkpoint list runs/demo
  drawbar checkpoint list runs/demo --json           one object a line, for a program
  drawbar checkpoint list s3://bucket/runs/demo      the copies in an object store
""",
)
@_RUN_OR_URL
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a line for each checkpoint.")
def list_(run: str, as_json: bool) -> None:
    """List the checkpoints of RUN (a run directory, or the URL of its folder in an object store): step, when it was
    saved, size, and whether all files are there.

    Content is not read: `drawbar checkpoint verify` does that.
    """
    from drawbar.util.torch_imports import quick_imports

    with quick_imports():
        from drawbar.commands.checkpoints import list_checkpoints, list_copies

    if "://" in run:
        list_copies(run, as_json)
    else:
        list_checkpoints(Path(run), as_json)


@checkpoint.command(
    epilog="""\b
Examples:
  drawbar checkpoint verify runs/demo
  drawbar checkpoint verify runs/demo --step 1000
  drawbar checkpoint verify s3://bucket/runs/demo    copies them to a temporary folder

\b
Exit codes: 0 all are as they were written, 1 one is damaged, 2 the request is wrong.
"""
)
@_RUN_OR_URL
@click.option("--step", type=click.IntRange(min=0), help="Only the checkpoint of this step.")
def verify(run: str, step: int | None) -> int:
    """Read every byte of the checkpoints of RUN, and name the files that are not as they were written."""
    from drawbar.util.torch_imports import quick_imports

    with quick_imports():
        from drawbar.commands.checkpoints import verify_checkpoints, verify_copies

    return verify_copies(run, step) if "://" in run else verify_checkpoints(Path(run), step)


@checkpoint.command(
    epilog="""\b
Examples:
  drawbar checkpoint prune runs/demo                 as many stay as checkpoint.keep of the run says
  drawbar checkpoint prune runs/demo --keep 1 --dry-run
  drawbar checkpoint prune runs/demo --keep 1 --yes

\b
The best and the newest complete checkpoint always stay, and so do those of which a
file is missing or cut.
"""
)
@_RUN
@click.option("--keep", type=click.IntRange(min=1), help="How many of the newest stay. Default: the run's own setting.")
@click.option("--dry-run", is_flag=True, help="Say what would be deleted, and delete nothing.")
@click.option("--yes", is_flag=True, help="Do not ask.")
def prune(run: str, keep: int | None, dry_run: bool, yes: bool) -> None:
    """Delete the older checkpoints of RUN. Not while it is being trained: then it does so itself, after each save."""
    from drawbar.errors import UserError
    from drawbar.util.torch_imports import quick_imports

    if "://" in run:
        raise UserError(
            f"{run} is a folder of an object store, and only checkpoints on a disk of this machine are deleted",
            where="RUN",
            remedy="prune the run directory, and go on with the run: the store keeps what the disk keeps",
        )
    with quick_imports():
        from drawbar.commands.checkpoints import prune_checkpoints

    prune_checkpoints(Path(run), keep, dry_run, lambda question: yes or _confirm(question))


def _confirm(question: str) -> bool:
    from drawbar.errors import UserError

    if not sys.stdin.isatty():
        raise UserError(
            f"there is nobody to ask: {question}", where="the command line", remedy="add --yes to delete, or --dry-run"
        )
    return click.confirm(question)
