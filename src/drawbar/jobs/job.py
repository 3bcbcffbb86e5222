"""``Job``: a command and the machines it needs, independent of the launcher."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from drawbar.config.io.load_config import dump_yaml
from drawbar.config.schema.run_config import RunConfig
from drawbar.jobs.job_container import PYTHON, VARIABLES, Container, make_container
from drawbar.jobs.settings import ClusterSection
from drawbar.util.run_dir import LAUNCH_FOLDER


@dataclass(frozen=True)
class Job:
    """A command that runs once on each node and starts that node's processes."""

    name: str
    argv: tuple[str, ...]
    """The command, its interpreter first. The launcher appends the configuration's path, Slurm also ``settings``."""
    workdir: Path
    """Absolute, as is ``run_dir``."""
    run_dir: Path
    config: str = ""
    """The whole configuration as YAML: later changes to the user's configuration files do not reach the job."""
    cluster: ClusterSection = field(default_factory=ClusterSection)
    """The configuration's section ``cluster``, as the launcher has completed it (``Launcher.resolve_cluster``)."""
    nodes: int = 1
    processes: int = 1
    """On each node."""
    settings: tuple[str, ...] = ()
    """``KEY=VALUE``: under Slurm, settings after the configuration's path, which override it. Other launchers put such
    settings into ``config`` (``Launcher.settings``)."""
    environment: Mapping[str, str] = field(default_factory=dict)
    container: Container | None = None
    """The container in which ``argv`` and drawbar's own programs run; None if they run on the node itself."""
    elements: "tuple[Job, ...]" = ()
    """The runs of a sweep. The nodes, cluster, environment and code of this job are then those of all, and
    ``processes`` the most of any; each run has its own name, configuration, settings, directory and processes."""
    at_once: int | None = None
    """The most elements that may run at the same time; None for no limit."""
    version: str | None = None
    """Of the user's own code, if git tracks it."""
    snapshot: Path | None = None
    """The copy of that code which the job uses."""
    allocation: str | None = None
    """The number of the existing allocation that the job is started in; None if there is none."""
    timeout: float = 600
    """Over ssh: seconds that a host has to answer (``launch.timeout``)."""
    grace: int = 60
    """Under Slurm: seconds that the remaining nodes have to end by themselves once a node has ended: longer than the
    node check waits for a node that does not answer."""

    @property
    def python(self) -> str:
        """The interpreter, which also runs drawbar's own programs on the nodes."""
        return self.argv[0]

    @property
    def folder(self) -> Path:
        """Where the launcher's files of the job are."""
        return self.run_dir / LAUNCH_FOLDER


def make_job(
    config: RunConfig,
    cluster: ClusterSection,
    program: str | None,
    workdir: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> Job:
    """``drawbar train`` on the nodes, with the configuration as it is now.

    Args:
        cluster: the section as the launcher has completed it.
        program: absolute path of the user's own script, where there is one.
        workdir: the folder to run in; by default the current one.
        environment: variables for every node.

    Raises:
        UserError: the container cannot see what the configuration names.
    """
    workdir = Path.cwd() if workdir is None else workdir
    container = make_container(config, cluster, workdir)
    processes = processes_per_node(config, cluster)
    python = cluster.python or (PYTHON if container else sys.executable)
    return Job(
        name=config.run.name,
        argv=(python, *(("-m", "drawbar") if program is None else (program,)), "train"),
        workdir=workdir,
        run_dir=config.run_dir.absolute(),
        config=dump_yaml(config),
        cluster=cluster,
        nodes=cluster.nodes,
        processes=processes,
        settings=(f"launch.nproc={processes}",),
        environment={**(environment or {}), **(VARIABLES if container else {})},
        container=container,
        timeout=config.launch.timeout,
        grace=max(Job.grace, config.launch.roll_call_seconds + 30),
    )


def processes_per_node(config: RunConfig, cluster: ClusterSection) -> int:
    """As ``launch.nproc`` says; for ``auto`` one for each requested GPU, or one where the run is one process (on the
    CPU, or under ``single`` and ``dp``)."""
    if config.launch.nproc != "auto":
        return config.launch.nproc
    return cluster.gpu_count or 1 if config.has_process_per_gpu else 1
