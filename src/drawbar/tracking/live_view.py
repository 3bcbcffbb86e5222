"""The live view of a run on a terminal: its newest metrics, in as many lines as they need at the terminal's width.

``drawbar train`` draws it below its lines, ``drawbar watch`` on its own. Lines break between items, never inside one;
if a single item is wider than the terminal, its name is shortened, not its value.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, RenderResult
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from drawbar.tracking.lines import number, speed, step_of_total, time_left
from drawbar.util.best_score import BestScore

WIDEST = 110
"""Maximum width in columns: longer lines cannot be read at a glance."""
LABELLED = 60
"""Minimum width of a terminal, in columns, at which the labels of rows get a column of their own."""
MOST_SCORES = 8
"""Maximum number of scores shown for an evaluation; ``metrics.jsonl`` has all of them."""
_LABEL_WIDTH = 12
_GAP = 2


@dataclass(frozen=True)
class LabelledValue:
    """A value, usually a number, with its name; both are always on the same line."""

    value: str
    name: str = ""
    after: str = ""
    """A unit or a name shown after the value."""
    style: str = "bold"
    """Rich style of the value."""

    def text(self, width: int) -> Text:
        """The item in at most ``width`` columns: if it is too long, its name is shortened."""
        value, name, after = map(_printable, (self.value, self.name, self.after))
        room = max(0, width - cell_len(value) - cell_len(after) - bool(after) - 1)
        if cell_len(name) > room:
            name = set_cell_size(name, max(0, room - 1)) + "…"
        parts = [(name if room > 1 else "", "dim"), (value, self.style), (after, "dim")]
        return Text(" ", no_wrap=True).join(Text(part, style) for part, style in parts if part)


@dataclass
class LiveValues:
    """The values of a run that the live view shows. Those that are None or empty are left out."""

    step: int | None = None
    total_steps: int | None = None
    seconds_left: float | None = None
    loss: float | None = None
    lr: float | None = None
    grad_norm: float | None = None
    speed: str | None = None
    """Including its unit."""
    mfu: float | None = None
    peak_memory_gib: float | None = None
    skipped: float | None = None
    """Updates skipped so far because fp16 overflowed."""
    evaluated_step: int | None = None
    scores: Mapping[str, float] = field(default_factory=dict)
    """The scores of the newest evaluation, by their names ``eval/<split>/<score>``."""
    best: BestScore | None = None
    phase: tuple[str, int, int] | None = None
    """Work other than training, such as an evaluation: its name, how much is done, and how much there is."""
    heading: Sequence[LabelledValue] = ()
    """Shown above everything else."""
    checkpoint: int | None = None
    """Step of the newest checkpoint."""
    notice: str = ""
    """A sentence shown below everything else."""

    def take(self, values: Mapping[str, float]) -> None:
        """Update these values from the ``train/`` metrics of a step."""
        for name in ("loss", "lr", "grad_norm", "mfu", "peak_memory_gib", "skipped"):
            if f"train/{name}" in values:
                setattr(self, name, values[f"train/{name}"])
        self.speed = speed(values) or self.speed


class LiveView:
    """Draws the current values of a run."""

    def __init__(self, values: LiveValues) -> None:
        self.values = values

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        values, width = self.values, min(options.max_width, WIDEST)
        yield from flow("", values.heading, width)
        if values.step is not None and values.total_steps:
            yield _bar(values.step, values.total_steps, width)
        for label, items in _rows(values):
            yield from flow(label, items, width)
        if values.phase is not None:
            name, done, total = values.phase
            yield _bar(done, total, width)
            yield from flow(name, [LabelledValue(f"{done:,}/{total:,}")], width)
        if values.notice:
            yield Text(_printable(values.notice))


def flow(label: str, items: Sequence[LabelledValue], width: int) -> Iterator[Text]:
    """Lines of items, as many per line as fit into ``width`` columns; no lines if there are no items."""
    if not items:
        return
    indent = 0 if not label else _LABEL_WIDTH if width >= LABELLED else _GAP
    line = Text(label, "cyan", no_wrap=True)
    if label:
        line.append(" " * max(_GAP, indent - line.cell_len))
    start = line.cell_len
    for item in items:
        drawn = item.text(width - indent)
        gap = _GAP if line.cell_len > start else 0
        if line.cell_len > indent and line.cell_len + gap + drawn.cell_len > width:
            yield line
            line, start, gap = Text(" " * indent, no_wrap=True), indent, 0
        line.append(" " * gap)
        line.append_text(drawn)
    yield line


def _bar(done: int, total: int, width: int) -> Table:
    share = f"{min(1.0, done / total) if total else 1.0:.0%}"
    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_row(ProgressBar(total=max(1, total), completed=done, width=max(4, width - len(share) - 2)), Text(share))
    return grid


def _rows(values: LiveValues) -> Iterator[tuple[str, list[LabelledValue]]]:
    if values.step is not None:
        left = time_left(values.seconds_left)
        step = step_of_total(values.step, values.total_steps).removeprefix("step ")
        yield "progress", [LabelledValue(step, "step"), *([] if left is None else [LabelledValue(*_parted(left))])]
    yield "training", list(_training(values))
    if values.scores:
        yield "evaluation", list(_evaluation(values))
    if values.best is not None:
        best = values.best
        yield "best", [LabelledValue(number(best.score), best.metric), LabelledValue(f"{best.step:,}", "at step")]
    if values.checkpoint is not None:
        yield "checkpoint", [LabelledValue(f"{values.checkpoint:,}", "step")]


def _training(values: LiveValues) -> Iterator[LabelledValue]:
    if values.loss is not None:
        yield LabelledValue(number(values.loss), "loss")
    if values.lr is not None:
        yield LabelledValue(f"{values.lr:.1e}", "lr")
    if values.grad_norm is not None:
        yield LabelledValue(f"{values.grad_norm:.2f}", "grad_norm")
    if values.speed is not None:
        yield LabelledValue(*_parted(values.speed))
    if values.mfu is not None:
        yield LabelledValue(f"{values.mfu:.1%}", "mfu")
    if values.peak_memory_gib is not None:
        yield LabelledValue(f"{values.peak_memory_gib:.1f}", "memory", "GiB")
    if values.skipped:
        yield LabelledValue(f"{values.skipped:.0f}", "skipped")


def _evaluation(values: LiveValues) -> Iterator[LabelledValue]:
    if values.evaluated_step is not None:
        yield LabelledValue(f"{values.evaluated_step:,}", "step")
    splits = {name.split("/")[1] for name in values.scores}
    for name, score in list(values.scores.items())[:MOST_SCORES]:
        split, _, shown = name.removeprefix("eval/").rpartition("/")
        yield LabelledValue(number(score), shown if len(splits) == 1 else f"{split} {shown}")
    if len(values.scores) > MOST_SCORES:
        yield LabelledValue(f"{len(values.scores) - MOST_SCORES} more")


def _printable(text: str) -> str:
    """Replace unprintable characters, which could move the cursor: metric and run names may contain anything."""
    return "".join(character if character.isprintable() else "�" for character in text)


def _parted(text: str) -> tuple[str, str, str]:
    """Split text such as ``4,100 tok/s`` into the arguments of a ``LabelledValue``: number, no name, unit."""
    value, _, unit = text.partition(" ")
    return value, "", unit
