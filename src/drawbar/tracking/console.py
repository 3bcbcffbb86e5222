"""Console output of a run: a live view on a terminal, plain lines elsewhere, nothing from ranks other than 0.

The full records are in files (``metrics.jsonl``, ``logs/``); the console is for following along.
"""

import logging
import sys
import time
from collections.abc import Mapping

from rich.console import Console as RichConsole
from rich.highlighter import NullHighlighter
from rich.live import Live
from rich.logging import RichHandler
from rich.text import Text

from drawbar.tracking.lines import evaluation_line, join, log_line, phase_line, time_left
from drawbar.tracking.live_view import LiveValues, LiveView
from drawbar.tracking.meters import Clock, TimeLeft
from drawbar.util.best_score import BestScore

QUIET_SECONDS = 10.0
"""Without a terminal, a long phase reports its progress after this many seconds without a line."""


class Console:
    """Shows a person how the run is going. This base class shows nothing, as on ranks other than 0. A step is the
    number of steps done, as in the metrics."""

    def start(self, total_steps: int, first_step: int) -> None:
        """Training begins, with ``first_step`` of ``total_steps`` steps already done."""

    def advance(self, step: int) -> None:
        """``step`` steps are done."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Show the ``train/`` metrics of a step."""

    def evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """Show the scores of an evaluation, by their names ``eval/<split>/<score>``."""

    def best(self, score: BestScore) -> None:
        """Show the best score of the run so far."""

    def phase(self, name: str, done: int, total: int) -> None:
        """Show the progress of long work other than training, such as ``encoding`` or ``evaluating``.

        The phase ends when ``done`` reaches ``total``. Only one runs at a time; it may precede :meth:`start`.
        """

    def message(self, text: str) -> None:
        """Show a text unchanged."""

    def logging_handler(self) -> logging.Handler:
        """A handler that shows log records without disturbing the other output."""
        return logging.NullHandler()

    def stop(self) -> None:
        """Release the terminal. May be called twice, and must be called even if the run fails."""


class TerminalConsole(Console):
    """Scrolling lines, and below them a live view of the run: its newest metrics and the current phase."""

    def __init__(self) -> None:
        self._rich = RichConsole(highlight=False)
        self._values = LiveValues()
        # rich draws in a thread of this process: a higher rate would slow down a small model noticeably
        self._live = Live(LiveView(self._values), console=self._rich, refresh_per_second=4)
        self._time_left: TimeLeft | None = None

    def start(self, total_steps: int, first_step: int) -> None:
        self._time_left = TimeLeft(total_steps, first_step)
        self._values.step, self._values.total_steps = first_step, total_steps
        self._live.start()

    def advance(self, step: int) -> None:
        assert self._time_left is not None, "start() comes first"
        self._time_left.advance(step)
        self._values.step, self._values.seconds_left = step, self._time_left.seconds()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._values.take(values)
        self.message(log_line(step, self._values.total_steps, values))

    def evaluation(self, step: int, values: Mapping[str, float]) -> None:
        self._values.evaluated_step, self._values.scores = step, values
        self._rich.print(Text(evaluation_line(step, self._values.total_steps, values), style="bold"))

    def best(self, score: BestScore) -> None:
        self._values.best = score

    def phase(self, name: str, done: int, total: int) -> None:
        self._values.phase = (name, done, total) if done < total else None
        if done < total:
            self._live.start()

    def message(self, text: str) -> None:
        self._rich.print(Text(text))

    def logging_handler(self) -> logging.Handler:
        return _with_plain_format(
            RichHandler(
                console=self._rich, show_time=False, show_level=False, show_path=False, highlighter=NullHighlighter()
            )
        )

    def stop(self) -> None:
        self._values.phase = None
        self._live.stop()


class PlainConsole(Console):
    """Prints one line per event, without delay: for files, pipes and schedulers' logs."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._last_line = clock()
        self._total_steps: int | None = None
        self._time_left: TimeLeft | None = None

    def start(self, total_steps: int, first_step: int) -> None:
        self._total_steps = total_steps
        self._time_left = TimeLeft(total_steps, first_step, self._clock)

    def advance(self, step: int) -> None:
        assert self._time_left is not None, "start() comes first"
        self._time_left.advance(step)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        left = time_left(self._time_left.seconds()) if self._time_left else None
        self.message(join(log_line(step, self._total_steps, values), left))

    def evaluation(self, step: int, values: Mapping[str, float]) -> None:
        self.message(evaluation_line(step, self._total_steps, values))

    def phase(self, name: str, done: int, total: int) -> None:
        if self._clock() - self._last_line >= QUIET_SECONDS:
            self.message(phase_line(name, done, total))

    def message(self, text: str) -> None:
        self._last_line = self._clock()
        print(text, flush=True)

    def logging_handler(self) -> logging.Handler:
        return _with_plain_format(logging.StreamHandler())


class _PlainFormatter(logging.Formatter):
    """INFO messages unchanged; warnings and errors with their level name in front."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        return text if record.levelno <= logging.INFO else f"{record.levelname.lower()}: {text}"


def _with_plain_format(handler: logging.Handler) -> logging.Handler:
    handler.setFormatter(_PlainFormatter())
    return handler


def make_console(is_rank_zero: bool) -> Console:
    """The console for this process: a live view if standard output is a terminal that can move its cursor."""
    if not is_rank_zero:
        return Console()
    # isatty, and not rich's own test: FORCE_COLOR, set by many CI systems, would make it draw bars into a log file.
    is_terminal = sys.stdout is not None and sys.stdout.isatty()  # None if the shell has closed it: `>&-`
    if is_terminal and not RichConsole().is_dumb_terminal:
        return TerminalConsole()
    return PlainConsole()
