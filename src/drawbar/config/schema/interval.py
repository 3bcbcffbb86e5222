"""Lengths of time in settings: ``90s``, ``30min``, ``2h``, ``1d``."""

from typing import Annotated

from drawbar.config.schema.section import text_of

_SECONDS = {"s": 1, "min": 60, "h": 3600, "d": 86400}

Interval = Annotated[str, text_of("a number and a unit: 90s, 30min, 2h or 1d", rf"^[1-9][0-9]*({'|'.join(_SECONDS)})$")]


def interval_seconds(interval: str) -> int:
    """The seconds of an ``Interval``."""
    unit = interval.lstrip("0123456789")
    return int(interval.removesuffix(unit)) * _SECONDS[unit]
