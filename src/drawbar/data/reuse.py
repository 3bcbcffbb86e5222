"""Why encoded samples are taken from the cache, or made anew."""

import json
from collections.abc import Mapping
from pathlib import Path

from drawbar.data.cache import META, entry_folder

SHOWN_CHANGES = 5
_WHAT_IT_IS_ABOUT = {"the records", "task.type"}
"""Parts that differ between two jobs; where few others do, somebody has changed one job."""


def is_kept(cache: Path, name: str, made_of: Mapping[str, str]) -> bool:
    """Whether the cache has these samples."""
    return (entry_folder(cache, name, made_of) / META).is_file()


def why_not_kept(cache: Path, name: str, made_of: Mapping[str, str]) -> str | None:
    """What is not as it was when the samples were encoded that the cache has of this name: of those most like these.
    None where all of them are another job's, of which these are no changed version."""
    changes = [_changes(kept, made_of) for kept in _kept(cache, name)]
    if not changes:
        return f"no {name} data are kept in {cache}"
    changes = [changed for changed in changes if not _is_another_job(changed)]
    if not changes:
        return None
    fewest = min(changes, key=len)
    shown = ", ".join(fewest[:SHOWN_CHANGES])
    more = f" and {len(fewest) - SHOWN_CHANGES} more" if len(fewest) > SHOWN_CHANGES else ""
    return f"changed since those that are kept: {shown}{more}"


def _kept(cache: Path, name: str) -> list[dict[str, str]]:
    """What the entries of the cache are made of."""
    found = []
    for path in cache.glob(f"{name}-*/{META}"):
        try:
            found.append(dict(json.loads(path.read_text())["made_of"]))
        except (OSError, ValueError, KeyError, TypeError):  # removed just now, damaged, or of another version
            continue
    return found


def _is_another_job(changed: list[str]) -> bool:
    return len(changed) > SHOWN_CHANGES and not _WHAT_IT_IS_ABOUT.isdisjoint(changed)


def _changes(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    return [name for name in [*new, *(name for name in old if name not in new)] if old.get(name) != new.get(name)]
