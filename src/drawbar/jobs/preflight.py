"""Checks of ``drawbar submit`` before the job waits in a queue, besides those that ``drawbar train`` makes."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drawbar.config.rules.rule import Rule
from drawbar.config.schema.run_config import RunConfig
from drawbar.errors import UserError
from drawbar.jobs.doctor import findings
from drawbar.jobs.doctor.findings import MIB, look_at_folder
from drawbar.jobs.job import Job
from drawbar.jobs.launcher import Launcher
from drawbar.jobs.settings import ClusterSection, choose_runtime, lost_variables
from drawbar.launch.findings import Level
from drawbar.util.byte_sizes import bytes_below, readable
from drawbar.util.run_dir import checkpoint_folders

if TYPE_CHECKING:
    from drawbar.tasks.task import Task

PLAN_SECONDS = 600.0
"""For a plan of the largest models; a usual one takes ten seconds."""


def check_before_queue(config: RunConfig, job: Job, launcher: Launcher, task: "type[Task] | None") -> list[str]:
    """Check a job before it is submitted. Returns notes for the user about a job that passes.

    Raises:
        UserError: a data file cannot be used, the run's folder cannot be written, or the launcher could never run it.
    """
    if not job.cluster.preflight:
        return []
    notes: list[str] = []
    if launcher.shares_disk:
        notes += check_data(config) if _reads_files(config, task) else []
        notes += check_run_folder(job.run_dir)
    return notes + launcher.check(job)


def check_run_folder(run_dir: Path) -> list[str]:
    """Check that the run's folder can be written, and has space for another checkpoint of the size of its newest (if
    any). Returns notes for the user.

    Raises:
        UserError: the folder cannot be written, or the disk is nearly full.
    """
    newest = sum(bytes_below(folder) for folder in [*checkpoint_folders(run_dir).values()][-1:])
    folder = look_at_folder("run.dir", run_dir)
    found = list(findings.of_folder(folder, enough=0, least=max(64 * MIB, newest)))
    for finding in found:
        if finding.level is Level.PROBLEM:
            raise finding.error()
    return [finding.what for finding in found if finding.level is Level.WARNING]


def check_memory(job: Job, program: str | None, force: bool) -> tuple[str | None, Mapping[str, Any] | None]:
    """Where ``cluster.gpu_memory`` says what a run must fit into, plan it, in a separate process as that needs torch.
    Returns a note for the user, and what ``drawbar plan --json`` wrote; None if nothing was planned.

    Args:
        program: absolute path of the user's own script, where there is one.
        force: do not refuse a run that does not fit.

    Raises:
        UserError: it does not fit.
    """
    if job.cluster.gpu_memory is None or job.cluster.gpu_count is None or not job.cluster.preflight:
        return None, None
    with tempfile.TemporaryDirectory(prefix="drawbar-") as name:
        config, result = Path(name) / "config.yaml", Path(name) / "plan.json"
        config.write_text(job.config, encoding="utf-8")
        command = [sys.executable, *(("-m", "drawbar") if program is None else (program,)), "plan", str(config)]
        command += ["--nodes", str(job.nodes), "--gpus", str(job.processes), "--json", str(result)]
        command += ["--gpu-memory", job.cluster.gpu_memory, "--strategies", "none"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=PLAN_SECONDS, check=False)
        except subprocess.TimeoutExpired:
            return f"the memory of the run could not be planned within {PLAN_SECONDS:.0f} s", None
        if not result.exists():
            said = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()
            why = next((line for line in said if line.startswith("error:")), said[-1])
            return f"the memory of the run could not be planned: {why.removeprefix('error: ')}", None
        plan = json.loads(result.read_text("utf-8"))
    return _judge(plan, job.cluster.gpu_memory, force), plan


def _judge(plan: dict[str, Any], memory: str, force: bool) -> str:
    """The note about a plan. Raises UserError if the run does not fit."""
    peak = readable(plan["peak"])
    if plan["fits"]:
        return f"planned: a rank takes {peak} of {memory} at its peak ({plan['strategy']}, {plan['method']})"
    what = (
        f"the run does not fit: a rank takes {peak} at its peak, and of {memory}, {readable(plan['usable'])} are usable"
    )
    if force:
        return f"{what}; submitted all the same, as --force says"
    changes = [one["overrides"] for one in plan["suggestions"]]
    raise UserError(
        what,
        where="cluster.gpu_memory",
        remedy=f"{'set ' + ', or '.join(changes) if changes else 'take more or larger GPUs'}; `drawbar plan` says "
        "more, and --force submits it as it is",
    )


def _reads_files(config: RunConfig, task: "type[Task] | None") -> bool:
    """Whether the settings ``data`` name the records: a user's task may find its own."""
    if task is None and ":" not in config.task.type:
        return True
    from drawbar.tasks.task import Task
    from drawbar.tasks.task_registry import task_class  # the user's module has imported torch by now

    return (task or task_class(config.task.type)).records is Task.records


def check_data(config: RunConfig) -> list[str]:
    """Find the files of the data, and check whether encoded ones exist.

    Raises:
        UserError: a file is missing, empty or of an unknown kind.
    """
    from drawbar.data.sources import open_records

    data = config.data
    names = ["train", *(["validation"] if data.validation or data.validation_share else [])]
    for name in names:
        open_records(data, name)
    if data.streaming:
        names.remove("train")
    cached = [name for name in names if any(config.cache_dir.glob(f"{name}-*/meta.json"))]
    missing = [name for name in names if name not in cached]
    notes = []
    if cached:
        notes.append(
            f"{config.cache_dir} has encoded data ({', '.join(cached)}); where they are of other settings, the job "
            "encodes its own first"
        )
    if missing:
        notes.append(f"the job will encode its data first ({', '.join(missing)}); `drawbar prepare` does it here")
    return notes


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
"""The rules that submitting checks besides ``RULES`` and ``TRAIN_RULES``. ``drawbar train`` does not: the same file may
be tried on a laptop, with ``device=cpu``."""
