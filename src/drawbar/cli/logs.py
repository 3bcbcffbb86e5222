"""``drawbar logs``."""

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from drawbar.cli.complete_words import complete_run

if TYPE_CHECKING:
    from drawbar.launch.jobs.follow import Output
    from drawbar.launch.jobs.job_status import JobStatus
    from drawbar.launch.jobs.records import JobRecord


@click.command(
    short_help="Show the log of a job, or of a run.",
    epilog="""\b
Examples:
  drawbar logs runs/demo
  drawbar logs 1234 -f                 until the job has ended, through all its restarts
  drawbar logs 1234_2 --rank 3         what one process has written

\b
RUN|JOB is a run's folder, the name of a run or sweep that was submitted, or the number of a job.
Of a run that was not submitted, this is the log of its first process.
With -f the exit code is that of the job; Ctrl-C ends the looking, and not the job.
""",
)
@click.argument("what", metavar="RUN|JOB", shell_complete=complete_run)
@click.option("-f", "--follow", is_flag=True, help="Show what is added, until the job or run has ended.")
@click.option("--rank", type=click.IntRange(min=0), help="The log of this process, instead of the job's.")
def logs(what: str, follow: bool, rank: int | None) -> int:
    """Show the log of a job, or of a run that was trained without one."""
    from drawbar.errors import UserError
    from drawbar.launch.jobs.follow import Follower, Output
    from drawbar.launch.jobs.records import NotSubmitted, find
    from drawbar.launch.launchers import ask_status

    try:
        records = find(what)
    except NotSubmitted as run:
        return _show_run(run.run_dir, follow, rank or 0)
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


def _show_run(run_dir: Path, follow: bool, rank: int) -> int:
    """The log that a process of the run writes itself; with ``follow`` until nobody trains the run."""
    from drawbar.errors import ExitCode, UserError
    from drawbar.launch.jobs.follow import POLL_SECONDS, Follower, Output
    from drawbar.launch.jobs.progress import read_progress
    from drawbar.launch.jobs.run_status import is_locked

    file = _rank_file(run_dir, rank)
    if not follow and not file.is_file():
        raise UserError(
            f"the run {run_dir.name} has no log of process {rank}",
            where=str(file),
            remedy="see the folder logs/ of the run for those it has; a run writes its log when it begins to train",
        )
    output = Output({run_dir.name: Follower(file)})
    output.show(run_dir.name)
    while follow:
        state = read_progress(run_dir).state(run_dir, time.time())
        is_over = state != "training" and not is_locked(run_dir)
        output.show(run_dir.name)  # after the look at its state: all that an ended run has written
        if is_over:
            return ExitCode.DONE if state == "complete" else ExitCode.FAILED
        time.sleep(POLL_SECONDS)
    return ExitCode.DONE


def _rank_file(run_dir: Path, rank: int) -> Path:
    return run_dir / "logs" / f"rank-{rank:04d}.log"


def _file(record: "JobRecord", rank: int | None) -> Path:
    from drawbar.launch.launchers import launcher_of

    return launcher_of(record).logs(record) if rank is None else _rank_file(Path(record.run_dir), rank)


def _follow(records: "list[JobRecord]", output: "Output") -> int:
    """Until all jobs have ended; the exit code of the first that failed."""
    from drawbar.launch.jobs.follow import ASK_SECONDS, POLL_SECONDS
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
            time.sleep(POLL_SECONDS)
    return next((code for code in codes.values() if code), 0)


def _ask(records: "list[JobRecord]") -> "list[JobStatus]":
    """The jobs' status. Asks again, for up to five minutes, while a scheduler does not answer."""
    from drawbar.errors import UserError
    from drawbar.launch.jobs.follow import ASK_SECONDS, PATIENCE
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
