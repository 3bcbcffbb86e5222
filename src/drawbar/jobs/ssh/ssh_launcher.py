"""``SshLauncher``: jobs on hosts that ssh reaches. The process that submits one stays, and holds its connections."""

import fcntl
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

from drawbar.config.schema.run_config import RunConfig
from drawbar.errors import ExitCode, UserError
from drawbar.jobs.hosts_file import Host, parse_host
from drawbar.jobs.job import Job, make_job
from drawbar.jobs.launcher import Launcher, Submitted
from drawbar.jobs.records import (
    LOST,
    RUNNING,
    UNKNOWN,
    JobEnd,
    JobRecord,
    JobStatus,
    read,
    run_file,
    status_from_files,
    wait_for_ends,
)
from drawbar.jobs.settings import ClusterSection
from drawbar.jobs.ssh.protocol import ANSWER
from drawbar.jobs.ssh.ssh_command import (
    describe,
    forwarded,
    no_answer,
    no_start,
    remote_starts,
    ssh_command,
    start_script,
)
from drawbar.jobs.ssh.supervisor import HostOutput, supervise
from drawbar.runtime.log import ignore_output_errors
from drawbar.util.run_dir import LAUNCH_FOLDER, job_end


@dataclass(frozen=True)
class JobProcess:
    """The submitting process, as its file describes it."""

    pid: int
    machine: str
    """The name of the machine that it runs on."""
    nodes: tuple[str, ...] = ()
    """Where the job's ranks run."""

    @property
    def is_here(self) -> bool:
        return self.machine == os.uname().nodename


@contextmanager
def lock_job_file(run_dir: Path, number: str, nodes: tuple[str, ...] = ()) -> Iterator[None]:
    """Context in which this process holds the lock of a job's file, which marks the job as running. Raises OSError
    where the file cannot be written."""
    file = _file(run_dir, number)
    with file.open("w", encoding="utf-8") as stream:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(stream, fcntl.LOCK_EX)
        stream.write(json.dumps(asdict(JobProcess(os.getpid(), os.uname().nodename, nodes))) + "\n")
        stream.flush()
        yield


