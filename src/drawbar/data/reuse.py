"""Explains a cache miss: which inputs differ from the cached samples."""

import json
from collections.abc import Mapping
from pathlib import Path

from drawbar.data.cache import META, entry_folder

SHOWN_CHANGES = 5
_IDENTIFYING_INPUTS = {"the records", "task.type"}
"""Inputs that differ between unrelated runs; runs that differ in at most five inputs are related anyway."""

_IN_WORDS = {"the task's facts": "the dataset metadata"}
"""Names as messages show them, where an older name must stay in the cache keys."""


def is_cached(cache: Path, name: str, inputs: Mapping[str, str]) -> bool:
    """Whether the cache has these samples."""
    return (entry_folder(cache, name, inputs) / META).is_file()


def explain_cache_miss(cache: Path, name: str, inputs: Mapping[str, str]) -> str | None:
    """What differs from the most similar cached samples of this name, as a text for the log.
    None if all cached samples of this name seem to belong to unrelated runs."""
    changes = [_changes(kept, inputs) for kept in _cached_entries(cache, name)]
    if not changes:
        return f"no {name} data are kept in {cache}"
    changes = [changed for changed in changes if not _is_unrelated_run(changed)]
    if not changes:
        return None
    fewest = min(changes, key=len)
    shown = ", ".join(_IN_WORDS.get(name, name) for name in fewest[:SHOWN_CHANGES])
    more = f" and {len(fewest) - SHOWN_CHANGES} more" if len(fewest) > SHOWN_CHANGES else ""
    return f"changed since those that are kept: {shown}{more}"


def _cached_entries(cache: Path, name: str) -> list[dict[str, str]]:
    """The inputs of the cache's entries."""
    found = []
    for path in cache.glob(f"{name}-*/{META}"):
        try:
            found.append(dict(json.loads(path.read_text())["made_of"]))
        except (OSError, ValueError, KeyError, TypeError):  # removed just now, damaged, or of another version
            continue
    return found


def _is_unrelated_run(changed: list[str]) -> bool:
    return len(changed) > SHOWN_CHANGES and not _IDENTIFYING_INPUTS.isdisjoint(changed)


def _changes(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    return [name for name in [*new, *(name for name in old if name not in new)] if old.get(name) != new.get(name)]
