"""Renders a page and writes it: one HTML file that loads nothing over a network and runs no scripts but its own."""

import base64
import hashlib
import importlib.util
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

from drawbar.errors import ExitCode, UserError
from drawbar.report.page_figure import PageFigure
from drawbar.tracking.lines import duration, number
from drawbar.util.atomic_files import is_stream, replacing, unwritable
from drawbar.util.byte_sizes import readable

MARKER = b"<!-- drawbar report -->"
"""The end of the first line of every page: such a file may be replaced by a newer page."""


def check_plotly(what: str) -> None:
    """Raises UserError where plotly is not installed, which ``what`` needs."""
    if importlib.util.find_spec("plotly") is None:
        raise UserError(
            "a page with figures needs plotly, which is not installed",
            where=what,
            remedy='pip install "drawbar[report]", or pip install plotly',
            exit_code=ExitCode.FAILED,
        )


def check_target(target: Path, option: str) -> None:
    """Refuse, before any work, a target that is a folder, or a file that is no page of drawbar's.

    Args:
        option: what names the target, for errors.

    Raises:
        UserError: there is a file that is no page of drawbar's, or a folder.
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
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(target, one_writer=False) as file:
            file.write(page)
    except OSError as error:
        raise UserError(
            f"cannot write {target}: {error.strerror or error}",
            where=option,
            remedy="free some space there, or name a place on another disk that you may write to",
            exit_code=ExitCode.FAILED,
        ) from error


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
