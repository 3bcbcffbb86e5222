"""``drawbar watch``: a run followed from another terminal, by its files and by what is known of its job."""

import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console as RichConsole
from rich.live import Live

from drawbar.config.io.source import nearest_run
from drawbar.errors import ExitCode, UserError
from drawbar.launch.jobs.follow import ASK_SECONDS, PATIENCE, POLL_SECONDS
from drawbar.launch.jobs.job_status import JobStatus
from drawbar.launch.jobs.progress import LoggedProgress, evaluation_scores, metric_value, newest_lines, read_progress
from drawbar.launch.jobs.records import JobRecord, find, read, run_file
from drawbar.launch.jobs.run_status import is_locked, last_host
from drawbar.launch.launchers import ask_status
from drawbar.tracking.lines import duration, evaluation_line, join, log_line, speed, time_left
from drawbar.tracking.live_view import LabelledValue, LiveValues, LiveView
from drawbar.util.run_dir import CONFIG_FILE, is_run_dir

_STYLES = {"training": "green", "complete": "green", "failed": "red", "stale": "red", "stopped": "yellow"}


@dataclass(frozen=True)
class RunSight:
    """What one look at a run's files and its job has found."""

    state: str
    """See ``LoggedProgress.state``; ``not begun`` where it has written nothing yet."""
    progress: LoggedProgress
    where: str
    """The job, or the host, that trains it."""
    notice: str
    """What there is to say besides the numbers."""
    is_over: bool
    """Whether nobody trains the run, and nobody is about to."""

    @property
    def exit_code(self) -> ExitCode:
        return ExitCode.DONE if self.state == "complete" else ExitCode.FAILED


@dataclass
class WatchedJob:
    """The job of a run, of which the scheduler is asked every few seconds."""

    record: JobRecord
    status: JobStatus | None = None
    _asked: float = -ASK_SECONDS
    _answered: float = field(default_factory=time.monotonic)

    def ask(self) -> JobStatus | None:
        """The newest known status of the job. Raises UserError if the scheduler has not answered for ``PATIENCE``
        seconds, or its commands are not installed here."""
        now = time.monotonic()
        if now - self._asked >= ASK_SECONDS:
            self._asked = now
            try:
                self.status = ask_status([self.record])[0]
                self._answered = now
            except UserError as error:
                if now - self._answered > PATIENCE or isinstance(error.__cause__, FileNotFoundError):
                    raise
        return self.status


def find_run(what: str) -> tuple[Path, WatchedJob | None]:
    """The folder of a run, and its newest job if it has one. The folder need not be there yet.

    Raises:
        UserError: it is a sweep of several runs, or a project folder.
    """
    folder = Path(what).absolute()
    if is_run_dir(folder) and not read(run_file(folder)):
        return folder, None
    try:
        records = find(what)
    except UserError:
        if (folder / CONFIG_FILE).is_file():
            raise
        return folder, None
    if len(records) > 1:
        raise UserError(
            f"{what} is a sweep of {len(records)} runs",
            where="RUN",
            remedy=f"name one of them, such as {records[0].run_dir}; `drawbar runs` lists them side by side",
        )
    return Path(records[0].run_dir), WatchedJob(records[0])


def look(folder: Path, job: WatchedJob | None) -> RunSight:
    """Look at a run once. Raises UserError where its scheduler has not answered for too long."""
    progress = read_progress(folder)
    state = progress.state(folder, time.time())
    if state == "unknown" and progress.step is None:
        state = "not begun"
    status = None if job is None else job.ask()
    is_active = status is not None and status.is_active
    is_held = is_locked(folder)
    has_ended = status is not None and not is_active and (status.ended or 0.0) >= (progress.written or 0.0)
    if state == "training" and has_ended and not is_held:
        state = "stale"  # its job has ended, so there is no need to wait until it has been silent for long
    where = f"on {host}" if (host := last_host(folder)) else ""
    if status is not None:
        where = f"{status.record.launcher} job {status.record.number}"
    is_over = not (is_active or is_held or state == "training")
    if state == "not begun" and status is None:
        is_over = False  # the caller waits for it, for a while
    return RunSight(state, progress, where, _notice(state, progress, status, is_over, is_held), is_over)


def _notice(state: str, progress: LoggedProgress, job: JobStatus | None, is_over: bool, is_held: bool) -> str:
    at = f" at step {progress.step_of_total}" if progress.step is not None else ""
    told = "" if job is None else f"job {job.record.number}: {job.state} {job.remarks}".rstrip()
    if state == "training":
        return "" if job is None or job.is_active else told
    if not is_over:
        if job is not None and job.is_active:
            return f"{told}; it has not begun" if state == "not begun" else f"{state}{at}; {told}"
        return f"{state}{at}; a process has its folder open" if is_held else ""
    go_on = "`drawbar train` with the same configuration goes on" if job is None else "`drawbar resume` goes on"
    words = {
        "complete": f"complete{at}",
        "stopped": f"stopped{at}: it has saved, and nobody trains it now; {go_on}",
        "failed": f"failed{at}: its log says why (logs/rank-0000.log); {go_on}",
        "stale": f"dead{at}: its process is gone without a word, as one that was killed, or whose machine was lost; "
        f"{go_on} from the newest checkpoint",
        "not begun": "its job has ended, and the run has not begun",
        "unknown": f"nobody has written to it for long{at}",
    }
    return f"{words[state]}; {told}" if told and state not in ("complete",) else words[state]


