"""A figure of a page, as data. What it looks like is in ``assets/page.js``."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from html import escape
from typing import Any


@dataclass(frozen=True)
class PlottedCurve:
    """One line in a figure."""

    name: str
    """With ``<``, ``>`` and ``&`` escaped: plotly reads some tags in names."""
    colour: int
    """Number of the colour in the palette."""
    is_dashed: bool
    x: list[int]
    """Steps."""
    y: list[float | None]
    """None leaves a gap: the value is not a finite number."""
    width: float | None = None
    """Width of the line in pixels; None for the default, which is larger for a dashed curve."""
    is_bound: bool = False
    """Whether it is a bound and not a measured curve: drawn dotted, without points."""


@dataclass(frozen=True)
class PageFigure:
    """One figure of the page."""

    title: str
    axis: str
    """What the vertical axis shows."""
    summary: str
    """The figure in words, for those who do not see it."""
    traces: list[PlottedCurve]
    is_logarithmic: bool = False
    """Whether the vertical axis is always logarithmic; otherwise the reader of the page chooses."""
    id: str = ""
    """Id of the HTML element that the figure is drawn in."""

    def data(self) -> dict[str, Any]:
        """What ``page.js`` draws."""
        traces = [asdict(trace) for trace in self.traces]
        about = {"id": self.id, "axis": self.axis, "logarithmic": self.is_logarithmic, "range": self._range()}
        return {**about, "traces": traces}

    def _range(self) -> list[float] | None:
        """The range of the vertical axis: a tenth below and above a value that never changes, as plotly itself would
        show an accuracy of 0.6 on an axis from -0.4 to 1.6. None for other curves: plotly chooses."""
        values = {value for trace in self.traces for value in trace.y if value is not None}
        if len(values) != 1:
            return None
        (value,) = values
        around = abs(value) / 10 or 1.0
        return [value - around, value + around]


def with_ids(figures: Sequence[PageFigure]) -> list[PageFigure]:
    """The figures that have curves, each with an id."""
    drawn = [figure for figure in figures if figure.traces]
    return [replace(figure, id=f"figure-{index}") for index, figure in enumerate(drawn)]


def curve_name(name: str) -> str:
    """A name, escaped for ``PlottedCurve.name``."""
    return escape(name, quote=False)


def significant(value: float) -> float:
    """The value with as many digits as a figure can show."""
    return float(f"{value:.7g}")
