"""Programs that some tests need and pip cannot bring, and the Debian packages that have them; and libraries of extras.

A test that lacks one is skipped, and says what to install. Where everything is meant to be tested, as on CI, a skip
would hide that nothing was: there ``DRAWBAR_REQUIRE_PROGRAMS=1`` turns it into a failure.
"""

import importlib.util
import os
import shutil
from typing import NoReturn

import pytest

REQUIRE = "DRAWBAR_REQUIRE_PROGRAMS"
PACKAGES = {
    "munged": "munge",
    "slurmctld": "slurm-wlm",
    "slurmd": "slurm-wlm",
    "sbatch": "slurm-wlm",
    "srun": "slurm-wlm",
    "scontrol": "slurm-wlm",
    "squeue": "slurm-wlm",
    "scancel": "slurm-wlm",
    "sinfo": "slurm-wlm",
    "sshd": "openssh-server",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "shellcheck": "shellcheck",
    "chromium": "chromium",
    "gcc": "build-essential",  # with the headers of C
    "zsh": "zsh",
    "fish": "fish",
}


def need_programs(*programs: str) -> None:
    """Skip this test, or fail it where :data:`REQUIRE` is set, unless all ``programs`` are installed."""
    missing = [name for name in programs if shutil.which(name, path=search_path()) is None]
    if not missing:
        return
    packages = sorted({PACKAGES[name] for name in missing})
    lacks(f"no {', '.join(missing)} here: apt-get install --no-install-recommends {' '.join(packages)}")


def need_library(name: str, extra: str) -> None:
    """As :func:`need_programs`, for a library that an extra of drawbar brings."""
    if importlib.util.find_spec(name) is None:
        lacks(f"no {name} here: pip install -c constraints.txt 'drawbar[{extra}]'")


def lacks(reason: str) -> NoReturn:
    if os.environ.get(REQUIRE) == "1":
        pytest.fail(f"{REQUIRE} is set, and there is {reason}", pytrace=False)
    pytest.skip(reason)


def search_path() -> str:
    """``PATH``, and where Debian puts daemons, which is not on an ordinary user's."""
    return os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
