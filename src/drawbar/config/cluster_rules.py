"""The part of the table of rules that ``drawbar submit`` obeys. ``drawbar train`` does not: the same file may be tried
on a laptop, with ``device=cpu``."""

from drawbar.config.cluster import ClusterSection
from drawbar.config.rule import Rule
from drawbar.config.schema import RunConfig


def _cluster(config: RunConfig) -> ClusterSection:
    return config.cluster or ClusterSection()


def _too_many_processes(config: RunConfig) -> bool:
    gpus, nproc = _cluster(config).gpus_per_node, config.launch.nproc
    return gpus is not None and nproc != "auto" and nproc > gpus and config.device != "cpu"


SUBMIT_RULES: tuple[Rule, ...] = (
    Rule(
        "GPUs for a run on the CPU",
        ("cluster.gpus_per_node", "device"),
        lambda c: _cluster(c).gpus_per_node is not None and c.device == "cpu",
        "the run would keep GPUs waiting that it does not use",
        "remove cluster.gpus_per_node, or set device=cuda",
    ),
    Rule(
        "processes and GPUs of a node",
        ("launch.nproc", "cluster.gpus_per_node"),
        _too_many_processes,
        "each process needs a GPU of its own",
        "set launch.nproc=auto, or ask for more GPUs",
    ),
    Rule(
        "one process on several nodes",
        ("parallel.strategy", "cluster.nodes"),
        lambda c: c.parallel.strategy in ("single", "dp") and _cluster(c).nodes > 1,
        "this strategy has one process, which runs on one node",
        "set parallel.strategy=ddp or fsdp, or cluster.nodes=1",
    ),
    Rule(
        "a cluster of Macs",
        ("device", "cluster.nodes"),
        lambda c: c.device == "mps" and _cluster(c).nodes > 1,
        "Apple's MPS device serves one process",
        "set device=auto",
    ),
    Rule(
        "time limit",
        ("cluster.time", "cluster.signal_seconds"),
        lambda c: (_cluster(c).seconds or 10**9) <= _cluster(c).signal_seconds,
        "the run would be told to save before it has begun",
        "set a longer cluster.time, or a smaller cluster.signal_seconds",
    ),
)
"""What submitting needs besides ``RULES`` and ``TRAIN_RULES``."""
