"""``drawbar watch``."""

import click

from drawbar.cli.complete_words import complete_run


@click.command(
    short_help="Follow a run: its newest numbers, until it ends.",
    epilog="""\b
Examples:
  drawbar watch runs/demo
  drawbar watch 1234                   the run of a job, from the queue to its end
  drawbar watch runs/demo --wait 600   a run that will begin within ten minutes

\b
RUN|JOB is a run's folder, the name of a run that was submitted, or the number of a job.
Of a run without a job only files are read, so any machine will do that shares its disk; of a
submitted run the scheduler is asked, too. In a pipe or a file it writes plain lines. Ctrl-C ends
the looking, and not the run.
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
    help="How long to wait for a run that has not begun.",
)
def watch(what: str, patience: float) -> int:
    """Show step, loss, learning rate, speed, memory, time left and scores of a run that trains elsewhere.

    It goes on through the restarts of a job, and ends when the run is complete, or when nobody trains it any more.
    """
    from drawbar.commands.watch_run import follow_run

    return follow_run(what, patience)
