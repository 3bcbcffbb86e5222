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
  drawbar checkpoint list runs/demo                  steps, sizes, and the best checkpoint
  drawbar checkpoint verify runs/demo                read every byte of all checkpoints
  drawbar checkpoint prune runs/demo --keep 1        keep only the newest and the best
""",
)
def checkpoint() -> None:
    """List, verify and prune the checkpoints of a run."""


@checkpoint.command(
    "list",
    epilog="""\b
Examples:
  drawbar checkpoint list runs/demo
  drawbar checkpoint list runs/demo --json           one JSON object per line, for programs
  drawbar checkpoint list s3://bucket/runs/demo      the copies in an object store
""",
)
@_RUN_OR_URL
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per checkpoint, one per line.")
def list_(run: str, as_json: bool) -> None:
    """List the checkpoints of RUN (a run directory, or the URL of its folder in an object store): step, time of
    saving, size, and whether all files are present.

    File contents are not read; use `drawbar checkpoint verify` for that.
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
Exit codes: 0 all are intact, 1 at least one is damaged, 2 the request is wrong.
"""
)
@_RUN_OR_URL
@click.option("--step", type=click.IntRange(min=0), help="Only the checkpoint of this step.")
def verify(run: str, step: int | None) -> int:
    """Read every byte of the checkpoints of RUN, and list the files that have changed since they were written."""
    from drawbar.util.torch_imports import quick_imports

    with quick_imports():
        from drawbar.commands.checkpoints import verify_checkpoints, verify_copies

    return verify_copies(run, step) if "://" in run else verify_checkpoints(Path(run), step)


@checkpoint.command(
    epilog="""\b
Examples:
  drawbar checkpoint prune runs/demo                 keep as many as the run's checkpoint.keep
  drawbar checkpoint prune runs/demo --keep 1 --dry-run
  drawbar checkpoint prune runs/demo --keep 1 --yes

\b
Never deleted: the best checkpoint, the newest complete one, and those with a missing
or truncated file.
"""
)
@_RUN
@click.option("--keep", type=click.IntRange(min=1), help="How many of the newest to keep. Default: the run's setting.")
@click.option("--dry-run", is_flag=True, help="Only print what would be deleted.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
def prune(run: str, keep: int | None, dry_run: bool, yes: bool) -> None:
    """Delete the older checkpoints of RUN. Not for a run in training, which prunes them itself after each save."""
    from drawbar.errors import UserError
    from drawbar.util.torch_imports import quick_imports

    if "://" in run:
        raise UserError(
            f"{run} is a folder in an object store, and drawbar only deletes checkpoints on local disks",
            where="RUN",
            remedy="prune the run directory, and resume the run: the store then keeps what the disk keeps",
        )
    with quick_imports():
        from drawbar.commands.checkpoints import prune_checkpoints

    prune_checkpoints(Path(run), keep, dry_run, lambda question: yes or _confirm(question))


def _confirm(question: str) -> bool:
    from drawbar.errors import UserError

    if not sys.stdin.isatty():
        raise UserError(
            f"cannot ask for confirmation without a terminal: {question}",
            where="the command line",
            remedy="add --yes to delete, or --dry-run",
        )
    return click.confirm(question)
