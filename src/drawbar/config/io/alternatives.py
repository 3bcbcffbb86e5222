"""Settings that say the same in different ways: what the command line says takes the place of what a file says."""

from typing import Any

from drawbar.config.io.fields import show
from drawbar.config.io.source import DEFAULT, Origin, Settings

_SPLITS = ("train", "validation", "test")
ALTERNATIVES: tuple[tuple[str, ...], ...] = (
    ("train.steps", "train.epochs"),
    ("train.micro_batch", "train.micro_batch_tokens"),
    ("data.validation", "data.validation_share"),
    *(tuple(f"data.{split}.{form}" for form in ("files", "parallel", "dataset")) for split in _SPLITS),
)
"""Of each of these, one at most is set. The default of each leaves the matter to the others."""


def replace_alternatives(settings: Settings) -> None:
    """Where the command line sets one of several alternatives, drop the others that it does not set itself, and note
    it. Both in one place stay, and are refused."""
    for keys in ALTERNATIVES:
        chosen = [key for key in keys if _value(settings, key) not in (None, [], "auto")]
        given = [key for key in chosen if _origin(settings, key).argument is not None]
        for old in [key for key in chosen if key not in given] if given else ():
            new = given[0]
            settings.notes.append(
                f"{new}={show(_value(settings, new))} ({_origin(settings, new)}) takes the place of "
                f"{old}={show(_value(settings, old))} ({_origin(settings, old)})"
            )
            section, _, name = old.rpartition(".")
            del _value(settings, section)[name]
            for known in [known for known in settings.origins if f"{known}.".startswith(f"{old}.")]:
                del settings.origins[known]


def _origin(settings: Settings, key: str) -> Origin:
    """Of a section that was not given as a whole: that of the first of its keys."""
    inside = (origin for known, origin in settings.origins.items() if known.startswith(f"{key}."))
    return settings.origins.get(key) or next(inside, DEFAULT)


def _value(settings: Settings, key: str) -> Any:
    found: Any = settings.values
    for name in key.split("."):
        found = found.get(name) if isinstance(found, dict) else None
    return found
