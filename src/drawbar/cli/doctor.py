"""``drawbar doctor``."""

import os
import sys
from typing import TYPE_CHECKING

import click

from drawbar.cli.complete_words import complete_config_and_settings

if TYPE_CHECKING:
    from drawbar.tasks.task import Task


@click.command(
    short_help="Find out what is wrong with this machine.",
    epilog="""\b
Examples:
  drawbar doctor                                     this machine
  drawbar doctor config.yaml launch.nproc=2          and what this run would use on it
  drawbar doctor config.yaml --json > doctor.json

\b
Levels: ok; note: good to know; warning: slow, or it may fail later; problem: a run fails.
Exit codes: 0 no problem, 1 a problem, 2 the request is wrong.
""",
)
@click.argument("arguments", nargs=-1, metavar="[CONFIG] [KEY=VALUE]...", shell_complete=complete_config_and_settings)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_obj
def doctor(task: "type[Task] | None", arguments: tuple[str, ...], as_json: bool) -> int:
    """Say what this machine is, what a run would use on it and why, what is wrong, and what puts it right.

    Multiplies two matrices on the device and lets two processes meet; writes nothing that stays. Takes a few seconds.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("LOCAL_RANK") != "0":
        return 0  # the first process of each machine examines it for all
    from drawbar.cli.arguments import load
    from drawbar.cli.train import processes_to_start
    from drawbar.doctor.examine import examine

    loaded = load(arguments, task)
    is_watched = sys.stderr.isatty()
    if is_watched:
        click.echo("looking around …", nl=False, err=True)
    report = examine(loaded, bool(arguments), lambda gpus: processes_to_start(loaded.config, lambda: gpus))
    if is_watched:
        click.echo("\r\x1b[K", nl=False, err=True)
    if as_json:
        click.echo(report.as_json())
    else:
        report.print()
    return report.exit_code