def find_process(record: JobRecord) -> JobProcess | None:
    """The process of a job, alive or not; None if none is written down."""
    try:
        values = json.loads(_file(Path(record.run_dir), record.number).read_text(encoding="utf-8"))
        return JobProcess(**{**values, "nodes": tuple(values["nodes"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None


def is_running(record: JobRecord) -> bool:
    """Whether the process of a job still has its file locked: the kernel releases the lock however the process ends."""
    try:
        with _file(Path(record.run_dir), record.number).open() as stream:
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # there is no file, or the file system has no locks
        process = find_process(record)
        return process is not None and process.is_here and Path(f"/proc/{process.pid}").exists()
    return False


def _file(run_dir: Path, number: str) -> Path:
    return run_dir / LAUNCH_FOLDER / f"process-{number}.json"


def count_gpus(job: Job, hosts: Sequence[Host], timeout: float) -> list[int]:
    """The GPUs of each host, which are all asked at the same time.

    Args:
        timeout: seconds that a host has to answer.

    Raises:
        UserError: a host cannot be reached, has no drawbar, or does not answer; all such hosts are named.
    """
    environment = json.dumps(dict(job.environment)).encode() + b"\n"
    question = start_script(job, "drawbar.jobs.node.gpu_count") + environment

    def ask(host: Host) -> "subprocess.CompletedProcess[bytes] | None":
        command = ssh_command(job.cluster, host)
        try:
            return subprocess.run(command, input=question, capture_output=True, timeout=timeout, check=False)
        except subprocess.TimeoutExpired:
            return None

    with ThreadPoolExecutor(max_workers=len(hosts)) as threads:
        answers = dict(zip((host.name for host in hosts), threads.map(ask, hosts), strict=True))
    failed = [
        (name, done.returncode, done.stderr.splitlines())
        for name, done in answers.items()
        if done is not None and ANSWER not in done.stdout
    ]
    if failed:
        raise no_start(failed, where="the hosts, asked for their GPUs since nothing says how many processes they get")
    if silent := [name for name, done in answers.items() if done is None]:
        raise no_answer(silent, timeout)
    return [_gpus(done.stdout) for done in answers.values() if done is not None]


def _gpus(output: bytes) -> int:
    """The number in the host's answer; ``cluster.setup`` may have written something before it."""
    line = output.partition(ANSWER)[2].splitlines()[0]
    return int(json.loads(line)["gpus"])


_END_SECONDS = 30
"""Seconds that the hosts have to end a job after its second SIGTERM, before its process here is killed."""


class SshLauncher(Launcher):
    """Runs the job on the hosts of ``cluster.hosts``, in the foreground."""

    takes_hosts = True
    shares_disk = False

    def settings(self, config: RunConfig, program: str | None) -> tuple[str, ...]:
        """The hosts, and how many processes each of them gets."""
        known = ClusterSection.of(config).hosts
        if not known:
            raise UserError(
                "no hosts to run on",
                where="--to ssh",
                remedy="give --hosts gpu1:8,gpu2:8, --hostfile FILE, or set cluster.hosts",
            )
        hosts = self._with_slots(config, program, [parse_host(text) for text in known])
        processes = count_processes(config, hosts)
        names = [f"{host.name}:{processes}" for host in hosts]
        return f"cluster.hosts={json.dumps(names)}", f"cluster.nodes={len(hosts)}", f"launch.nproc={processes}"

    def _with_slots(self, config: RunConfig, program: str | None, hosts: list[Host]) -> list[Host]:
        """The hosts; where slots depend on GPUs and are not given, each host is asked for its number of GPUs.

        Raises:
            UserError: a host without given slots does not report its number of GPUs.
        """
        cluster = ClusterSection.of(config)
        unknown = [host for host in hosts if host.slots is None]
        if not unknown or cluster.gpu_count is not None or not config.has_process_per_gpu:
            return hosts
        _check_installed()
        found = count_gpus(self.make_job(config, cluster, program), unknown, config.launch.timeout)
        gpus = {host.name: count for host, count in zip(unknown, found, strict=True)}
        told = ", ".join(f"{name} has {count}" for name, count in gpus.items())
        print(f"note: GPUs of the hosts: {told}", file=sys.stderr)
        return [host if host.slots else Host(host.name, max(1, gpus[host.name])) for host in hosts]

    def make_job(self, config: RunConfig, cluster: ClusterSection, program: str | None) -> Job:
        """Raises UserError if the container is one that only Slurm can start."""
        workdir = Path(cluster.workdir).absolute() if cluster.workdir else Path.cwd()
        variables = forwarded(cluster.forward, os.environ, cluster.environment)
        job = make_job(config, cluster, program, workdir, variables)
        if job.container is not None and job.container.runtime == "pyxis":
            raise UserError(
                "pyxis is a part of Slurm, and cannot start a container over ssh",
                where="cluster.image, cluster.container",
                remedy="make a .sif file of the image for Apptainer, or submit with --to slurm",
            )
        return job

    def render(self, job: Job) -> str:
        return describe(job.name, remote_starts(job, _hosts(job)))

    def submit(self, job: Job, script: str) -> Submitted:
        _check_installed()
        _check_free(job)
        number = f"ssh-{secrets.token_hex(4)}"
        return Submitted(number, lambda begun: self._run(job, number, begun))

    def _run(self, job: Job, number: str, begun: Callable[[], None]) -> int:
        """Run the job from here, with the files by which other processes know of it."""
        ignore_output_errors()
        hosts = _hosts(job)
        is_known = False
        with ExitStack() as held:

            def start(output: HostOutput) -> None:
                nonlocal is_known
                try:
                    job.folder.mkdir(parents=True, exist_ok=True)
                    output.open_log(self.log_path(job, number))
                    held.enter_context(lock_job_file(job.run_dir, number, tuple(host.name for host in hosts)))
                except OSError as error:
                    print(f"warning: other commands cannot find the run's job {number}: {error}", file=sys.stderr)
                else:
                    is_known = True
                    begun()

            code: int = ExitCode.FAILED
            try:
                code = supervise(remote_starts(job, hosts), job.timeout, start)
            except UserError as error:
                code = error.exit_code
                if is_known:
                    with suppress(OSError), self.log_path(job, number).open("a", encoding="utf-8") as log:
                        log.write(f"error: {error}\n")
                raise
            finally:
                if is_known:
                    with suppress(OSError):  # the disk may fail now; the run has ended all the same
                        JobEnd(code, round(time.time(), 3)).write(job_end(job.run_dir, number))
        return code

    def status(self, records: Sequence[JobRecord]) -> list[JobStatus]:
        return [_status(record) for record in records]

    def cancel(self, jobs: Sequence[JobStatus], grace: float) -> None:
        records = [job.record for job in jobs]
        for record in records:
            self._signal(record, signal.SIGTERM)  # the ranks save
        left = wait_for_ends(self.status, records, grace)
        for record in left:
            print(f"job {record.number}: has not ended within {grace:.0f}s, and is ended now", file=sys.stderr)
            self._signal(record, signal.SIGTERM)  # the second one ends all at once
        for record in wait_for_ends(self.status, left, _END_SECONDS):
            self._signal(record, signal.SIGKILL)  # the hosts notice that their connections have ended

    def _signal(self, record: JobRecord, number: signal.Signals) -> None:
        """Tell the job's process, if it is still there."""
        process = find_process(record)
        if process is None or not is_running(record):
            return
        if not process.is_here:
            raise UserError(
                f"job {record.number} was submitted on {process.machine}, and its process cannot be reached from here",
                where=record.run_dir,
                remedy=f"call `drawbar cancel {record.number}` on {process.machine}",
            )
        os.kill(process.pid, number)


def _check_free(job: Job) -> None:
    """Raises UserError if a job of this run has not ended: a new one would hide it under the run's name."""
    for record in read(run_file(job.run_dir)):
        if is_running(record):
            raise UserError(
                f"the run {job.name} is being trained now, by job {record.number}",
                where=str(job.run_dir),
                remedy=f"wait for it, end it by `drawbar cancel {record.number}`, or choose another run.name",
            )


def _status(record: JobRecord) -> JobStatus:
    process = find_process(record)
    if process is not None and is_running(record):
        used = str(timedelta(seconds=int(time.time() - record.time)))
        return JobStatus(record, RUNNING, f"on {', '.join(process.nodes)}", is_active=True, used=used)
    ended = status_from_files(record)  # looked for last: it is written before the process ends
    if ended is not None:
        return ended
    if process is not None and not process.is_here:
        detail = f"the process that submitted it is or was on {process.machine}: ask there"
        return JobStatus(record, UNKNOWN, detail)
    return JobStatus(record, LOST, "the process that held its connections was killed, and the hosts ended the run")


def count_processes(config: RunConfig, hosts: Sequence[Host]) -> int:
    """The processes on each host: its slots, or fewer where the configuration wants fewer.

    Raises:
        UserError: with ``launch.nproc: auto`` hosts differ in slots; with a number, one has fewer slots than that.
    """
    wanted = config.launch.nproc
    gpus = ClusterSection.of(config).gpu_count
    default = gpus or 1 if wanted == "auto" else wanted
    slots = {host.slots or default: host for host in hosts}
    fewest = min(slots)
    if wanted != "auto" and wanted > fewest:
        raise UserError(
            f"launch.nproc={wanted}, but the host {slots[fewest].name} has {fewest} slots",
            where="the hosts",
            remedy=f"set launch.nproc={fewest} or auto, or give the host more slots",
        )
    if wanted == "auto" and len(slots) > 1:
        counts = ", ".join(f"{host.name} has {count}" for count, host in slots.items())
        raise UserError(
            f"each host must run as many processes as the others, but {counts}",
            where="the hosts",
            remedy=f"set launch.nproc={fewest}",
        )
    return fewest if wanted == "auto" else wanted


def _hosts(job: Job) -> list[Host]:
    return [parse_host(text) for text in job.cluster.hosts]


def _check_installed() -> None:
    if shutil.which("ssh") is None:
        raise UserError(
            "there is no ssh here: it is not installed",
            where="--to ssh",
            remedy="apt-get install openssh-client, or what your system calls it",
        )
