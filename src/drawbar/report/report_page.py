"""The page of ``drawbar report``: reads runs, renders their page, and writes it."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from drawbar.report.figures import make_figures
from drawbar.report.page_file import check_plotly, render_page, write_page
from drawbar.report.recorded_run import RecordedRun, read_recorded_run

MOST_BUCKETS = 500
"""Buckets of a curve, of up to three points each: more than a figure has pixels."""
_BUCKETS_OF_RUNS = 2000
"""Buckets of one metric, summed over the curves of all runs. (The limit of a curve is never below 50, however
many runs there are.)"""


def write_report(folders: Sequence[Path], target: Path) -> None:
    """Read the runs, and write their report.

    Raises:
        UserError: plotly is not installed, or the file cannot be written.
    """
    check_plotly("drawbar report")
    buckets = max(50, min(MOST_BUCKETS, _BUCKETS_OF_RUNS // len(folders)))
    write_page(render_report([read_recorded_run(folder, buckets) for folder in folders]), target, "--to")


def render_report(runs: Sequence[RecordedRun]) -> bytes:
    """The page, in UTF-8."""
    named = _name(runs)
    return render_page(
        "report.html",
        make_figures(named),
        {},
        runs=named,
        title=", ".join(named) if len(named) < 4 else f"{len(named)} runs",
        settings=_settings_table(named),
    )


def _name(runs: Sequence[RecordedRun]) -> dict[str, RecordedRun]:
    """The runs by name; those that share a name, by as much of their paths as tells them apart."""
    names = [run.folder.name for run in runs]
    shared = Path(os.path.commonpath([run.folder for run in runs])) if len(runs) > 1 else Path("/")
    found = {}
    for run, name in zip(runs, names, strict=True):
        found[name if names.count(name) == 1 else str(run.folder.relative_to(shared))] = run
    return found


def _settings_table(runs: Mapping[str, RecordedRun]) -> list[tuple[str, list[str]]]:
    """Settings with their value in each run; of several runs, only those that differ."""
    keys = dict.fromkeys(key for run in runs.values() for key in run.settings)
    rows = [(key, [run.settings.get(key, "") for run in runs.values()]) for key in keys]
    return [(key, values) for key, values in rows if len(runs) == 1 or len(set(values)) > 1]
