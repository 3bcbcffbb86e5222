"""``drawbar status``."""

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from drawbar.launch.job_status import JobStatus
    from drawbar.launch.progress import LoggedProgress
    from drawbar.launch.records import JobRecord


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
@click.argument("what", metavar="RUN|JOB")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a line for each run.")
def status(what: str, as_json: bool) -> None:
    """Say how a job stands and how far its run is.

    Works while it waits, while it trains and long after it has ended; a run that was never submitted has no job.
    """
    import json

    from drawbar.launch.progress import read_progress

    for index, (folder, standing) in enumerate(find_runs(what)):
        progress = read_progress(folder)
        if as_json:
            click.echo(json.dumps(_values(folder, standing, progress)))
            continue
        if index:
            click.echo()
        for name, text in _lines(folder, standing, progress):
            click.echo(f"{name:<11} {text}")


def find_runs(what: str) -> "list[tuple[Path, JobStatus | None]]":
    """The folders of the runs that a user means, each with its newest job. Raises UserError where there is none."""
    from drawbar.errors import UserError
    from drawbar.launch.job_status import stand
    from drawbar.launch.records import find

    try:
        records = find(what)
    except UserError:
        if not (Path(what) / "config.yaml").is_file():
            raise
        return [(Path(what).absolute(), None)]
    return [(Path(standing.record.run_dir), standing) for standing in stand(records)]


def _lines(folder: Path, standing: "JobStatus | None", progress: "LoggedProgress") -> list[tuple[str, str]]:
    from drawbar.tracking.lines import duration, number, speed

    now = time.time()
    lines = [("run", str(folder))]
    if standing is not None:
        record = standing.record
        lines.append(("job", f"{record.number}: {', '.join(filter(None, (standing.state, standing.remarks)))}"))
        if standing.clock:
            lines.append(("time", standing.clock))
    if progress.step is None:
        lines.append(("step", "none yet"))
    else:
        lines.append(("step", progress.step_of_total))
    if progress.loss is not None:
        lines.append(("loss", number(progress.loss)))
    if progress.tokens_per_second is not None:
        lines.append(("speed", speed(progress.tokens_per_second)))
    if progress.best is not None:
        best = progress.best
        lines.append(("best", f"{best.metric} {number(best.score)} at step {best.step}"))
    if progress.checkpoint is not None:
        lines.append(("checkpoint", f"step {progress.checkpoint}"))
    if progress.written is not None:
        ago = f"{duration(max(0.0, now - progress.written))} ago"
        is_silent = standing is not None and standing.state == "RUNNING" and progress.is_stale(now)
        lines.append(("written", ago + (": it should have written since; see its log" if is_silent else "")))
    if standing is not None:
        record = standing.record
        if record.code is not None or record.snapshot is not None:
            copy = f"a copy in {record.snapshot}" if record.snapshot else ""
            lines.append(("code", ", ".join(filter(None, (record.code, copy)))))
        lines.append(("log", record.log))
    return lines


def _values(folder: Path, standing: "JobStatus | None", progress: "LoggedProgress") -> dict[str, Any]:
    return {
        "run": folder.name,
        "folder": str(folder),
        "job": None if standing is None else _job(standing, standing.record),
        "progress": asdict(progress),
    }


def _job(standing: "JobStatus", record: "JobRecord") -> dict[str, Any]:
    return {
        "number": record.number,
        "state": standing.state,
        "detail": standing.detail,
        "active": standing.is_active,
        "exit_code": standing.code,
        "restarts": standing.restarts,
        "used": standing.used,
        "limit": standing.limit,
        "submitted": record.time,
        "ended": standing.ended,
        "nodes": record.nodes,
        "processes": record.processes,
        "log": record.log,
        "script": record.script,
        "settings": list(record.settings),
        "config": str(record.config_file),
        "code": record.code,
        "snapshot": record.snapshot,
    }
