"""Changes that make a run fit, the cheapest first."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from drawbar.config.schema.run_config import RunConfig
from drawbar.errors import UserError
from drawbar.plan.run_forecast import Forecaster, RunForecast

SEARCH_SECONDS = 300.0
"""After this time, no further change is tried."""
MAX_SUGGESTIONS = 3
"""The largest number of suggestions."""

Overrides = Mapping[str, Any]
"""Settings by their full names."""


@dataclass(frozen=True)
class Suggestion:
    """Overrides with which the run fits."""

    overrides: Overrides
    forecast: RunForecast

    @property
    def text(self) -> str:
        """As on a command line."""
        return " ".join(f"{key}={_written(value)}" for key, value in self.overrides.items())


def suggest(forecaster: Forecaster, config: RunConfig, found: RunForecast) -> list[Suggestion]:
    """Up to three ways to make a run fit: single changes, from the cheapest on; or, if none is enough, as many of them
    together as it takes.

    Args:
        found: what the run takes as it is.
    """
    end = time.monotonic() + SEARCH_SECONDS
    single: list[Suggestion] = []
    together: dict[str, Any] = {}
    changes = list(_changes(forecaster.resolve(config), found))
    for change in changes:
        if len(single) < MAX_SUGGESTIONS and (suggestion := _try(forecaster, config, change, end)):
            single.append(suggestion)
    if single:
        return single
    for change in changes:
        together |= change
        if suggestion := _try(forecaster, config, together, end):
            return [_without_needless(forecaster, config, suggestion, end)]
    return []


def with_overrides(config: RunConfig, overrides: Overrides) -> RunConfig:
    """The configuration with some settings of its sections changed."""
    for key, value in overrides.items():
        section, _, name = key.partition(".")
        changed = getattr(config, section).model_copy(update={name: value})
        config = config.model_copy(update={section: changed})
    return config


def _changes(config: RunConfig, found: RunForecast) -> Iterator[dict[str, Any]]:
    """Changes that lower the peak, from the one that slows training least to the one that slows it most."""
    parallel, rank = config.parallel, found.largest
    ranks = found.machine.ranks
    has_engine = config.strategy.has_engine
    if getattr(config.task, "cross_entropy", None) == "plain":
        yield {"task.cross_entropy": "chunked"}
    smaller = [rows for rows in _divisors(rank.rows) if rows < rank.rows]
    if smaller and config.train.micro_batch_tokens is not None:
        target_length = getattr(config.task, "target_length", None) or 0
        yield {"train.micro_batch_tokens": max(config.data.sequence_length, target_length)}
    elif smaller:
        yield {"train.micro_batch": smaller[-1]}
        if len(smaller) > 1:
            yield {"train.micro_batch": 1}
    if ranks > 1 and not parallel.features.shards_parameters and not has_engine:
        yield {"parallel.strategy": "fsdp"}
    if config.optim.name == "adamw" and config.optim.state_dtype == "fp32" and not has_engine:
        yield {"optim.state_dtype": "bf16"}
    if parallel.activation_checkpointing in ("none", "attention", "selective"):
        yield {"parallel.activation_checkpointing": "full"}
    data = ranks // parallel.model_ranks
    for degree in (2, 4, 8):
        if parallel.tensor == 1 and data % degree == 0 and degree <= found.machine.ranks_per_node and not has_engine:
            yield {"parallel.strategy": "fsdp", "parallel.tensor": degree}
    if not parallel.offload and not has_engine:
        yield {"parallel.strategy": "fsdp", "parallel.offload": True}


def _try(forecaster: Forecaster, config: RunConfig, overrides: Overrides, end: float) -> Suggestion | None:
    """The overrides as a suggestion if the run fits with them; None if it does not, cannot run with them, or time is
    over."""
    left = end - time.monotonic()
    if left <= 0:
        return None
    try:
        forecast = forecaster.forecast(with_overrides(config, overrides), "a change", left)
    except UserError:
        return None
    return Suggestion(dict(overrides), forecast) if forecast.fits else None


def _without_needless(forecaster: Forecaster, config: RunConfig, suggestion: Suggestion, end: float) -> Suggestion:
    """The suggestion without the overrides that it does not need; those that slow training most are left out first."""
    for key in reversed(list(suggestion.overrides)):
        rest = {name: value for name, value in suggestion.overrides.items() if name != key}
        if rest and (smaller := _try(forecaster, config, rest, end)):
            suggestion = smaller
    return suggestion


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _written(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
