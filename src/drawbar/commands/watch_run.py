"""``drawbar watch``: follow a run from another terminal, by its files and the state of its job."""

import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console as RichConsole
from rich.live import Live

from drawbar.config.io.source import nearest_run, run_folder
from drawbar.errors import ExitCode, UserError
from drawbar.tracking.lines import duration, evaluation_line, join, log_line, speed, time_left
from drawbar.tracking.live_view import LabelledValue, LiveValues, LiveView
from drawbar.tracking.run_view import (
    STALE,
    UNKNOWN,
    RunJob,
    RunView,
    evaluation_scores,
    job_lookups,
    metric_value,
    read_run,
)
from drawbar.util.run_dir import CONFIG_FILE, is_run_dir

POLL_SECONDS = 0.5
"""Interval between two reads of the files of a run."""
_STYLES = {"training": "green", "complete": "green", "failed": "red", STALE: "red", "stopped": "yellow"}


def find_run(what: str) -> tuple[Path, Callable[[], RunJob | None]]:
    """The folder of a run, which need not exist yet, and a function that queries its job, if it has one.

    Raises:
        UserError: ``what`` is a sweep of several runs, or a project folder.
    """
    for lookup in job_lookups():
        if (found := lookup.follow(what)) is not None:
            return found
    folder = Path(what).absolute()
    if (folder / CONFIG_FILE).is_file() and not is_run_dir(folder):
        run_folder(what)  # raises: it is the folder of a project
    return folder, lambda: None


def place(run: RunView) -> str:
    """The job or host that trains a run."""
    if run.job is not None:
        return f"{run.job.launcher} job {run.job.number}"
    return f"on {run.host}" if run.host else ""


def notice(run: RunView) -> str:
    """What to say about a run besides its metrics."""
    at = f" at step {run.progress.step_of_total}" if run.progress.step is not None else ""
    known = run.job if run.job is not None and run.job.state is not None else None
    job = f"job {known.number}: {known.state} {known.remarks}".rstrip() if known is not None else ""
    if not run.is_over:
        if run.state == "training":
            return "" if run.is_active else job
        if job and run.is_active:
            return f"{run.state}{at}; {job}" if run.has_begun else f"{job}; it has not begun"
        return f"{run.state}{at}; a process has its folder open" if run.is_held else ""
    go_on = "`drawbar resume` continues it" if job else "`drawbar train` with the same configuration continues it"
    words = {
        "complete": f"complete{at}",
        "stopped": f"stopped{at}: it has saved, and is not training now; {go_on}",
        "failed": f"failed{at}: its log says why (logs/rank-0000.log); {go_on}",
        STALE: f"dead{at}: its process is gone without a message (killed, or its machine was lost); "
        f"{go_on} from the newest checkpoint",
        UNKNOWN: f"not written to for a long time{at}",
    }
    said = words[run.state] if run.has_begun else "its job has ended, and the run has not begun"
    return said if run.state == "complete" or not job else f"{said}; {job}"


def fill(values: LiveValues, run: RunView) -> None:
    """Set the values that the live view draws."""
    progress, where, left = run.progress, place(run), run.progress.seconds_left
    heading = [LabelledValue(run.state, run.folder.name, style=f"bold {_STYLES.get(run.state, 'default')}")]
    if where:
        heading.append(LabelledValue("", where))
    if run.ago is not None:
        heading.append(LabelledValue(duration(run.ago), "written", "ago"))
        left = None if left is None else max(0.0, left - run.ago)
    values.heading, values.notice = heading, notice(run)
    values.step, values.total_steps = progress.step, progress.total
    values.seconds_left = left if run.state == "training" else None
    values.loss, values.lr, values.speed = progress.loss, progress.lr, speed(progress.rates)
    values.mfu, values.peak_memory_gib = progress.mfu, progress.peak_memory_gib
    values.evaluated_step, values.scores, values.best = progress.evaluated_step, progress.scores, progress.best
    values.checkpoint = progress.checkpoint


