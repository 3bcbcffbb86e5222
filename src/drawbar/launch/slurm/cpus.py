"""Default for the CPUs of a job on each node: without a request, Slurm would give it a single CPU."""

from drawbar.config.schema.cluster_section import ClusterSection
from drawbar.launch.slurm.obstacles import fitting_nodes
from drawbar.launch.slurm.partitions import read_nodes, read_partitions

_OF_CPUS = {"cpus-per-gpu", "hint", "threads-per-core", "ntasks-per-core"}
"""Options of sbatch that say how many CPUs there are to be, or that count them in another way."""


def with_cpus(cluster: ClusterSection, processes: int) -> tuple[ClusterSection, list[str]]:
    """The section with ``cpus_per_task``, and what is good to know of it.

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
