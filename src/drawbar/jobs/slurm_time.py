"""Times as Slurm writes them: ``2-12:00:00``, ``12:00:00``, ``30:00`` (minutes and seconds) or ``90`` (minutes)."""

import re

_SIXTY = "[0-5]?[0-9]"
_TIME = re.compile(rf"[0-9]+-(2[0-3]|[01]?[0-9])(:{_SIXTY}){{0,2}}|[0-9]+(:{_SIXTY}){{0,2}}")


def check_time(text: str) -> str:
    """The text. Raises ValueError where it is no time, or one such as 99:99:99, which Slurm takes and nobody means."""
    if not _TIME.fullmatch(text):
        raise ValueError(
            "expected a time such as 12:00:00 (hours, minutes, seconds), 2-12 (days, hours) or 90 (minutes), "
            f"with less than 60 minutes in an hour, and less than 24 hours in a day, got {text!r}"
        )
    return text


def parse_time(text: str) -> int | None:
    """A time in seconds; None for ``UNLIMITED`` and the like."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if match is None:
        return None
    days, *clock = match.groups()
    parts = [int(part) for part in clock if part is not None]
    if days is not None:
        parts += [0] * (3 - len(parts))
    elif len(parts) < 3:  # minutes, minutes:seconds
        parts = [0, *parts, *[0] * (2 - len(parts))]
    return ((int(days or 0) * 24 + parts[0]) * 60 + parts[1]) * 60 + parts[2]


def write_time(seconds: int) -> str:
    """``2-12:00:00``, as Slurm writes it."""
    days, rest = divmod(seconds, 86400)
    return f"{f'{days}-' if days else ''}{rest // 3600:02}:{rest // 60 % 60:02}:{rest % 60:02}"
