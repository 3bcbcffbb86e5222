"""The versions that drawbar says it is tested with are those that it is tested with, and others are told."""

import logging
import re
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from drawbar.train.setup import warn_of_untested_versions
from drawbar.util import versions
from drawbar.util.versions import TESTED

ROOT = Path(__file__).parents[3]


def pins(file: str) -> dict[str, Version]:
    found = re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "constraints" / file).read_text(encoding="utf-8"), re.MULTILINE)
    return {canonicalize_name(name): Version(pinned) for name, pinned in found}


def floors() -> dict[str, Version]:
    """Of what the tests install: not of liger-kernel, which needs a GPU."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    (own,) = [Requirement(text) for text in extras["dev"] if Requirement(text).name == "drawbar"]
    texts = [*project["dependencies"], *(text for extra in {"dev", *own.extras} for text in extras[extra])]
    return {
        canonicalize_name(each.name): Version(next(one.version for one in each.specifier if one.operator == ">="))
        for each in map(Requirement, texts)
        if each.name != "drawbar"
    }


def test_the_oldest_are_what_the_package_asks_for_and_both_ends_are_pinned() -> None:
    oldest, newest = pins("oldest.txt"), pins("newest.txt")
    for library, (first, last) in TESTED.items():
        assert floors()[library] == Version(first) == oldest[library], library
        assert newest[library] == Version(last), library


def test_the_oldest_of_every_library_is_tested() -> None:
    oldest = pins("oldest.txt")
    for name, floor in floors().items():
        found = oldest[name]
        told = f"{name}: {found} is tested, and {floor} is asked for"
        assert (found.major, found.minor) == (floor.major, floor.minor), told


def test_what_runs_these_tests_is_tested() -> None:
    assert versions.untested_versions() == []


def test_a_library_that_nobody_tried_is_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found = Version(version("torch"))
    older = {**TESTED, "torch": ("1.0.0", "1.2.0"), "transformers": ("99.0", "99.1"), "peft": ("0.1.0", "0.1.0")}
    monkeypatch.setattr(versions, "TESTED", older)
    monkeypatch.setattr(versions, "installed", lambda name: None if name == "peft" else version(name))
    with caplog.at_level(logging.WARNING, "drawbar"):
        warn_of_untested_versions()
    (message,) = caplog.messages
    assert f"torch {found} (tested: 1.0.0 to 1.2.0), transformers" in message
    assert "peft" not in message


@pytest.mark.parametrize(
    ("found", "tested"), [("2.11.3", True), ("2.10.9", False), ("2.16.0.dev1", False), ("?", False)]
)
def test_patch_releases_do_not_count(found: str, tested: bool) -> None:
    assert versions.is_tested("torch", found) == tested
    assert versions.is_tested("numpy", found)
