"""``drawbar resume``."""

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import click

from drawbar.cli.complete_words import complete_run, complete_settings

if TYPE_CHECKING:
    from drawbar.jobs.records import JobRecord, JobStatus
    from drawbar.tasks.task import Task


@click.command(
    short_help="Submit a job again, from its newest checkpoint.",
    epilog="""\b
Examples:
  drawbar resume runs/demo
  drawbar resume 1234 cluster.time=2-00 cluster.nodes=4
  drawbar resume runs/demo train.steps=5000      more steps of a run that is complete
  drawbar resume 1234 --dry-run        read the script first

\b
RUN|JOB is a run's folder, the name of a run or sweep that was submitted, or the number of a job.
Of a sweep, the runs that are not complete are submitted as a new one.
""",
)
@click.argument("what", metavar="RUN|JOB", shell_complete=complete_run)
@click.argument("settings", nargs=-1, metavar="[KEY=VALUE]...", shell_complete=complete_settings)
@click.option("--dry-run", is_flag=True, help="Print what would be submitted, and submit nothing.")
@click.pass_obj
def resume(task: "type[Task] | None", what: str, settings: tuple[str, ...], dry_run: bool) -> int:
    """Submit a job again, as it was: its run resumes from the newest checkpoint."""
    from drawbar.cli.arguments import user_program
    from drawbar.errors import UserError
    from drawbar.jobs.code_snapshot import code_version
    from drawbar.jobs.commands.submit import send
    from drawbar.jobs.launchers import ask_status
    from drawbar.jobs.records import find
    from drawbar.jobs.submission import SubmitRequest, prepare_job, prepare_sweep

    wanted = resumable_jobs(what, ask_status(find(what)), settings)
    first = wanted[0].record
    program = user_program(task)
    caller = ["python", first.program] if first.program else ["drawbar"]
    if first.program != program:
        raise UserError(
            f"{what} was submitted by {first.program or 'drawbar'}",
            where="its record",
            remedy=f"call `{shlex.join(caller)} resume {what}`",
        )
    try:
        os.chdir(first.workdir)
    except OSError as error:
        raise UserError(
            f"the folder that {what} was submitted in is gone: {error.strerror}",
            where=first.workdir,
            remedy="go where the data and the configuration are now, and use `drawbar submit`",
        ) from error
    request = SubmitRequest(
        (*first.arguments, *settings),
        first.launcher,
        task,
        first.profile,
        program,
        version=first.code if first.snapshot else code_version(Path.cwd()),
        snapshot=first.snapshot,
        resubmitted=_resubmitted(first, settings),
    )
    if first.sweep is None:
        return send(prepare_job(request), dry_run)
    elements = [status.record.settings for status in wanted]
    resubmitted = [_resubmitted(status.record, settings) for status in wanted]
    return send(prepare_sweep(request, first.sweep, elements, resubmitted=resubmitted), dry_run)


def _resubmitted(record: "JobRecord", settings: tuple[str, ...]) -> tuple[str, ...]:
    """The job's stored configuration, and the settings that change it."""
    return (str(record.config_file), *settings, *record.settings)


def resumable_jobs(what: str, statuses: "list[JobStatus]", settings: tuple[str, ...]) -> "list[JobStatus]":
    """The jobs that can be resumed: those not complete, or all where the settings ask for another number of steps.

    Raises:
        UserError: a job has not ended, or all jobs are complete.
    """
    from drawbar.config.io.compare import LENGTH
    from drawbar.errors import ExitCode, UserError

    for status in statuses:
        if status.is_active:
            raise UserError(
                f"job {status.record.number} has not ended: {status.summary}",
                where=what,
                remedy=f"wait for it (`drawbar logs {what} -f`), or end it with `drawbar cancel {what}`",
            )
    longer = any(setting.partition("=")[0] in LENGTH for setting in settings)
    left = [status for status in statuses if longer or status.code != ExitCode.DONE]
    if not left:
        raise UserError(
            f"there is nothing to resume: {what} is complete",
            where=statuses[0].record.run_dir,
            remedy=f"for more steps: `drawbar resume {what} train.steps=N`",
        )
    return left
