"""``drawbar status``."""

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from drawbar.cli.complete_words import complete_run

if TYPE_CHECKING:
    from drawbar.launch.jobs.job_status import JobStatus
    from drawbar.launch.jobs.progress import LoggedProgress


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

    from drawbar.launch.jobs.progress import read_progress

    for index, (folder, job) in enumerate(find_runs(what)):
        progress = read_progress(folder)
        if as_json:
            click.echo(json.dumps(_values(folder, job, progress)))
            continue
        if index:
            click.echo()
        for name, text in _lines(folder, job, progress):
            click.echo(f"{name:<11} {text}")


def find_runs(what: str) -> "list[tuple[Path, JobStatus | None]]":
    """The folders of the runs that a user means, each with its newest job. Raises UserError where there is none."""
    from drawbar.launch.jobs.records import NotSubmitted, find
    from drawbar.launch.launchers import ask_status

    try:
        records = find(what)
    except NotSubmitted as run:
        return [(run.run_dir, None)]
    return [(Path(job.record.run_dir), job) for job in ask_status(records)]


def _lines(folder: Path, job: "JobStatus | None", progress: "LoggedProgress") -> list[tuple[str, str]]:
    from drawbar.launch.jobs.job_status import RUNNING
    from drawbar.launch.launchers import launcher_of
    from drawbar.tracking.lines import duration, number, speed

    now = time.time()
    lines = [("run", str(folder))]
    if job is not None:
        record = job.record
        lines.append(("job", f"{record.number}: {', '.join(filter(None, (job.state, job.remarks)))}"))
        if job.clock:
            lines.append(("time", job.clock))
    if progress.run_state is not None:
        lines.append(("state", progress.state(folder, now) if job is None else progress.run_state))
    if progress.step is None:
        lines.append(("step", "none yet"))
    else:
        lines.append(("step", progress.step_of_total))
    if progress.loss is not None:
        lines.append(("loss", number(progress.loss)))
    if (rate := speed(progress.rates)) is not None:
        lines.append(("speed", rate))
    if progress.best is not None:
        best = progress.best
        lines.append(("best", f"{best.metric} {number(best.score)} at step {best.step}"))
    if progress.checkpoint is not None:
        lines.append(("checkpoint", f"step {progress.checkpoint}"))
    if progress.written is not None:
        ago = f"{duration(max(0.0, now - progress.written))} ago"
        is_running = progress.run_state == "training" if job is None else job.state == RUNNING
        is_silent = is_running and progress.is_stale(now)
        lines.append(("written", ago + (": it should have written since; see its log" if is_silent else "")))
    if job is not None:
        record = job.record
        if record.code is not None or record.snapshot is not None:
            copy = f"a copy in {record.snapshot}" if record.snapshot else ""
            lines.append(("code", ", ".join(filter(None, (record.code, copy)))))
        lines.append(("log", str(launcher_of(record).logs(record))))
    return lines


def _values(folder: Path, job: "JobStatus | None", progress: "LoggedProgress") -> dict[str, Any]:
    return {
        "run": folder.name,
        "folder": str(folder),
        "job": None if job is None else _job_values(job),
        "state": progress.state(folder, time.time()),
        "progress": progress_values(progress),
    }


def progress_values(progress: "LoggedProgress") -> dict[str, Any]:
    """The progress of a run for JSON; numbers that are not finite are texts, as in ``metrics.jsonl``."""
    from drawbar.util.strict_json import json_number

    def finite(values: dict[str, Any]) -> dict[str, Any]:
        return {name: json_number(value) if isinstance(value, float) else value for name, value in values.items()}

    return finite({**asdict(progress), "best": None if progress.best is None else finite(progress.best.model_dump())})


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
