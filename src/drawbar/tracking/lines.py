"""Formats numbers and lines for people to read."""

import math
from collections.abc import Mapping


def duration(seconds: float) -> str:
    """``45s``, ``1m12s``, ``1h02m``, ``2d03h``: the two largest units, rounded to the nearest second."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d{hour:02d}h"
    if hours:
        return f"{hours}h{minute:02d}m"
    if minutes:
        return f"{minutes}m{second:02d}s"
    return f"{second}s"


def number(value: float) -> str:
    """``18,204``, ``4.321``, ``1.2e-05``, ``3.1e+17``: as many digits as can be read at a glance."""
    if 1e15 <= abs(value) < math.inf:
        return f"{value:.1e}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    if abs(value) >= 0.01 or value == 0:
        return f"{value:.3f}"
    return f"{value:.1e}"


def step_of_total(step: int, total_steps: int | None) -> str:
    """``step 20/500``, or ``step 20`` if the total is unknown."""
    return f"step {step:,}" if total_steps is None else f"step {step:,}/{total_steps:,}"


def speed(values: Mapping[str, float | None]) -> str | None:
    """``18,204 tok/s``, from the ``train/`` metrics of a step; ``samples/s`` if samples have no tokens."""
    for unit, name in (("tok/s", "train/tokens_per_second"), ("samples/s", "train/samples_per_second")):
        if (found := values.get(name)) is not None:
            return f"{found:,.0f} {unit}"
    return None


def time_left(seconds: float | None) -> str | None:
    """``1m12s left``; None if it is unknown, or nothing is left."""
    return f"{duration(seconds)} left" if seconds else None


def join(*parts: str | None) -> str:
    """Join the parts that are not empty, two spaces apart."""
    return "  ".join(part for part in parts if part)


def log_line(step: int, total_steps: int | None, values: Mapping[str, float]) -> str:
    """The most important ``train/`` metrics, in under 80 columns; the metric files have all of them."""
    shown = {name.removeprefix("train/"): value for name, value in values.items()}
    return join(
        step_of_total(step, total_steps),
        f"loss {number(shown['loss'])}" if "loss" in shown else None,
        f"lr {shown['lr']:.1e}" if "lr" in shown else None,
        f"grad_norm {shown['grad_norm']:.2f}" if "grad_norm" in shown else None,
        f"skipped {shown['skipped']:.0f}" if shown.get("skipped") else None,
        speed(values),
        f"mfu {shown['mfu']:.1%}" if "mfu" in shown else None,
    )


def evaluation_line(step: int, total_steps: int | None, values: Mapping[str, float]) -> str:
    """``step 200/500  validation  loss 3.912  perplexity 50.000``, from ``eval/<split>/<score>``."""
    parts: list[str] = []
    for name, value in values.items():
        split, _, score = name.removeprefix("eval/").rpartition("/")
        if split not in parts:
            parts.append(split)
        parts.append(f"{score} {number(value)}")
    return join(step_of_total(step, total_steps), *parts)


def phase_line(name: str, done: int, total: int) -> str:
    """``evaluating 45/120 (38%)``."""
    share = done / total if total else 1.0
    return f"{name} {done:,}/{total:,} ({share:.0%})"
