"""``drawbar logs``."""

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from drawbar.launch.jobs.follow import Output
    from drawbar.launch.jobs.job_status import JobStatus
    from drawbar.launch.jobs.records import JobRecord

LOOK_SECONDS = 0.5
"""Between two looks at the files."""
ASK_SECONDS = 5.0
"""Between two questions to a scheduler, whose controller serves all users."""
PATIENCE = 300.0
"""Seconds that a scheduler may be out of reach while somebody follows a job."""


@click.command(
    short_help="Show the log of a job.",
    epilog="""\b
Examples:
  drawbar logs runs/demo
  drawbar logs 1234 -f                 until the job has ended, through all its restarts
  drawbar logs 1234_2 --rank 3         what one process has written

\b
RUN|JOB is a run's folder, the name of a run or sweep that was submitted, or the number of a job.
With -f the exit code is that of the job; Ctrl-C ends the looking, and not the job.
""",
)
@click.argument("what", metavar="RUN|JOB")
@click.option("-f", "--follow", is_flag=True, help="Show what is added, until the job has ended.")
@click.option("--rank", type=click.IntRange(min=0), help="The log of this process, instead of the job's.")
def logs(what: str, follow: bool, rank: int | None) -> int:
    """Show the log of a job."""
    from drawbar.errors import UserError
    from drawbar.launch.jobs.follow import Follower, Output
    from drawbar.launch.jobs.records import find
    from drawbar.launch.launchers import ask_status

    records = find(what)
    files = {record.number: _file(record, rank) for record in records}
    output = Output({number: Follower(file) for number, file in files.items()})
    if follow:
        return _follow(records, output)
    if not [number for number in files if output.show(number)]:
        status = ask_status(records)[0]
        raise UserError(
            f"job {status.record.number} has no log yet: {status.state} {status.remarks}",
            where=str(files[status.record.number]),
            remedy="wait until it has begun; with -f this command does so",
        )
    return 0


def _file(record: "JobRecord", rank: int | None) -> Path:
    from drawbar.launch.launchers import launcher_of

    return launcher_of(record).logs(record) if rank is None else Path(record.run_dir) / "logs" / f"rank-{rank:04d}.log"


def _follow(records: "list[JobRecord]", output: "Output") -> int:
    """Until all jobs have ended; the exit code of the first that failed."""
    from drawbar.launch.jobs.job_status import PENDING
    from drawbar.launch.jobs.records import JobEnd

    waiting, codes, asked, told = list(records), dict.fromkeys((record.number for record in records), 0), 0.0, ""
    ends: dict[str, JobEnd | None] = {}
    while waiting:
        has_ended = any(JobEnd.read(record) != ends.get(record.number) for record in waiting)
        ends = {record.number: JobEnd.read(record) for record in waiting}
        if has_ended or time.monotonic() - asked >= ASK_SECONDS:
            statuses = _ask(waiting)
            asked = time.monotonic()
            waits = "; ".join(f"{s.record.number} {s.detail}" for s in statuses if s.state == PENDING)
            if waits != told:
                if waits or any(status.is_active for status in statuses):
                    click.echo(f"job {waits}" if waits else "the job has begun", err=True)
                told = waits
            for status in statuses:
                output.show(status.record.number)
                if not status.is_active:
                    codes[status.record.number] = status.code if status.code is not None else 1
                    click.echo(f"job {status.record.number}: {status.state} {status.remarks}".rstrip(), err=True)
            waiting = [status.record for status in statuses if status.is_active]
        for record in waiting:
            output.show(record.number)
        if waiting:
            time.sleep(LOOK_SECONDS)
    return next((code for code in codes.values() if code), 0)


def _ask(records: "list[JobRecord]") -> "list[JobStatus]":
    """The jobs' status. Asks again, for up to five minutes, while a scheduler does not answer."""
    from drawbar.errors import UserError
    from drawbar.launch.launchers import ask_status

    end = time.monotonic() + PATIENCE
    while True:
        try:
            return ask_status(records)
        except UserError as error:
            if time.monotonic() > end or isinstance(error.__cause__, FileNotFoundError):
                raise
            click.echo(f"{error.what}; asking again", err=True)
            time.sleep(ASK_SECONDS)
