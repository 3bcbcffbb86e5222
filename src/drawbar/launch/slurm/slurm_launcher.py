"""``SlurmLauncher``: jobs of a Slurm cluster, in its queue or in an allocation that exists already."""

import os
import sys
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path

from drawbar.config.schema.cluster_section import ClusterSection
from drawbar.config.schema.run_config import RunConfig
from drawbar.launch.job import Job, processes_per_node
from drawbar.launch.job_container import check_image
from drawbar.launch.jobs.job_status import RUNNING, JobStatus, wait_for_ends
from drawbar.launch.jobs.records import JobRecord
from drawbar.launch.launcher import Launcher, ResolvedCluster, Submitted
from drawbar.launch.slurm.allocation import Allocation
from drawbar.launch.slurm.batch_script import log_path, render
from drawbar.launch.slurm.cpus import few_cpus, with_cpus
from drawbar.launch.slurm.obstacles import check_slurm
from drawbar.launch.slurm.queue import scancel
from drawbar.launch.slurm.sbatch import sbatch
from drawbar.launch.slurm.slurm_status import slurm_status

_END_SECONDS = 60
"""How long Slurm may take to end a job that it kills."""


class SlurmLauncher(Launcher):
    """Submits batch scripts, and starts runs inside of allocations."""

    has_sweeps = True
    has_snapshots = True

    @cached_property
    def _allocation(self) -> Allocation | None:
        return Allocation.here()

    def allocation(self) -> str | None:
        return None if self._allocation is None else self._allocation.job

    def resolve_cluster(self, config: RunConfig, is_set: Callable[[str], bool], again: bool) -> ResolvedCluster:
        if self._allocation is not None:
            cluster = self._allocation.fit(config, is_set("cluster.nodes"))
            return ResolvedCluster(cluster, tuple(few_cpus(cluster, processes_per_node(config, cluster))))
        cluster = config.cluster or ClusterSection()
        if again and not (is_set("cluster.options") or is_set("cluster.options.dependency")):
            cluster = _without_dependency(cluster)
        cluster, notes = with_cpus(cluster, processes_per_node(config, cluster))
        return ResolvedCluster(cluster, tuple(notes))

    def check(self, job: Job) -> list[str]:
        return check_slurm(job) if job.allocation is None else []

    def render(self, job: Job) -> str:
        return render(job)

    def log_path(self, job: Job, number: str) -> Path:
        return log_path(job, number)

    def submit(self, job: Job, script: str) -> Submitted:
        if job.allocation is not None:
            return Submitted(job.allocation, lambda begun: _become(job, script, begun))
        if job.container is not None:
            check_image(job.container)
        return Submitted(sbatch(script, job.folder))

    def status(self, records: Sequence[JobRecord]) -> list[JobStatus]:
        return slurm_status(records)

    def cancel(self, jobs: Sequence[JobStatus], grace: float) -> None:
        running = [job.record for job in jobs if job.state == RUNNING]
        scancel([job.record.number for job in jobs if job.record not in running])
        # signal the batch script first: when the ranks have saved, it must know not to requeue the job. A plain
        # scancel would leave the ranks no more than Slurm's KillWait to save
        scancel([record.number for record in running], "--batch", "--signal=TERM")
        scancel([record.number for record in running], "--signal=TERM")
        left = wait_for_ends(self.status, running, grace)
        for record in left:
            print(f"job {record.number}: has not ended within {grace:.0f}s; Slurm ends it now", file=sys.stderr)
        scancel([record.number for record in left])
        wait_for_ends(self.status, left, _END_SECONDS)


def _without_dependency(cluster: ClusterSection) -> ClusterSection:
    """The section without the dependency on other jobs, which Slurm may not know any more."""
    options = {name: value for name, value in cluster.options.items() if name != "dependency"}
    return cluster.model_copy(update={"options": options})


def _become(job: Job, script: str, begun: Callable[[], None]) -> int:
    """Become the script, in the allocation: this process ends with the exit code of the run."""
    job.folder.mkdir(parents=True, exist_ok=True)
    file = job.folder / f"job-{job.allocation}.sh"
    file.write_text(script, encoding="utf-8", errors="surrogateescape")
    begun()
    sys.stdout.flush()
    sys.stderr.flush()
    os.execvp("bash", ["bash", str(file)])
