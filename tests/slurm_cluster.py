"""A real Slurm of two nodes on this machine: Debian's packages ``slurm-wlm`` and ``munge``, run from one folder.

Nothing outside the folder is written or read, so any number of clusters can run beside one another, and beside one of
the machine's own: munge has its own key and socket, and ``SLURM_CONF`` tells Slurm's commands which one is meant.
Both nodes are this machine: they have one host name and address, and ports of their own.
"""

import getpass
import os
import secrets
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from harness import free_port, wait_until
from programs import search_path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "scancel", "sinfo")
NODES = ("n1", "n2")
CPUS = 8
"""That each node claims to have; the machine may have fewer, and two jobs must fit beside each other."""
SECONDS = 60

# cred_expire is how long a requeued job waits, and 5 the least that counts
CONF = """\
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={control_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
CryptoType=crypto/munge
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,sched_min_interval=0,bf_interval=1,batch_sched_delay=0
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
MessageTimeout=20
SlurmdTimeout={patience}
KillWait=10
MinJobAge=300
FirstJobId={first_job}
"""
NODE = "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={cpus} RealMemory=1000 State=UNKNOWN\n"
PARTITIONS = "PartitionName=main Nodes={nodes} Default=YES MaxTime=1:00:00 State=UP OverSubscribe=NO\n"


@dataclass
class SlurmCluster:
    """The cluster as its users see it."""

    folder: Path
    environment: dict[str, str]
    """What Slurm's commands need to find it, besides what they have."""
    daemons: "dict[str, subprocess.Popen[bytes]]" = field(default_factory=dict)

    def run(self, *command: str, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> str:
        """Run a command as on a login node; its output. Raises AssertionError where it fails."""
        environ = {**os.environ, **self.environment, **(env or {})}
        done = subprocess.run(command, cwd=cwd, env=environ, check=False, capture_output=True, text=True)
        assert done.returncode == 0, f"{command}: exit code {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout

    def facts(self, job: str) -> dict[str, str]:
        """What ``scontrol show job`` says of a job; it remembers ended jobs for some minutes."""
        words = self.run("scontrol", "show", "--oneliner", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_for(self, job: str, *states: str, seconds: float = SECONDS) -> dict[str, str]:
        """Wait for a job to come into one of ``states``; the facts of it then."""
        return wait_until(
            lambda: self._in_state(job, states), lambda: f"job {job} in {states}: {self.facts(job)}", seconds
        )

    def _in_state(self, job: str, states: Sequence[str]) -> dict[str, str] | None:
        facts = self.facts(job)
        return facts if facts["JobState"] in states else None


def start_cluster(folder: Path, nodes: Sequence[str] = NODES, patience: int = 30) -> SlurmCluster:
    """Start munge, the controller and the nodes, and wait until a job could start.

    Args:
        patience: seconds after which the controller takes a silent node for lost.
    """
    for name in ("munge", "state", *(f"spool-{node}" for node in nodes)):
        (folder / name).mkdir(mode=0o700, parents=True)
    conf = folder / "slurm.conf"
    ports = {free_port()}
    while len(ports) <= len(nodes):
        ports.add(free_port())
    control = ports.pop()
    first_job = 1000 + secrets.randbelow(10**6)  # jobs of several clusters on this machine look at different ports
    settings = {"user": getpass.getuser(), "control_port": control, "patience": patience, "first_job": first_job}
    text = CONF.format(folder=folder, **settings)
    host = socket.gethostname().split(".")[0]
    for name, port in zip(nodes, ports, strict=True):
        text += NODE.format(name=name, host=host, port=port, cpus=CPUS)
    conf.write_text(text + PARTITIONS.format(nodes=",".join(nodes)))
    cluster = SlurmCluster(folder, {"SLURM_CONF": str(conf), "PATH": search_path()})
    try:
        _start_munge(cluster)
        _start(cluster, "slurmctld", "-D", "-c", "-f", str(conf))
        for name in nodes:
            start_node(cluster, name)
        wait_until(lambda: _idle_nodes(cluster) == len(nodes), f"idle nodes; logs in {folder}")
    except BaseException:
        stop_cluster(cluster)
        raise
    return cluster


def start_node(cluster: SlurmCluster, name: str) -> None:
    """Start the daemon of one node."""
    _start(cluster, "slurmd", "-D", "-N", name, "-f", cluster.environment["SLURM_CONF"], known_as=name)


def kill_node(cluster: SlurmCluster, name: str) -> None:
    """SIGKILL for all that runs on a node, as if its power was cut; but for the network, which is closed in order."""
    steps = {_parent(process) for process in processes(cluster, node=name)} - {os.getpid()}
    daemon = cluster.daemons[name]
    daemon.kill()
    daemon.wait()
    for process in [*filter(_is_step_daemon, steps), *processes(cluster, node=name)]:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def processes(cluster: SlurmCluster, *, node: str | None = None, job: str | None = None) -> list[int]:
    """The processes that jobs have on the cluster, on one node or of one job alone."""
    wanted = {f"SLURM_CONF={cluster.environment['SLURM_CONF']}"}
    wanted |= {f"SLURMD_NODENAME={node}"} if node else set()
    wanted |= {f"SLURM_JOB_ID={job}"} if job else set()
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if wanted <= set(path.read_bytes().decode(errors="replace").split("\0")):
                found.append(int(path.parent.name))
    return found


def _parent(process: int) -> int:
    try:
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return os.getpid()


def _is_step_daemon(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/cmdline").read_text().startswith("slurmstepd")
    except OSError:
        return False


def stop_cluster(cluster: SlurmCluster) -> None:
    """Cancel all jobs, wait until their processes are gone, and end every daemon."""
    if "n1" in cluster.daemons and "slurmctld" in cluster.daemons:
        environ = {**os.environ, **cluster.environment}
        subprocess.run(["scancel", "--user", getpass.getuser()], env=environ, check=False, capture_output=True)
        wait_until(lambda: not _steps(cluster), "the end of all jobs", 30)
    for daemon in reversed(cluster.daemons.values()):
        daemon.send_signal(signal.SIGTERM)
        try:
            daemon.wait(10)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()


def _steps(cluster: SlurmCluster) -> str:
    environ = {**os.environ, **cluster.environment}
    return subprocess.run(["squeue", "--noheader"], env=environ, check=False, capture_output=True, text=True).stdout


def _start_munge(cluster: SlurmCluster) -> None:
    folder = cluster.folder / "munge"
    key = folder / "key"
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(128))
    files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    _start(
        cluster,
        "munged",
        "--foreground",
        "--force",  # the folders above may be anybody's to write to, as /tmp is
        *(f"--{option}={folder / name}" for option, name in files.items()),
    )
    wait_until((folder / "socket").exists, "munged's socket", 10)


def _start(cluster: SlurmCluster, *command: str, known_as: str | None = None) -> None:
    name = known_as or command[0]
    with (cluster.folder / f"{name}.out").open("ab") as output:
        cluster.daemons[name] = subprocess.Popen(
            command,
            env={**os.environ, **cluster.environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,  # Ctrl-C in a test run is not for them
        )


def _idle_nodes(cluster: SlurmCluster) -> int:
    environ = {**os.environ, **cluster.environment}
    done = subprocess.run(
        ["sinfo", "--noheader", "--Node", "--format=%t"], env=environ, check=False, capture_output=True, text=True
    )
    return done.stdout.split().count("idle")
