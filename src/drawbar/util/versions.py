"""The versions of libraries that drawbar is tested with."""

from functools import cache
from importlib.metadata import PackageNotFoundError, version

from packaging.version import InvalidVersion, Version

TESTED = {
    "torch": ("2.11.0", "2.15.0"),
    "transformers": ("5.17.0", "5.24.0"),
    "deepspeed": ("0.19.8", "0.19.8"),
    "peft": ("0.19.0", "0.21.2"),
    "torchao": ("0.18.0", "0.18.0"),
}
"""Of the libraries whose insides drawbar knows: the oldest and the newest version, by ``make test-oldest`` and
``make test-newest``."""


@cache  # a search reads the metadata of the package
def installed(library: str) -> str | None:
    """Its version; None where it is not installed."""
    try:
        return version(library)
    except PackageNotFoundError:
        return None


def is_tested(library: str, found: str) -> bool:
    """Whether this version is in the range of ``TESTED``, if the library is there. Patch releases do not count."""
    first, last = TESTED.get(library, (found, found))
    return _minor(first) <= _minor(found) <= _minor(last)


def untested_versions() -> list[str]:
    """``torch 2.17.1 (tested: 2.11.0 to 2.15.0)`` for each installed library that is older or newer."""
    return [
        f"{library} {found} (tested: {first} to {last})"
        for library, (first, last) in TESTED.items()
        if (found := installed(library)) and not is_tested(library, found)
    ]


def _minor(text: str) -> tuple[int, int]:
    """Major and minor number; (0, 0), which is older than all, for what is no version."""
    try:
        parsed = Version(text)
    except InvalidVersion:
        return 0, 0
    return parsed.major, parsed.minor
