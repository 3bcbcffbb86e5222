"""Finds reasons why an accepted Slurm job could never run: limits of partitions, and resources of their nodes."""

from collections.abc import Iterator, Sequence

from drawbar.errors import UserError, nearest
from drawbar.jobs.job import Job
from drawbar.jobs.settings import ClusterSection
from drawbar.jobs.slurm.queries import (
    Partition,
    SlurmNode,
    count_gpus,
    read_nodes,
    read_partitions,
    write_time,
)
from drawbar.launch.findings import Finding, problem

_OVERRULING = {"qos", "reservation"}
"""Options of sbatch that may allow more than the partition does."""


def check_slurm(job: Job) -> list[str]:
    """Check whether Slurm could ever run the job: it may accept one that it cannot run, and leave it queued for ever.

    Returns:
        Notes for the user; none where there is no Slurm, or it does not answer: submitting will tell.

    Raises:
        UserError: no partition that was asked for can run it.
    """
    cluster, partitions = job.cluster, read_partitions() or []
    found: list[Finding] = []
    for partition in _wanted(partitions, cluster.partition):
        nodes = read_nodes(partition.name) or []
        obstacle = next(find_obstacles(partition, nodes, job, cluster), None)
        if obstacle is None:
            return _notes(partition, nodes, job, cluster)
        found.append(obstacle)
    if not found:
        return []
    raise UserError(
        "\n".join(obstacle.what for obstacle in found),
        where=", ".join(dict.fromkeys(obstacle.where for obstacle in found)),
        remedy="; or ".join(dict.fromkeys(obstacle.remedy for obstacle in found)),
    )


def _wanted(partitions: Sequence[Partition], names: str | None) -> list[Partition]:
    """Those that the job may run in; none if nothing is known about them."""
    if names is None or not partitions:
        return [partition for partition in partitions if partition.is_default]
    known = {partition.name: partition for partition in partitions}
    for name in names.split(","):
        if name not in known:
            guess = nearest(name, known)
            hint = f"did you mean {guess}? " if guess else ""
            remedy = f"{hint}There are: {', '.join(known)}"
            raise UserError(f"there is no partition {name}", where="cluster.partition", remedy=remedy)
    return [known[name] for name in names.split(",")]


def find_obstacles(
    partition: Partition, nodes: Sequence[SlurmNode], job: Job, cluster: ClusterSection
) -> Iterator[Finding]:
    """Every reason why the job can never run there."""
    name = partition.name
    if partition.state != "UP":
        yield problem("cluster.partition", f"the partition {name} is {partition.state}", "choose another one (`sinfo`)")
    account = cluster.account
    if account is not None and (
        account in partition.refused_accounts or (partition.accounts is not None and account not in partition.accounts)
    ):
        allowed = f"one of: {', '.join(partition.accounts)}" if partition.accounts else "another one"
        yield problem("cluster.account", f"{name} does not take jobs of the account {account}", f"set it to {allowed}")
    if cluster.options.keys() & _OVERRULING:
        return
    seconds, longest = cluster.seconds, partition.longest
    if seconds is not None and longest is not None and seconds > longest:
        yield problem(
            "cluster.time",
            f"{name} allows no job of {write_time(seconds)}",
            f"set cluster.time={write_time(longest)}, its longest: the job continues after it (cluster.requeue)",
        )
    if partition.most_nodes is not None and job.nodes > partition.most_nodes:
        most = partition.most_nodes
        yield problem("cluster.nodes", f"{name} gives no job {job.nodes} nodes", f"set cluster.nodes={most}, its most")
    yield from _nodes_obstacles(partition, nodes, job, cluster)


def _nodes_obstacles(
    partition: Partition, nodes: Sequence[SlurmNode], job: Job, cluster: ClusterSection
) -> Iterator[Finding]:
    name, kind = partition.name, cluster.gpu_type
    most_gpus = max((count_gpus(node.resources, kind) for node in nodes), default=0)
    for setting, what, wanted, most, prefix in (
        ("cluster.gpus_per_node", _gpus(kind), cluster.gpu_count, most_gpus, f"{kind}:" if kind else ""),
        ("cluster.cpus_per_task", "CPUs", cluster.cpus_per_task, _most_cpus(partition, nodes), ""),
    ):
        if wanted is not None and wanted > most:
            other = "another cluster.partition"
            remedy = f"set {setting}={prefix}{most}, or {other}" if most else f"set {other}"
            has = f"the most is {most}" if most else "it has none at all"
            yield problem(setting, f"no node of {name} has {wanted} {what}: {has}", remedy)
    fitting = fitting_nodes(nodes, cluster)
    if 0 < len(fitting) < job.nodes:
        with_them = f" with {_needs(cluster)}" if len(fitting) < len(nodes) else ""
        remedy = f"set cluster.nodes={len(fitting)}, or another cluster.partition"
        yield problem("cluster.nodes", f"{name} has {len(fitting)} nodes{with_them}, not {job.nodes}", remedy)


def _most_cpus(partition: Partition, nodes: Sequence[SlurmNode]) -> int:
    most = max((node.cpus for node in nodes), default=0)
    return most if partition.most_cpus is None else min(most, partition.most_cpus)


def fitting_nodes(nodes: Sequence[SlurmNode], cluster: ClusterSection) -> list[SlurmNode]:
    """The nodes that have the GPUs and CPUs which the job needs on each node."""
    gpus, cpus = cluster.gpu_count or 0, cluster.cpus_per_task or 1
    return [node for node in nodes if count_gpus(node.resources, cluster.gpu_type) >= gpus and node.cpus >= cpus]


def _gpus(kind: str | None) -> str:
    return f"{kind} GPUs" if kind else "GPUs"


def _needs(cluster: ClusterSection) -> str:
    needs = {_gpus(cluster.gpu_type): cluster.gpu_count, "CPUs": cluster.cpus_per_task}
    return " and ".join(f"{count} {what}" for what, count in needs.items() if count is not None)


def _notes(partition: Partition, nodes: Sequence[SlurmNode], job: Job, cluster: ClusterSection) -> list[str]:
    fitting = fitting_nodes(nodes, cluster)
    up = [node for node in fitting if not node.is_away]
    if fitting and len(up) < job.nodes:
        away = ", ".join(f"{node.name} is {node.state}" for node in fitting if node.is_away)
        return [f"the job will wait for nodes of {partition.name} to come back: {away}"]
    return []