def fill(values: LiveValues, name: str, sight: RunSight) -> None:
    """Set what the live view draws."""
    progress, now = sight.progress, time.time()
    heading = [LabelledValue(sight.state, name, style=f"bold {_STYLES.get(sight.state, 'default')}")]
    if sight.where:
        heading.append(LabelledValue("", sight.where))
    left = progress.seconds_left
    if progress.written is not None:
        ago = max(0.0, now - progress.written)
        heading.append(LabelledValue(duration(ago), "written", "ago"))
        left = None if left is None else max(0.0, left - ago)
    values.heading, values.notice = heading, sight.notice
    values.step, values.total_steps = progress.step, progress.total
    values.seconds_left = left if sight.state == "training" else None
    values.loss, values.lr, values.speed = progress.loss, progress.lr, speed(progress.rates)
    values.mfu, values.peak_memory_gib = progress.mfu, progress.peak_memory_gib
    values.evaluated_step, values.scores, values.best = progress.evaluated_step, progress.scores, progress.best
    values.checkpoint = progress.checkpoint


class TerminalWatch:
    """Draws the run over and over in the same place."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._values = LiveValues()
        self._console = RichConsole(highlight=False)
        self._live = Live(LiveView(self._values), console=self._console, auto_refresh=False)
        self._width = self._console.width

    def show(self, sight: RunSight) -> None:
        fill(self._values, self._name, sight)
        if self._console.width < self._width:  # the terminal has wrapped what was drawn
            self._console.clear()
        self._width = self._console.width
        self._live.start()
        self._live.refresh()

    def stop(self) -> None:
        self._live.stop()


class PlainWatch:
    """Prints a line for each new entry of ``metrics.jsonl`` and each change of state, as ``drawbar train`` prints them
    where there is no terminal."""

    def __init__(self, name: str, folder: Path) -> None:
        self._name = name
        self._folder = folder
        self._told: str | None = None
        self._newest: float | None = None

    def show(self, sight: RunSight) -> None:
        lines = newest_lines(self._folder)
        if self._newest is None:  # the first look: only the newest training line and the newest scores
            scored = [line for line in lines if evaluation_scores(line)]
            lines = sorted([*scored[-1:], *[line for line in lines if "train/loss" in line][-1:]], key=_time)
        else:
            lines = [line for line in lines if _time(line) > self._newest]
        told = f"{self._name}: {sight.notice or ' '.join(filter(None, (sight.state, sight.where)))}"
        is_last = sight.is_over
        if told != self._told and not is_last:
            print(told, flush=True)
        for line in lines:
            values = {name: value for name in line if (value := metric_value(line[name])) is not None}
            self._newest = max(_time(line), self._newest or 0.0)
            if scores := evaluation_scores(line):
                print(evaluation_line(line["step"], sight.progress.total, scores), flush=True)
            elif "train/loss" in line:
                left = time_left(sight.progress.seconds_left) if line is lines[-1] else None
                print(join(log_line(line["step"], sight.progress.total, values), left), flush=True)
        if told != self._told and is_last:
            print(told, flush=True)
        self._told = told

    def stop(self) -> None:
        """Does nothing: unlike a ``TerminalWatch``, this holds nothing that must be closed."""


def _time(line: dict[str, float]) -> float:
    return float(line["time"])


def follow_run(what: str, patience: float) -> ExitCode:
    """Show a run until it ends.

    Args:
        what: a run's folder, the name of a submitted run, or the number of a job.
        patience: seconds to wait for a run that has not begun, and that no job is known of.

    Raises:
        UserError: it has not begun by then, it is a sweep, or its scheduler does not answer.
    """
    folder, job = find_run(what)
    console = RichConsole()
    is_terminal = sys.stdout.isatty() and not console.is_dumb_terminal
    shown: TerminalWatch | PlainWatch = TerminalWatch(folder.name) if is_terminal else PlainWatch(folder.name, folder)
    end = time.monotonic() + patience
    is_told = False
    try:
        while True:
            sight = look(folder, job)
            if sight.state == "not begun" and job is None and not is_locked(folder):
                if time.monotonic() >= end:
                    raise _not_there(what, folder, patience)
                if not is_told:
                    guess = nearest_run(folder)
                    meant = f"; did you mean {guess}?" if guess and not folder.exists() else ""
                    print(f"{what} has not begun: waiting for it, up to {duration(patience)}{meant}", file=sys.stderr)
                    is_told = True
            else:
                shown.show(sight)
            if sight.is_over:
                return sight.exit_code
            time.sleep(POLL_SECONDS)
    except KeyboardInterrupt:  # ends this command; the run goes on
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
