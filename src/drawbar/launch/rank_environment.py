"""Environment variables that drawbar's launcher sets for ranks, besides those of torch's and of the node check."""

import os

from drawbar.distributed.watchdog import LAUNCHER
from drawbar.threads import usable_cores
from drawbar.util.torch_imports import silence_ranks

STATUS_VARIABLE = "DRAWBAR_STATUS_FILE"
"""Environment variable: where a node's first rank leaves its exit code for the launcher."""


def become_launcher(nproc: int) -> None:
    """Tell the ranks that this process is their launcher, and how many threads each uses if the user sets no number:
    the ranks share the cores that this process may use."""
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // nproc)))
    silence_ranks()
    os.environ[LAUNCHER] = str(os.getpid())
