"""``SlurmLauncher``: jobs of a Slurm cluster, in its queue or in an allocation that exists already."""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path

from drawbar.config.schema.run_config import RunConfig
from drawbar.errors import ExitCode, UserError
from drawbar.jobs.job import Job, processes_per_node
from drawbar.jobs.job_container import check_image
from drawbar.jobs.launcher import Launcher, ResolvedCluster, Submitted
from drawbar.jobs.records import (
    COMPLETED,
    FAILED,
    LOST,
    PENDING,
    RUNNING,
    STOPPED,
    JobEnd,
    JobRecord,
    JobStatus,
    explain,
    state_of_code,
    status_from_files,
    wait_for_ends,
)
from drawbar.jobs.settings import ClusterSection
from drawbar.jobs.slurm.allocation import Allocation
from drawbar.jobs.slurm.batch_script import log_path, render
from drawbar.jobs.slurm.obstacles import check_slurm, fitting_nodes
from drawbar.jobs.slurm.queries import (
    QueueEntry,
    check_configured,
    lost_nodes,
    read_nodes,
    read_partitions,
    read_queue,
    scancel,
)


def sbatch(script: str) -> str:
    """Give the script to sbatch. Returns the number of the job.

    Raises:
        UserError: there is no sbatch, it has no configuration, or it refuses.
    """
    try:
        done = subprocess.run(
            ["sbatch", "--parsable"],
            input=script,
            capture_output=True,
            encoding="utf-8",
            errors="surrogateescape",  # file names need not be UTF-8
            check=False,
        )
    except FileNotFoundError as error:
        raise UserError(
            "there is no Slurm here: the command sbatch is not installed",
            where="--to slurm",
            remedy="submit on a login node of the cluster; --dry-run prints the script anywhere",
        ) from error
    if done.returncode:
        check_configured(done.stderr)
        raise UserError(
            f"Slurm refuses the job: {_reason(done.stderr)}",
            where="sbatch",
            remedy="`sinfo` lists partitions with their limits; the settings are those of `cluster`",
        )
    return done.stdout.strip().partition(";")[0]  # NUMBER;CLUSTER where there are several


def _reason(text: str) -> str:
    """What sbatch says, without its own name in front."""
    lines = [re.sub(r"^sbatch: (error: )?", "", line) for line in text.strip().splitlines()]
    return "; ".join(line for line in lines if line) or "it does not say why"


_OF_CPUS = {"cpus-per-gpu", "hint", "threads-per-core", "ntasks-per-core"}
"""Options of sbatch that set the number of CPUs, or count them in another way."""


def with_cpus(cluster: ClusterSection, processes: int) -> tuple[ClusterSection, list[str]]:
    """The section with ``cpus_per_task``, and notes about it.

    Args:
        processes: on each node.
    """
    if cluster.cpus_per_task is not None or cluster.options.keys() & _OF_CPUS:
        return cluster, []
    share, notes = _share_of_gpus(cluster), []
    if cluster.gpu_count is not None and share is None:
        notes = [
            f"Slurm does not say here how many CPUs the nodes have: the job asks for {processes} on each, one for each "
            "process; cluster.cpus_per_task asks for more"
        ]
    cpus = share or processes
    return (cluster if cpus == 1 else cluster.model_copy(update={"cpus_per_task": cpus})), notes


def few_cpus(cluster: ClusterSection, processes: int) -> list[str]:
    """A note if the allocation has fewer CPUs than processes, as one made by ``salloc --gres=gpu:8`` has."""
    cpus = cluster.cpus_per_task or processes
    if cpus >= processes:
        return []
    return [f"the allocation has {cpus} CPU{'s' * (cpus > 1)} on a node, for {processes} processes (salloc -c)"]


def _share_of_gpus(cluster: ClusterSection) -> int | None:
    """CPUs in proportion to the requested GPUs of a node; the smallest such number over the eligible nodes.

    None without GPUs, and where Slurm does not answer or has no such nodes: submitting will tell.
    """
    if cluster.gpu_count is None:
        return None
    names = cluster.partition.split(",") if cluster.partition else []
    shares = []
    for partition in read_partitions() or []:
        if partition.name not in names and (names or not partition.is_default):
            continue
        for node in fitting_nodes(read_nodes(partition.name) or [], cluster):
            cpus = node.cpus if partition.most_cpus is None else min(node.cpus, partition.most_cpus)
            shares.append(max(1, cpus * cluster.gpu_count // node.gpus))
    return min(shares, default=None)


def judge_job(record: JobRecord, entry: QueueEntry | None, end: JobEnd | None) -> JobStatus:
    """The status of a job from Slurm's entry and the job's own end file. An ended job may go back into the queue, so
    Slurm has the last word as long as it knows the job."""
    if entry is None:
        gone = "Slurm has forgotten it, and it left no exit code: killed, or its node was lost"
        return status_from_files(record) or JobStatus(record, LOST, gone)
    if entry.is_active:
        return JobStatus(record, entry.state, _where(entry), True, entry.restarts, used=entry.used, limit=entry.limit)
    code = _exit_code(entry, end)
    return JobStatus(
        record,
        STOPPED if entry.state == FAILED and state_of_code(code) == STOPPED else entry.state,
        "; ".join(filter(None, (_nodes_lost(entry), explain(code)))),
        restarts=entry.restarts if end is None else end.restarts,
        code=code,
        used=entry.used,
        limit=entry.limit,
        ended=None if end is None else end.time,
    )


def _where(entry: QueueEntry) -> str:
    if entry.state == PENDING:
        start = "" if entry.start in ("N/A", "") else f", starts about {entry.start.replace('T', ' ')}"
        return f"waits: {entry.reason}{start}"
    return f"on {entry.nodes}" if entry.nodes else ""


def _exit_code(entry: QueueEntry, end: JobEnd | None) -> int:
    """The run's exit code. If the script was killed, Slurm's, or 1 if Slurm says 0 though the job did not complete."""
    if end is not None:
        return end.code
    return entry.exit_code or (ExitCode.DONE if entry.state == COMPLETED else ExitCode.FAILED)


def _nodes_lost(entry: QueueEntry) -> str:
    if entry.state != "NODE_FAIL":
        return ""
    lost = lost_nodes(entry.nodes)
    return f"lost {', '.join(lost)}" if lost else f"lost a node of {entry.nodes}, which answers again"


_END_SECONDS = 60
"""How long Slurm may take to end a job that it kills."""


class SlurmLauncher(Launcher):
    """Submits batch scripts, and starts runs inside allocations."""

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
        cluster = ClusterSection.of(config)
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
        made = [path for path in (job.folder, *job.folder.parents) if not path.exists()]  # from the innermost
        job.folder.mkdir(parents=True, exist_ok=True)  # for the log
        try:
            return Submitted(sbatch(script))
        except UserError:
            for path in made:
                path.rmdir()
            raise

    def status(self, records: Sequence[JobRecord]) -> list[JobStatus]:
        entries = read_queue(record.number for record in records)  # Slurm is asked once for all
        found = []
        for record in records:
            # elements that were cancelled one by one before they began are shown only under the array's number
            entry = entries.get(record.number) or entries.get(record.array_id)
            if entry is not None and entry.name != record.job_name:
                entry = None  # it is of another job: on another cluster, or the numbers have started over
            found.append(judge_job(record, entry, JobEnd.read(record)))
        return found

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
    """The section without the dependency on other jobs, which Slurm may no longer know."""
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
