"""An allocation that exists already: ``salloc``, a shell in it (``srun --pty``), or a user's own batch script."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from drawbar.config.cluster import ClusterSection
from drawbar.errors import UserError

OWN_JOB = "DRAWBAR_JOB"
"""Environment variable: set in the jobs that drawbar submits, in which a further submit means a further job."""


@dataclass(frozen=True)
class Allocation:
    """The part of Slurm's job that this process is in."""

    job: str
    nodes: int
    gpus_per_node: int | None
    cpus_per_task: int | None

    @staticmethod
    def here(environ: Mapping[str, str] = os.environ) -> "Allocation | None":
        """None outside of one, and inside a job that drawbar submitted."""
        job = environ.get("SLURM_JOB_ID")
        if not job or environ.get(OWN_JOB) == job:
            return None
        return Allocation(
            job,
            _number(environ.get("SLURM_JOB_NUM_NODES") or environ.get("SLURM_NNODES")) or 1,
            # a number; or a type and a number, such as a100:4
            _number(environ.get("SLURM_GPUS_ON_NODE")) or _number(environ.get("SLURM_GPUS_PER_NODE")),
            _number(environ.get("SLURM_CPUS_PER_TASK")),
        )

    def fit(self, cluster: ClusterSection, is_given: bool, device: str) -> ClusterSection:
        """The section for a run in here; what it leaves open is as the allocation has it.

        Args:
            is_given: whether ``cluster.nodes`` was chosen, and is not only the default.
            device: the setting: a run on the CPU leaves the GPUs alone.

        Raises:
            UserError: it asks for more nodes than there are.
        """
        if is_given and cluster.nodes > self.nodes:
            raise UserError(
                f"the run asks for {cluster.nodes} nodes, but the allocation {self.job} has {self.nodes}",
                where="cluster.nodes",
                remedy=f"submit with --nodes {self.nodes}; or `exit` the allocation, and submit a job of its own",
            )
        found = {
            "nodes": cluster.nodes if is_given else self.nodes,
            "gpus_per_node": cluster.gpus_per_node or (None if device == "cpu" else self.gpus_per_node),
            "cpus_per_task": cluster.cpus_per_task or self.cpus_per_task,
            "requeue": False,
        }
        return cluster.model_copy(update=found)


def _number(text: str | None) -> int | None:
    found = re.search(r"([0-9]+)$", text or "")
    return int(found[1]) if found and int(found[1]) > 0 else None
