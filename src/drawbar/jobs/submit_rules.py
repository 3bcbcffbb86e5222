"""Rules that ``drawbar submit`` obeys. ``drawbar train`` does not: the same file may be tried on a laptop, with
``device=cpu``."""

from drawbar.config.rules.rule import Rule
from drawbar.config.schema.run_config import RunConfig
from drawbar.jobs.settings import ClusterSection, choose_runtime, lost_variables

_cluster = ClusterSection.of


def _too_many_processes(config: RunConfig) -> bool:
    gpus, nproc = _cluster(config).gpu_count, config.launch.nproc
    return gpus is not None and nproc != "auto" and nproc > gpus and config.device != "cpu"


def _has_uncounted_gpus(config: RunConfig) -> bool:
    cluster = _cluster(config)
    asks = any(name.startswith("gpus") for name in cluster.options)
    return asks and cluster.gpu_count is None and config.has_process_per_gpu


def _has_container_settings(cluster: ClusterSection) -> bool:
    return bool(cluster.container != "auto" or cluster.binds or cluster.home)


def _runtime(config: RunConfig) -> str | None:
    cluster = _cluster(config)
    return None if cluster.image is None else choose_runtime(cluster.image, cluster.container)


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
        "GPUs among the options",
        ("cluster.options", "launch.nproc"),
        _has_uncounted_gpus,
        "nothing says how many GPUs, and so how many processes, a node gets",
        "set cluster.gpus_per_node, such as 4 or a100:4, instead of the option; or set launch.nproc as well",
    ),
    Rule(
        "one process on several nodes",
        ("parallel.strategy", "cluster.nodes"),
        lambda c: c.parallel.features.one_process and _cluster(c).nodes > 1,
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
    Rule(
        "settings of a container",
        ("cluster.image", "cluster.container", "cluster.binds", "cluster.home"),
        lambda c: _cluster(c).image is None and _has_container_settings(_cluster(c)),
        "there is no image, so nothing reads them",
        "set cluster.image, or remove the others",
    ),
    Rule(
        "bad nodes and containers",
        ("cluster.exclude_bad_nodes", "cluster.image"),
        lambda c: _cluster(c).exclude_bad_nodes and _cluster(c).image is not None,
        "requeueing the job without its bad nodes needs drawbar and Slurm's commands in one place",
        "set cluster.exclude_bad_nodes=false; the log names bad nodes, and cluster.options={exclude: NODE} avoids one",
    ),
    Rule(
        "home with pyxis",
        ("cluster.home", "cluster.image", "cluster.container"),
        lambda c: _cluster(c).home is not None and _runtime(c) == "pyxis",
        "pyxis can only take your own home into the container",
        "remove cluster.home, and bind the folder that you need with cluster.binds",
    ),
    Rule(
        "variables of a container's own",
        ("cluster.image", "cluster.environment"),
        lambda c: _cluster(c).image is not None and bool(lost_variables(_cluster(c).environment)),
        "a container has a PATH, a LD_LIBRARY_PATH and a HOME of its own, and these would not arrive",
        "set them in the image; the Python inside is cluster.python, and the home cluster.home",
    ),
)
"""The rules that submitting checks besides ``RULES`` and ``TRAIN_RULES``."""
