"""``drawbar cancel``."""

import time
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from drawbar.launch.job_status import JobStatus
    from drawbar.launch.records import JobRecord

ASK_SECONDS = 1.0


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
@click.argument("what", metavar="RUN|JOB")
@click.option(
    "--grace", type=click.IntRange(min=0), default=120, show_default=True, help="Seconds to save in before it is ended."
)
def cancel(what: str, grace: int) -> None:
    """End a job for good: it saves first, and does not go back into the queue. `drawbar resume` goes on with it."""
    from drawbar.errors import UserError
    from drawbar.launch.job_status import stand
    from drawbar.launch.queue import cancel as to_slurm
    from drawbar.launch.records import find

    standings = stand(find(what))
    active = [standing for standing in standings if standing.is_active]
    if not active:
        said = "; ".join(f"{s.record.number}: {s.state} {s.remarks}".rstrip() for s in standings)
        raise UserError(
            f"there is nothing to cancel: {said}",
            where=what,
            remedy="`drawbar jobs` lists what waits and runs; `drawbar resume` starts a run again",
        )
    running = [standing.record for standing in active if standing.state == "RUNNING"]
    to_slurm([standing.record.number for standing in active if standing.record not in running])
    # the script first: it must know, when the ranks have saved, that they are not to go on; Slurm itself would grant
    # them no more than its KillWait
    to_slurm([record.number for record in running], "--batch", "--signal=TERM")
    to_slurm([record.number for record in running], "--signal=TERM")
    left = _wait(running, grace)
    for record in left:
        click.echo(f"job {record.number}: has not ended within {grace}s; Slurm ends it now", err=True)
    to_slurm([record.number for record in left])
    _wait(left, 60)
    for standing in stand(standing.record for standing in active):
        click.echo(_tell(standing))


def _wait(records: "list[JobRecord]", seconds: float) -> "list[JobRecord]":
    """Wait for their end; those that have not ended by then."""
    from drawbar.launch.job_status import stand

    end, left = time.monotonic() + seconds, list(records)
    while left and (left := [standing.record for standing in stand(left) if standing.is_active]):
        if time.monotonic() > end:
            break
        time.sleep(ASK_SECONDS)
    return left


def _tell(standing: "JobStatus") -> str:
    from pathlib import Path

    from drawbar.errors import ExitCode
    from drawbar.launch.restarts import newest_step

    record = standing.record
    step = newest_step(Path(record.run_dir))
    from_there = f"`drawbar resume {record.number}` goes on from step {step}" if step >= 0 else "nothing was saved"
    if standing.code == ExitCode.REQUEUE:
        return f"job {record.number}: saved and ended; {from_there}"
    return f"job {record.number}: {standing.state.lower()}; {from_there}"
