"""Checks that a process without RANK and WORLD_SIZE really is the only one of its run."""

import os
import shlex
import sys
from collections.abc import Mapping

from drawbar.errors import UserError

_MPI_SIZES = ("OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
"""Variables set by MPI launchers. Not PMI_SIZE, which Slurm's srun also sets."""
_TASKS = "SLURM_STEP_NUM_TASKS"
"""Set by srun in its tasks, but not in batch scripts. Not SLURM_NTASKS, which counts the tasks of the job."""


def refuse_unconnected_processes(environ: Mapping[str, str] = os.environ) -> None:
    """Check that this is the only process of its run, unless torchrun or drawbar set RANK.

    Raises:
        UserError: MPI or srun started several, and each would train alone.
    """
    if "RANK" in environ or "WORLD_SIZE" in environ:
        return
    for name in _MPI_SIZES:
        if environ.get(name, "1") != "1":
            raise UserError(
                f"MPI started {environ[name]} processes, but RANK and WORLD_SIZE are not set",
                where=f"the environment: {name}={environ[name]}",
                remedy="start them with torchrun, or with the deepspeed launcher without --launcher",
            )
    tasks = environ.get(_TASKS, "1")
    if tasks != "1":
        config = next((word for word in sys.argv[2:] if "=" not in word and not word.startswith("-")), "CONFIG")
        raise UserError(
            f"srun started {tasks} tasks, each of which would be a separate run",
            where=f"the environment: {_TASKS}={tasks}",
            remedy=f"`drawbar submit {shlex.quote(config)} --to slurm` starts and connects the processes, also inside "
            "an allocation; or start one task (srun --nodes=1 --ntasks=1) with launch.nproc=N",
        )
