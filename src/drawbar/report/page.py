"""Renders a page and writes it: one HTML file that loads nothing over a network and runs no scripts but its own."""

import base64
import hashlib
import importlib.util
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from html import escape
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

from drawbar.commands.output_files import writing
from drawbar.errors import ExitCode, UserError
from drawbar.tracking.lines import duration, number
from drawbar.util.atomic_files import is_stream, replacing, unwritable
from drawbar.util.byte_sizes import readable


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


MARKER = b"<!-- drawbar report -->"
"""The end of the first line of every page: such a file may be replaced by a newer page."""


def check_plotly(what: str) -> None:
    """Raises UserError if plotly is not installed, which ``what`` needs."""
    if importlib.util.find_spec("plotly") is None:
        raise UserError(
            "a page with figures needs plotly, which is not installed",
            where=what,
            remedy='pip install "drawbar[report]", or pip install plotly',
            exit_code=ExitCode.FAILED,
        )


def check_target(target: Path, option: str) -> None:
    """Refuse, before any work, a target that is a folder, or a file that is not a page of drawbar's.

    Args:
        option: what names the target, for errors.

    Raises:
        UserError: there is a folder, or a file that is not a page of drawbar's.
    """
    if (reason := unwritable(target)) is not None:
        raise UserError(f"{target} is {reason}", where=option, remedy="name a file, such as report.html")
    if not target.exists() or is_stream(target):
        return
    try:
        with target.open("rb") as file:
            is_page = MARKER in file.readline(200)
    except OSError:
        is_page = False
    if not is_page:
        raise UserError(
            f"{target} is there already, and is no report of drawbar's",
            where=option,
            remedy=f"name another file: {option} FILE",
        )


def write_page(page: bytes, target: Path, option: str) -> None:
    """Write a page. Raises UserError if that fails; a file that was there is then unchanged."""
    with writing(target, option):
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(target, one_writer=False) as file:
            file.write(page)


def render_page(
    template: str,
    figures: Sequence[PageFigure],
    filters: Mapping[str, Callable[..., str | bool]],
    **values: Any,
) -> bytes:
    """A page, in UTF-8.

    Args:
        template: a file in ``assets`` that extends ``page.html``.
        filters: Jinja filters of the template, besides ``number``, ``duration``, ``size`` and ``clock``.
        values: variables of the template.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from plotly.offline import get_plotlyjs

    assets = files("drawbar.report") / "assets"
    environment = Environment(
        loader=PackageLoader("drawbar.report", "assets"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"number": number, "duration": duration, "size": readable, "clock": _clock, **filters}
    scripts = {"plotly": get_plotlyjs(), "own": (assets / "page.js").read_text(encoding="utf-8")}
    scripts = {name: text.replace("</script", r"<\/script") for name, text in scripts.items()}
    page = environment.get_template(template).render(
        version=version("drawbar"),
        made=time.time(),
        figures=figures,
        figure_data=[figure.data() for figure in figures],
        style=(assets / "page.css").read_text(encoding="utf-8"),
        scripts=scripts,
        script_hashes=" ".join(_hash(text) for text in scripts.values()),
        **values,
    )
    return page.encode("utf-8", errors="replace")  # a lone surrogate cannot be encoded: it becomes "?"


def _hash(script: str) -> str:
    """A script's hash as a Content-Security-Policy names it: no other script of the page is run."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _clock(seconds: float) -> str:
    """``2026-11-23 14:05:10``, in this machine's time zone."""
    try:
        return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):
        return str(seconds)
