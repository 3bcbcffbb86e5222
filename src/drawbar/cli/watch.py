"""``drawbar watch``."""

import click

from drawbar.cli.complete_words import complete_run


@click.command(
    short_help="Follow a run's progress until it ends.",
    epilog="""\b
Examples:
  drawbar watch runs/demo
  drawbar watch 1234                   the run of a job, from the queue to its end
  drawbar watch runs/demo --wait 600   a run that will start within ten minutes

\b
RUN|JOB is a run directory, the name of a submitted run, or a job number. A run without a job is
followed by its files alone, from any machine that shares its disk; for a submitted run, the
scheduler is queried as well. Output to a pipe or a file is plain lines. Ctrl-C stops watching,
not the run.
Exit codes: 0 the run is complete, or Ctrl-C; 1 it ended otherwise.
""",
)
@click.argument("what", metavar="RUN|JOB", shell_complete=complete_run)
@click.option(
    "--wait",
    "patience",
    type=click.FloatRange(min=0),
    default=60.0,
    show_default=True,
    metavar="SECONDS",
    help="How long to wait for a run to start.",
)
def watch(what: str, patience: float) -> int:
    """Show step, loss, learning rate, speed, memory, time left and scores of a run that trains elsewhere.

    Follows the run across restarts of its job, until it is complete or no longer being trained.
    """
    from drawbar.commands.watch_run import follow_run

    return follow_run(what, patience)
