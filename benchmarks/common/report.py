"""The result of one part of the suite: JSON for ``benchmarks/results``, tables for the terminal, plots of growth."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.common.statistic import Statistic, text_table

RESULTS = Path(__file__).resolve().parents[1] / "results"
PLOTS = RESULTS.parents[1] / "docs" / "performance"


@dataclass(frozen=True)
class Table:
    """Rows of values by column: numbers, texts, or :class:`Statistic`."""

    title: str
    rows: list[dict[str, Any]]


@dataclass(frozen=True)
class Check:
    """A number that is to be at least, or at most, something."""

    what: str
    value: float
    limit: float
    at_least: bool = True

    @property
    def is_reached(self) -> bool:
        return self.value >= self.limit if self.at_least else self.value <= self.limit


@dataclass(frozen=True)
class Curve:
    """How something grows: named lines of points, both axes logarithmic."""

    name: str
    """Also that of the plot's file."""
    title: str
    x: str
    y: str
    lines: Mapping[str, Sequence[tuple[float, float]]]


@dataclass
class Report:
    """What a part measured."""

    part: str
    title: str
    tables: list[Table] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    curves: list[Curve] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What a reader must know: what was absent, what could not be compared."""

    def to_json(self, about: dict[str, Any]) -> str:
        """Args: about: machine, limits, versions and options of the run."""
        checks = [{**asdict(check), "is_reached": check.is_reached} for check in self.checks]
        fields = {"date": date.today().isoformat(), **about, **asdict(self), "checks": checks}
        return json.dumps(fields, indent=1, default=_plain) + "\n"

    def to_text(self) -> str:
        """For the terminal."""
        blocks = [f"{self.part}: {self.title}", *(text_table(table.title, table.rows) for table in self.tables)]
        if self.checks:
            blocks.append(text_table("Wanted", [check_row(asdict(check)) for check in self.checks]))
        return "\n\n".join([*blocks, *self.notes])


def check_row(check: dict[str, Any]) -> dict[str, Any]:
    """A row of the table of checks, from the JSON of one."""
    reached = Check(**{name: check[name] for name in ("what", "value", "limit", "at_least")}).is_reached
    sign = "≥" if check["at_least"] else "≤"
    return {"check": check["what"], "measured": float(check["value"]), "wanted": f"{sign} {check['limit']:g}"} | {
        "reached": "yes" if reached else "no"
    }


def _plain(value: Any) -> Any:
    if isinstance(value, Statistic):
        return asdict(value)
    raise TypeError(f"a report cannot hold {type(value).__name__}")


def write_answer(path: Path, **found: Any) -> None:
    """What a script of one question found, as JSON, with the date and the machine."""
    from benchmarks.common.limits import describe_machine  # which loads torch

    path.parent.mkdir(parents=True, exist_ok=True)
    answer = {"date": date.today().isoformat(), "machine": describe_machine(), **found}
    path.write_text(json.dumps(answer, indent=2) + "\n", encoding="utf-8")


def draw(curve: Curve, folder: Path) -> Path:
    """The plot of a curve, as SVG; the same bytes for the same curve."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "drawbar"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.4, 3.6), layout="constrained")
    for name, points in curve.lines.items():
        axes.plot(*zip(*points, strict=True), marker="o", label=name)
    axes.set(xscale="log", yscale="log", xlabel=curve.x, ylabel=curve.y, title=curve.title)
    axes.grid(alpha=0.3)
    axes.legend()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{curve.name}.svg"
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
    return path
