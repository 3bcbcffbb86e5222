"""The page of ``drawbar report``: reads runs, renders their page, and writes it."""

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from drawbar.report.page import (
    PageFigure,
    PlottedCurve,
    check_plotly,
    curve_name,
    render_page,
    significant,
    with_ids,
    write_page,
)
from drawbar.report.recorded_run import RecordedRun, read_recorded_run
from drawbar.report.run_history import Curve
from drawbar.tracking.lines import number

_MAIN = {
    "train/lr": ("Learning rate", "learning rate"),
    "train/grad_norm": ("Gradient norm, before clipping", "norm"),
    "train/tokens_per_second": ("Throughput", "tokens per second"),
    "train/samples_per_second": ("Throughput", "samples per second"),
    "train/weight": ("Targets of the global batch", "targets"),
    "train/mfu": ("Model FLOPs utilization (MFU)", "share of the peak"),
    "train/peak_memory_gib": ("Peak memory of rank 0", "GiB"),
    "train/data_wait_seconds": ("Waiting for data", "seconds per step"),
}
"""Metrics with a figure of their own, in this order: title, and what the vertical axis shows."""
_LOSS = "train/loss"
_UNPLOTTED = ("train/epoch", "train/skipped")
"""Counts that only grow, and have no figure; but ``train/skipped`` has one if it ends above 0 in any run."""


def make_figures(runs: Mapping[str, RecordedRun]) -> list[PageFigure]:
    """The figures of one or several runs by name: each metric that any of them has, their curves overlaid."""
    names = list(dict.fromkeys(name for run in runs.values() for name in run.metrics.curves))
    losses = [name for name in names if name == _LOSS or _is_score(name, "loss")]
    main = [name for name in _MAIN if name in names]
    scores = list(dict.fromkeys(_score(name) for name in names if _score(name) not in (None, "loss")))
    others = [name for name in names if name not in {*losses, *main} and _score(name) is None]
    figures = [_figure(runs, losses, "Loss", "loss per target")]
    figures += [
        _figure(runs, [name for name in names if _is_score(name, score)], f"Evaluation: {score}", "score")
        for score in scores
    ]
    figures += [_figure(runs, [name], *_MAIN[name]) for name in main]
    figures += [_figure(runs, [name], name, "value") for name in others if _is_worth_a_figure(runs, name)]
    return with_ids(figures)


def _score(name: str) -> str | None:
    """The score of ``eval/<split>/<score>``; None of other metrics."""
    return name.rpartition("/")[2] if name.startswith("eval/") and name.count("/") >= 2 else None


def _is_score(name: str, score: str | None) -> bool:
    return score is not None and _score(name) == score


def _is_worth_a_figure(runs: Mapping[str, RecordedRun], name: str) -> bool:
    if name not in _UNPLOTTED:
        return True
    curves = [run.metrics.curves[name] for run in runs.values() if name in run.metrics.curves]
    return name == "train/skipped" and any(curve.last > 0 for curve in curves)


def _figure(runs: Mapping[str, RecordedRun], metrics: Sequence[str], title: str, axis: str) -> PageFigure:
    traces, words = [], []
    for position, (run_name, run) in enumerate(runs.items()):
        for index, metric in enumerate(metric for metric in metrics if metric in run.metrics.curves):
            curve = run.metrics.curves[metric]
            parts = [run_name] if len(runs) > 1 else []
            parts += [metric] if len(metrics) > 1 or not parts else []
            colour = position if len(runs) > 1 else index
            traces.append(_trace(" ".join(parts), colour, metric.startswith("eval/"), curve))
            words.append(f"{' '.join(parts)} {describe_curve(curve)}")
    return PageFigure(title, axis, f"{title}. {'; '.join(words[:8])}", traces)


def _trace(name: str, colour: int, is_dashed: bool, curve: Curve) -> PlottedCurve:
    points = curve.points()
    values = [None if value is None else significant(value) for _, value in points]
    return PlottedCurve(curve_name(name), colour, is_dashed, [step for step, _ in points], values)


def describe_curve(curve: Curve) -> str:
    """``from 5.796 to 2.194, smallest 2.190 at step 38``."""
    text = f"from {number(curve.first)} to {number(curve.last)}"
    if curve.lowest is not None and not math.isnan(curve.lowest[1]):
        text += f", smallest {number(curve.lowest[1])} at step {curve.lowest[0]:,}"
    return text + (f", {curve.not_finite:,} values not finite" if curve.not_finite else "")


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
    """The runs by name; those that share a name, by as much of their paths as distinguishes them."""
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