class TerminalWatch:
    """Redraws the run in the same place."""

    def __init__(self) -> None:
        self._values = LiveValues()
        self._console = RichConsole(highlight=False)
        self._live = Live(LiveView(self._values), console=self._console, auto_refresh=False)
        self._width = self._console.width

    def show(self, run: RunView) -> None:
        fill(self._values, run)
        if self._console.width < self._width:  # the terminal has wrapped what was drawn
            self._console.clear()
        self._width = self._console.width
        self._live.start()
        self._live.refresh()

    def stop(self) -> None:
        self._live.stop()


class PlainWatch:
    """Prints a line for each new entry of ``metrics.jsonl`` and each change of state, as ``drawbar train`` does without
    a terminal."""

    def __init__(self) -> None:
        self._told: str | None = None
        self._newest: float | None = None

    def show(self, run: RunView) -> None:
        told = f"{run.folder.name}: {notice(run) or ' '.join(filter(None, (run.state, place(run))))}"
        is_news, self._told = told != self._told, told
        if is_news and not run.is_over:
            print(told, flush=True)
        for line in self._new_lines(run):
            self._newest = max(line["time"], self._newest or 0.0)
            if scores := evaluation_scores(line):
                print(evaluation_line(line["step"], run.progress.total, scores), flush=True)
            elif "train/loss" in line:
                values = {name: value for name in line if (value := metric_value(line[name])) is not None}
                left = time_left(run.progress.seconds_left) if line is run.lines[-1] else None
                print(join(log_line(line["step"], run.progress.total, values), left), flush=True)
        if is_news and run.is_over:
            print(told, flush=True)

    def _new_lines(self, run: RunView) -> list[Mapping[str, Any]]:
        """The lines not yet printed; at first, only the newest training line and the newest scores."""
        if self._newest is not None:
            return [line for line in run.lines if line["time"] > self._newest]
        scored = [line for line in run.lines if evaluation_scores(line)][-1:]
        trained = [line for line in run.lines if "train/loss" in line][-1:]
        return sorted([*scored, *trained], key=lambda line: float(line["time"]))

    def stop(self) -> None:
        """Does nothing: unlike a ``TerminalWatch``, this has nothing to close."""


def follow_run(what: str, patience: float) -> ExitCode:
    """Show a run until it ends.

    Args:
        what: a run's folder, the name of a submitted run, or the number of a job.
        patience: seconds to wait for a run that has not begun and has no known job.

    Raises:
        UserError: the run has not begun by then, it is a sweep, or its scheduler does not answer.
    """
    folder, ask = find_run(what)
    is_terminal = sys.stdout.isatty() and not RichConsole().is_dumb_terminal
    shown: TerminalWatch | PlainWatch = TerminalWatch() if is_terminal else PlainWatch()
    end, is_told = time.monotonic() + patience, False
    try:
        while True:
            run = read_run(folder, ask())
            if run.has_begun or run.job is not None or run.is_held:
                shown.show(run)
                if run.is_over:
                    return ExitCode.DONE if run.state == "complete" else ExitCode.FAILED
            elif time.monotonic() >= end:
                raise _not_there(what, folder, patience)
            elif not is_told:
                guess = nearest_run(folder)
                meant = f"; did you mean {guess}?" if guess and not folder.exists() else ""
                print(f"{what} has not begun: waiting for it, up to {duration(patience)}{meant}", file=sys.stderr)
                is_told = True
            time.sleep(POLL_SECONDS)
    except KeyboardInterrupt:  # ends this command, not the run
        return ExitCode.DONE
    finally:
        shown.stop()


def _not_there(what: str, folder: Path, patience: float) -> UserError:
    guess = nearest_run(folder)
    more = "`drawbar runs DIR` lists the runs of a folder; --wait SECONDS waits longer"
    return UserError(
        f"{what} has not begun within {duration(patience)}: a run writes nothing before it is ready to train",
        where=str(folder),
        remedy=f"did you mean {guess}?" if guess and not folder.exists() else more,
    )
