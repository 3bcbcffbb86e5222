"""An allocation that exists already: ``salloc``, a shell in it (``srun --pty``), or a user's own batch script."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from drawbar.config.schema.run_config import RunConfig
from drawbar.errors import UserError
from drawbar.jobs.settings import ClusterSection
from drawbar.jobs.slurm.queries import count_gpus, slurm_output

OWN_JOB = "DRAWBAR_JOB"
"""Environment variable: set in the jobs that drawbar submits; a submit inside one makes a new job."""


@dataclass(frozen=True)
class Allocation:
    """What the Slurm job that this process is in has: its number, nodes, GPUs and CPUs."""

    job: str
    nodes: int
    gpus_per_node: int | None
    """Of the node that has fewest."""
    cpus_per_task: int | None
    """All CPUs that the allocation has on each node (on the one with the fewest): a node has one task, its launcher.
    Where Slurm does not tell a node's CPUs, ``SLURM_CPUS_PER_TASK`` of the allocation (see ``_cpus_per_node``)."""
    uneven: str = ""
    """How many GPUs each node has, where these are not equally many."""

    @staticmethod
    def here(environ: Mapping[str, str] = os.environ) -> "Allocation | None":
        """The allocation that this process is in; None if it is in none, or in a job that drawbar submitted."""
        job = environ.get("SLURM_JOB_ID")
        if not job or environ.get(OWN_JOB) == job:
            return None
        gpus = _gpus_of_job(job)  # salloc --gres=gpu:8 sets no variable that says it
        return Allocation(
            job,
            _number(environ.get("SLURM_JOB_NUM_NODES") or environ.get("SLURM_NNODES")) or 1,
            # a number; or a type and a number, such as a100:4
            min(gpus.values(), default=0)
            or _number(environ.get("SLURM_GPUS_ON_NODE"))
            or _number(environ.get("SLURM_GPUS_PER_NODE")),
            _cpus_per_node(environ),
            ", ".join(f"{name} has {count}" for name, count in gpus.items()) if len(set(gpus.values())) > 1 else "",
        )

    def fit(self, config: RunConfig, is_given: bool) -> ClusterSection:
        """The section ``cluster`` for a run in this allocation, which fills in what is left open. A run on the CPU
        leaves the GPUs alone.

        Args:
            is_given: whether ``cluster.nodes`` was chosen, and is not only the default.

        Raises:
            UserError: it asks for more nodes than there are, or the nodes have different numbers of GPUs.
        """
        cluster = ClusterSection.of(config)
        if is_given and cluster.nodes > self.nodes:
            raise UserError(
                f"the run asks for {cluster.nodes} nodes, but the allocation {self.job} has {self.nodes}",
                where="cluster.nodes",
                remedy=f"submit with --nodes {self.nodes}; or `exit` the allocation, and submit a job of its own",
            )
        if self.uneven and cluster.gpus_per_node is None and config.has_process_per_gpu:
            raise UserError(
                f"each node must run as many processes as the others, but the numbers of GPUs differ: {self.uneven}",
                where=f"the allocation {self.job}",
                remedy=f"set cluster.gpus_per_node={self.gpus_per_node}",
            )
        found = {
            "nodes": cluster.nodes if is_given else self.nodes,
            "gpus_per_node": cluster.gpus_per_node or (None if config.device == "cpu" else self.gpus_per_node),
            "cpus_per_task": cluster.cpus_per_task or self.cpus_per_task,
            "requeue": False,
        }
        return cluster.model_copy(update=found)


def _gpus_of_job(job: str) -> dict[str, int]:
    """How many GPUs a job has on each node that has any; empty if Slurm does not say."""
    text = slurm_output("scontrol", "show", "job", "--details", "--oneliner", job) or ""
    found = re.findall(r"\bNodes=(\S+) CPU_IDs=\S+ Mem=\S+ GRES=(\S*)", text)
    return {nodes: count for nodes, resources in found if (count := count_gpus(resources))}


def _cpus_per_node(environ: Mapping[str, str]) -> int | None:
    """All CPUs of the node that has fewest: ``72(x2),36`` → 36. Those of one task, SLURM_CPUS_PER_TASK, where Slurm
    does not tell them, or SLURM_HINT or threads per core are set."""
    counts = re.findall(r"(?:^|,)(\d+)", environ.get("SLURM_JOB_CPUS_PER_NODE", ""))
    if not counts or "SLURM_HINT" in environ or "SLURM_THREADS_PER_CORE" in environ:
        return _number(environ.get("SLURM_CPUS_PER_TASK"))
    return min(map(int, counts))


def _number(text: str | None) -> int | None:
    found = re.search(r"([0-9]+)$", text or "")
    return int(found[1]) if found and int(found[1]) > 0 else None
