"""Which of the places where the doctor reports trouble a test has brought to report it.

Importing this module watches every :class:`Finding` that is made in this process from then on.
"""

import ast
import sys
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import SkipTest

from drawbar import doctor
from drawbar.doctor import finding
from drawbar.doctor.finding import Finding

if TYPE_CHECKING:
    import pytest  # the tests' children need not wait for it

FOLDER = Path(doctor.__file__).parent
Site = tuple[str, int]
"""A module of the doctor and a line."""

seen: set[Site] = set()


def _watch() -> None:
    check = Finding.__post_init__

    @wraps(check)
    def checked(self: Finding) -> None:
        check(self)
        if self.is_trouble:
            frame = sys._getframe(2)  # beyond the generated __init__
            if frame.f_code is finding.problem_of.__code__ and frame.f_back is not None:
                frame = frame.f_back
            seen.add((Path(frame.f_code.co_filename).stem, frame.f_lineno))

    Finding.__post_init__ = checked  # type: ignore[method-assign]


_watch()


def sites(module: str) -> set[Site]:
    """Where ``module`` makes findings that may be trouble: all but those that are written down as OK or a note."""
    found = set()
    for node in ast.walk(ast.parse((FOLDER / f"{module}.py").read_text(encoding="utf-8"))):
        match node:
            case ast.Call(func=ast.Name("Finding"), args=[_, _, ast.Attribute(attr="OK" | "NOTE"), *_]):
                pass
            case ast.Call(func=ast.Name("Finding" | "problem_of")):
                found.add((module, node.lineno))
    return found


def check_all_were_caused(request: "pytest.FixtureRequest", *modules: str) -> None:
    """Fail where ``modules`` can report trouble that no earlier test of this file caused.

    Skips where not all tests of the file run.
    """
    if request.config.option.keyword or any("::" in argument for argument in request.config.args):
        raise SkipTest("not all tests of this file run")
    missing = set().union(*map(sites, modules)) - seen
    assert not missing, f"no test causes what is reported in {sorted(missing)}"
