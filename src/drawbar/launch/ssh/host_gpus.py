"""How many GPUs ssh hosts have: torch counts them there, in the environment that the run would have."""

import json
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from drawbar.config.io.hosts_file import Host
from drawbar.launch.job import Job
from drawbar.launch.ssh.protocol import ANSWER
from drawbar.launch.ssh.ssh_command import no_answer, no_start, ssh_command, start_script


def count_gpus(job: Job, hosts: Sequence[Host], timeout: float) -> list[int]:
    """The GPUs of each host, which are all asked at the same time.

    Args:
        timeout: seconds that a host has to answer.

    Raises:
        UserError: a host cannot be reached, has no drawbar, or does not answer; all such hosts are named.
    """
    environment = json.dumps(dict(job.environment)).encode() + b"\n"
    question = start_script(job, "drawbar.launch.node.entry.gpu_count") + environment

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
