"""``drawbar runs``."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from drawbar.tracking.run_view import Progress, RunView


@click.command(
    short_help="List runs: state, step, loss, best score.",
    epilog="""\b
Examples:
  drawbar runs                         the runs in the folder runs/
  drawbar runs /data/experiments
  drawbar runs --json                  one JSON object per line, for programs

\b
States: training; complete (all steps done, or early stopping); stopped (saved, and can be resumed);
failed; stale (was training, but no process has it open, and its process is gone or has long been
silent); submitted, or how its job ended (the run has not started); unknown (it has not started).
""",
)
@click.argument("folder", metavar="[DIR]", type=click.Path(path_type=Path), default="runs")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per run, one per line.")
def runs(folder: Path, as_json: bool) -> None:
    """List the runs in DIR (by default runs/), most recently written first."""
    import json

    from drawbar.tracking.run_view import list_runs
    from drawbar.tracking.table import print_table

    found = list_runs(folder)
    if as_json:
        for run in found:
            click.echo(json.dumps(_values(run)))
    elif found:
        columns = ["run", "state", "step", "loss", "best", "written", "host or job"]
        print_table(f"Runs in {folder}", columns, [_row(run) for run in found], left=2)
    else:
        click.echo(f"no runs in {folder}")


def _row(run: "RunView") -> list[str]:
    from drawbar.tracking.lines import duration, number

    progress = run.progress
    best = "" if progress.best is None else f"{progress.best.metric} {number(progress.best.score)}"
    return [
        run.folder.name,
        run.state,
        progress.step_of_total,
        "" if progress.loss is None else number(progress.loss),
        best,
        "" if run.written is None else f"{duration(max(0.0, run.looked - run.written))} ago",
        run.host or "" if run.job is None else f"{run.job.launcher} {run.job.number}",
    ]


def _values(run: "RunView") -> dict[str, Any]:
    return {
        "run": run.folder.name,
        "folder": str(run.folder.absolute()),
        "state": run.state,
        "written": run.written,
        "host": run.host,
        "job": None if run.job is None else {"launcher": run.job.launcher, "number": run.job.number},
        "progress": progress_values(run.progress),
    }


def progress_values(progress: "Progress") -> dict[str, Any]:
    """The progress of a run for JSON; non-finite numbers become strings, as in ``metrics.jsonl``."""
    from drawbar.util.strict_json import with_finite_numbers

    best = None if progress.best is None else progress.best.model_dump()
    found: dict[str, Any] = with_finite_numbers({**asdict(progress), "best": best})
    return found
