"""``drawbar cancel``."""

from typing import TYPE_CHECKING

import click

from drawbar.cli.complete_words import complete_run

if TYPE_CHECKING:
    from drawbar.jobs.records import JobStatus


@click.command(
    short_help="End a job for good, after it has saved.",
    epilog="""\b
Examples:
  drawbar cancel runs/demo
  drawbar cancel 1234                  a sweep with all its runs
  drawbar cancel 1234_2 --grace 600    a run that needs long to save

\b
RUN|JOB is a run's folder, the name of a run or sweep that was submitted, or the number of a job.
""",
)
@click.argument("what", metavar="RUN|JOB", shell_complete=complete_run)
@click.option(
    "--grace", type=click.IntRange(min=0), default=120, show_default=True, help="Seconds to save in before it is ended."
)
def cancel(what: str, grace: int) -> None:
    """End a job for good: it saves first, and does not go back into the queue. `drawbar resume` continues it."""
    from drawbar.errors import UserError
    from drawbar.jobs.launchers import ask_status, launcher_of
    from drawbar.jobs.records import find

    statuses = ask_status(find(what))
    active = [status for status in statuses if status.is_active]
    if not active:
        said = "; ".join(f"{status.record.number}: {status.summary}" for status in statuses)
        raise UserError(
            f"there is nothing to cancel: {said}",
            where=what,
            remedy="`drawbar jobs` lists what waits and runs; `drawbar resume` starts a run again",
        )
    launcher_of(active[0].record).cancel(active, grace)
    for status in ask_status(status.record for status in active):
        click.echo(describe_cancelled(status))


def describe_cancelled(status: "JobStatus") -> str:
    """How a cancelled job ended, and whether its run can continue."""
    from pathlib import Path

    from drawbar.errors import ExitCode
    from drawbar.util.run_dir import newest_step

    record = status.record
    job = f"job {record.number} of {record.run_dir}"
    if status.code == ExitCode.DONE:
        return f"{job}: completed before it was told to stop"
    step = newest_step(Path(record.run_dir))
    from_there = f"`drawbar resume {record.number}` resumes from step {step}" if step >= 0 else "nothing was saved"
    return f"{job}: {'stopped' if status.code == ExitCode.REQUEUE else status.state.lower()}; {from_there}"
