"""``drawbar logs``."""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import click

from drawbar.cli.complete_words import complete_run

if TYPE_CHECKING:
    from drawbar.jobs.records import JobRecord


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
    from drawbar.jobs.launchers import ask_status
    from drawbar.jobs.records import find_run

    folder, records = find_run(what)
    if not records:
        return _show_run(folder, follow, rank or 0)
    output = Output({record.number: _file(record, rank) for record in records})
    if follow:
        return _follow(records, output)
    if not [record for record in records if output.show(record.number)]:
        status = ask_status(records)[0]
        raise UserError(
            f"job {status.record.number} has no log yet: {status.summary}",
            where=str(output.files[status.record.number]),
            remedy="wait until it has begun; with -f this command does so",
        )
    return 0


@dataclass
class Output:
    """Several files that grow, each by its key in ``files``: a file may not exist yet, and is read again from its start
    where it has shrunk."""

    files: dict[str, Path]
    _streams: dict[str, BinaryIO] = field(default_factory=dict)
    _last: str | None = None

    def show(self, name: str) -> bool:
        """Print what is new in a file, as ``tail -f`` prints several. Returns whether there was anything new."""
        text = self.read(name)
        if not text:
            return False
        if len(self.files) > 1 and self._last != name:
            print(f"==> {name} <==" if self._last is None else f"\n==> {name} <==", flush=True)
        self._last = name
        sys.stdout.buffer.write(text)
        sys.stdout.flush()
        return True

    def read(self, name: str) -> bytes:
        """What was appended to a file since the last read."""
        file = self.files[name]
        try:
            if name not in self._streams:
                self._streams[name] = file.open("rb")
            elif file.stat().st_size < self._streams[name].tell():
                self._streams[name].seek(0)
        except OSError:
            return b""
        return self._streams[name].read()


def _show_run(run_dir: Path, follow: bool, rank: int) -> int:
    """The log that a process of the run writes itself; with ``follow`` until nobody trains the run."""
    from drawbar.errors import ExitCode, UserError
    from drawbar.jobs.launchers import POLL_SECONDS
    from drawbar.tracking.run_view import rank_log, read_run

    file = rank_log(run_dir, rank)
    if not follow and not file.is_file():
        raise UserError(
            f"the run {run_dir.name} has no log of process {rank}",
            where=str(file),
            remedy="see the folder logs/ of the run for those it has; a run writes its log when it begins to train",
        )
    output = Output({run_dir.name: file})
    output.show(run_dir.name)
    while follow:
        view = read_run(run_dir)
        output.show(run_dir.name)  # after the look at its state: all that an ended run has written
        if view.is_over:
            return ExitCode.DONE if view.state == "complete" else ExitCode.FAILED
        time.sleep(POLL_SECONDS)
    return ExitCode.DONE


def _file(record: "JobRecord", rank: int | None) -> Path:
    from drawbar.jobs.launchers import launcher_of
    from drawbar.tracking.run_view import rank_log

    return launcher_of(record).logs(record) if rank is None else rank_log(Path(record.run_dir), rank)


def _follow(records: "Sequence[JobRecord]", output: Output) -> int:
    """Until all jobs have ended; the exit code of the first that failed."""
    from drawbar.jobs.launchers import POLL_SECONDS, FollowedJobs
    from drawbar.jobs.records import PENDING

    jobs, codes = FollowedJobs(records), dict.fromkeys((record.number for record in records), 0)
    told = trouble = ""
    while True:
        statuses = jobs.ask()
        if jobs.trouble != trouble:
            trouble = jobs.trouble
            click.echo(f"{trouble}; asking again" if trouble else "the scheduler answers again", err=True)
        waits = "; ".join(f"{status.record.number} {status.detail}" for status in statuses if status.state == PENDING)
        if waits != told and (waits or any(status.is_active for status in statuses)):
            click.echo(f"job {waits}" if waits else "the job has begun", err=True)
        told = waits
        for record in jobs.records:  # after the question: all that an ended job has written
            output.show(record.number)
        for status in jobs.drop_ended():
            codes[status.record.number] = status.code if status.code is not None else 1
            click.echo(f"job {status.record.number}: {status.summary}", err=True)
        if not jobs.records:
            return next((code for code in codes.values() if code), 0)
        time.sleep(POLL_SECONDS)
