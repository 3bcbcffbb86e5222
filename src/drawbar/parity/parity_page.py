"""The page of ``drawbar parity``: each strategy beside one process, made of what the command prints as JSON."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from drawbar.report.page import PageFigure, PlottedCurve, curve_name, render_page, significant, with_ids
from drawbar.tracking.run_view import metric_value

_DECADES_BELOW = 6
_DECADES_ABOVE = 2
"""The scale of the bar that shows a difference: powers of ten below the bound, and above it."""
_FIGURES = {"loss": ("Loss", "loss per target"), "grad_norm": ("Gradient norm", "norm, before clipping")}
FIRST = "first to differ"
MODULES_AROUND = 6
"""How many modules are shown before the first one that differs, and from it on; a part of the page that the reader
can open has all of them."""


@dataclass(frozen=True)
class ComparedStrategy:
    """One case of the JSON, with its figures."""

    id: str
    """Id of its section in the page."""
    case: Mapping[str, Any]
    figures: list[PageFigure]
    around: list[Mapping[str, Any]]
    """The modules around the first one that differs."""

    @property
    def is_equal(self) -> bool:
        """Whether the strategy computes what one process does; the page shows the others first."""
        return self.case["verdict"] == "equal"

    @property
    def before(self) -> int:
        """How many modules come before those in ``around``."""
        return self.case["modules"].index(self.around[0]) if self.around else 0

    @property
    def behind(self) -> int:
        """How many modules come after those in ``around``."""
        return len(self.case["modules"]) - self.before - len(self.around)


def render_parity(found: Mapping[str, Any]) -> bytes:
    """The page, in UTF-8.

    Args:
        found: ``ParityReport.values()``.
    """
    figures = with_ids([figure for case in found["cases"] for figure in _figures(case)])
    rest = iter(figures)
    strategies = []
    for index, case in enumerate(found["cases"]):
        own = [next(rest) for _ in _figures(case)]
        strategies.append(ComparedStrategy(f"strategy-{index}", case, own, _around(case)))
    return render_page(
        "parity.html",
        figures,
        {"share": bar_share, "difference": shown, "bound": "{:.0e}".format, "exceeds": exceeds},
        found=found,
        strategies=strategies,
        labels=found["labels"],
        verdict=_verdict(found["cases"]),
        bound_share=f"{100 * _DECADES_BELOW / (_DECADES_BELOW + _DECADES_ABOVE):g}",
    )


def bar_share(worst: Mapping[str, Any]) -> str:
    """How much of its bar a difference fills, in percent, on a logarithmic scale."""
    value, limit = metric_value(worst["value"]) or 0.0, float(worst["limit"])
    if value <= 0:
        return "0"
    if not math.isfinite(value):
        return "100"
    decades = math.log10(value / limit) + _DECADES_BELOW
    return f"{min(100.0, max(2.0, 100 * decades / (_DECADES_BELOW + _DECADES_ABOVE))):.1f}"


def exceeds(worst: Mapping[str, Any]) -> bool:
    """Whether a difference is larger than its bound; one that is not a number counts as larger."""
    value = metric_value(worst["value"])
    return value is None or not value <= float(worst["limit"])


def shown(value: float | str) -> str:
    """A difference as text: ``1.2e-07``; ``0`` where both are equal to the last bit; ``∞`` if one is not a number."""
    number = metric_value(value)
    if number is None or not math.isfinite(number):
        return "∞"
    return f"{number:.1e}" if number else "0"


def _verdict(cases: Sequence[Mapping[str, Any]]) -> str:
    """The outcome in one sentence."""
    by_verdict = {verdict: sum(case["verdict"] == verdict for case in cases) for verdict in ("equal", "refused")}
    wrong = [case["name"] for case in cases if case["verdict"] in ("diverges", "crashed")]
    refused = f"; {by_verdict['refused']} cannot run here" if by_verdict["refused"] else ""
    if not wrong:
        many = f"All {by_verdict['equal']} strategies compute" if by_verdict["equal"] != 1 else "The strategy computes"
        return f"{many} what one process computes{refused}." if by_verdict["equal"] else "No strategy could run here."
    do_not = "does not" if len(wrong) == 1 else "do not"
    many = f"{len(wrong)} of {len(cases)} strategies {do_not} compute"
    return f"{many} what one process computes: {', '.join(wrong)}{refused}."


def _figures(case: Mapping[str, Any]) -> list[PageFigure]:
    """Three figures: loss, and gradient norm, each with the curves of the strategy and of one process; and the relative
    differences between those curves."""
    curves = case["curves"]
    if not curves:
        return []
    found = []
    for kind, (title, axis) in _FIGURES.items():
        own = curves[kind]
        traces = [
            PlottedCurve("one process", 7, False, own["steps"], _numbers(own["reference"]), width=6),
            PlottedCurve(curve_name(case["name"]), 1, False, own["steps"], _numbers(own["found"]), width=2),
        ]
        words = f"{title} of {case['name']} and of one process, by step: the largest relative difference is "
        found.append(PageFigure(title, axis, f"{words}{_largest(own)}, the bound {own['limit']:.0e}", traces))
    apart: list[PlottedCurve] = []
    said: list[str] = []
    for colour, (kind, (title, _)) in zip((1, 0), _FIGURES.items(), strict=True):
        own = curves[kind]
        differences = [value or None for value in _numbers(own["difference"])]
        apart.append(PlottedCurve(title.lower(), colour, False, own["steps"], differences, width=2))
        bound: list[float | None] = [significant(own["limit"])] * len(own["steps"])
        apart.append(
            PlottedCurve(f"{title.lower()}: bound", colour, False, own["steps"], bound, width=1.5, is_bound=True)
        )
        equal = sum(value == 0 for value in own["difference"])
        said.append(
            f"{title.lower()} {_largest(own)} at most, {equal} of {len(own['steps'])} steps equal to the last bit"
        )
    title = "Relative difference"
    found.append(PageFigure(title, "relative difference", f"{title} by step: {'; '.join(said)}", apart, True))
    return found


def _largest(curve: Mapping[str, Any]) -> str:
    values = [metric_value(value) for value in curve["difference"]]
    return shown(max((math.inf if value is None else value for value in values), default=0.0))


def _numbers(values: Sequence[float | str]) -> list[float | None]:
    """The values as numbers, with None for what is not a finite number."""
    numbers = [metric_value(value) for value in values]
    return [significant(number) if number is not None and math.isfinite(number) else None for number in numbers]


def _around(case: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    modules = case["modules"]
    first = next((place for place, module in enumerate(modules) if module["standing"] == FIRST), None)
    if first is None:
        return modules[: 2 * MODULES_AROUND]
    return modules[max(0, first - MODULES_AROUND) : first + MODULES_AROUND]
