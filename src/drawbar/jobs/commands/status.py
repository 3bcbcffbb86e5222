"""``drawbar status``."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from drawbar.cli.complete_words import complete_run

if TYPE_CHECKING:
    from collections.abc import Iterator

    from drawbar.jobs.records import JobStatus
    from drawbar.tracking.run_view import RunView


@click.command(
    short_help="Show the state of a job and its run.",
    epilog="""\b
Examples:
  drawbar status runs/demo
  drawbar status 1234                  by the number of the job
  drawbar status 1234_2 --json         one element of a sweep, for a program

\b
RUN|JOB is a run's folder, the name of a run or sweep that was submitted, or the number of a job.
""",
)
@click.argument("what", metavar="RUN|JOB", shell_complete=complete_run)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a line for each run.")
def status(what: str, as_json: bool) -> None:
    """Show the state of a job, and how far its run is.

    Works while it waits, while it trains and long after it has ended; a run that was never submitted has no job.
    """
    import json

    from drawbar.jobs.launchers import ask_status
    from drawbar.jobs.records import find_run
    from drawbar.jobs.run_jobs import run_job
    from drawbar.tracking.run_view import read_run

    folder, records = find_run(what)
    looked = [(read_run(Path(job.record.run_dir), run_job(job.record, job)), job) for job in ask_status(records)]
    for index, (view, job) in enumerate(looked or [(read_run(folder), None)]):
        if as_json:
            click.echo(json.dumps(_values(view, job)))
            continue
        if index:
            click.echo()
        for name, text in _lines(view, job):
            click.echo(f"{name:<11} {text}")


def _lines(view: "RunView", job: "JobStatus | None") -> "Iterator[tuple[str, str]]":
    from drawbar.jobs.launchers import launcher_of
    from drawbar.jobs.records import RUNNING
    from drawbar.tracking.lines import duration, number, speed

    progress = view.progress
    yield "run", str(view.folder)
    if job is not None:
        yield "job", f"{job.record.number}: {', '.join(filter(None, (job.state, job.remarks)))}"
        if job.clock:
            yield "time", job.clock
    if progress.run_state is not None:
        yield "state", view.state
    yield "step", progress.step_of_total or "none yet"
    if progress.loss is not None:
        yield "loss", number(progress.loss)
    if (rate := speed(progress.rates)) is not None:
        yield "speed", rate
    if (best := progress.best) is not None:
        yield "best", f"{best.metric} {number(best.score)} at step {best.step}"
    if progress.checkpoint is not None:
        yield "checkpoint", f"step {progress.checkpoint}"
    if view.ago is not None:
        should_train = progress.run_state == "training" if job is None else job.state == RUNNING
        late = ": it should have written since; see its log" if should_train and view.is_silent else ""
        yield "written", f"{duration(view.ago)} ago{late}"
    if job is not None:
        record = job.record
        copy = f"a copy in {record.snapshot}" if record.snapshot else None
        if code := ", ".join(filter(None, (record.code, copy))):
            yield "code", code
        yield "log", str(launcher_of(record).logs(record))


def _values(view: "RunView", job: "JobStatus | None") -> dict[str, Any]:
    from drawbar.cli.runs import progress_values

    return {
        "run": view.folder.name,
        "folder": str(view.folder),
        "job": None if job is None else _job_values(job),
        "state": view.state,
        "progress": progress_values(view.progress),
    }


def _job_values(job: "JobStatus") -> dict[str, Any]:
    record = job.record
    return {
        "launcher": record.launcher,
        "number": record.number,
        "state": job.state,
        "detail": job.detail,
        "active": job.is_active,
        "exit_code": job.code,
        "restarts": job.restarts,
        "used": job.used,
        "limit": job.limit,
        "submitted": record.time,
        "ended": job.ended,
        "nodes": record.nodes,
        "processes": record.processes,
        "log": record.log,
        "script": record.script,
        "settings": list(record.settings),
        "config": str(record.config_file),
        "code": record.code,
        "snapshot": record.snapshot,
    }
