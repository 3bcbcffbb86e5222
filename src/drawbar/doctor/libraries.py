"""Versions, and whether they are those that drawbar is made for."""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion

from drawbar.doctor.finding import Finding, Fix, Level
from drawbar.util.versions import TESTED, is_tested

SECTION = "Libraries"
SHOWN = ("torch", "transformers", "deepspeed", "peft")
"""Named with their versions where they fit; the others are then counted, and named where they are missing or do not
fit."""
EXTRAS = ("deepspeed", "fp8", "lora", "object-store")
INSTALL = {"deepspeed": "DS_BUILD_OPS=0 pip install --no-build-isolation 'deepspeed{range}'"}


@dataclass(frozen=True)
class Library:
    """Facts of one."""

    name: str
    version: str | None
    """None where it is not installed."""
    range: str
    """``>=2.11``; empty for any."""
    extra: str
    """The extra of drawbar that needs it; empty for what every run needs."""
    fits: bool


def collect_libraries() -> list[Library]:
    """drawbar and the packages that its metadata require: those of every run and those of the extras in ``EXTRAS``."""
    found = [_look(Library("drawbar", None, "", "", True), None)]
    for text in requires("drawbar") or []:
        requirement = Requirement(text)
        extras = [extra for extra in EXTRAS if requirement.marker and requirement.marker.evaluate({"extra": extra})]
        if requirement.marker and not extras and not requirement.marker.evaluate({"extra": ""}):
            continue
        wanted = Library(requirement.name, None, str(requirement.specifier), "".join(extras[:1]), True)
        found.append(_look(wanted, requirement))
    return found


def _look(library: Library, requirement: Requirement | None) -> Library:
    try:
        installed = version(canonicalize_name(library.name))
    except PackageNotFoundError:
        return library
    try:
        fits = requirement is None or requirement.specifier.contains(installed, prereleases=True)
    except InvalidVersion:
        fits = False
    return Library(library.name, installed, library.range, library.extra, fits)


def check_libraries(libraries: list[Library], needed: Mapping[str, str]) -> Iterator[Finding]:
    """Args: needed: the setting that needs an extra, by the extra's name."""
    fitting = 0
    for library in libraries:
        wanted = f"drawbar wants {library.name}{library.range}"
        install = f"{sys.executable} -m pip install '{library.name}{library.range}'"
        if library.name in INSTALL:
            install = INSTALL[library.name].format(range=library.range)
        is_needed = not library.extra or library.extra in needed
        why = f"{needed[library.extra]} needs it" if library.extra in needed else ""
        if library.version is None and is_needed:
            yield Finding(SECTION, library.name, Level.PROBLEM, "not installed", why or wanted, Fix(install))
        elif library.version is None:
            yield Finding(SECTION, library.name, Level.OK, f"not installed; only the extra {library.extra} needs it")
        elif not library.fits:
            level = Level.PROBLEM if is_needed else Level.WARNING
            yield Finding(SECTION, library.name, level, f"{library.version}, but {wanted}", why, Fix(install))
        elif library.version and not is_tested(library.name, library.version):
            newest = TESTED[library.name][1]
            told = f"{library.version}: drawbar is tested up to {newest}"
            fix = Fix(f"{sys.executable} -m pip install '{library.name}<={newest}'", "should something fail")
            yield Finding(SECTION, library.name, Level.WARNING, told, "", fix)
        elif library.name in SHOWN or not library.range:
            yield Finding(SECTION, library.name, Level.OK, f"{library.version}", library.range and wanted)
        else:
            fitting += 1
    if fitting:
        yield Finding(SECTION, "others", Level.OK, f"{fitting} more, all in the ranges that drawbar wants")
