"""Renders a job for ssh hosts: for each host an ssh command that starts a shell, and the shell's standard input.

The command is the same few words for all jobs. Everything else goes to the host over the standard input of ssh, and
appears in no process list: first a bash script, which ends by becoming :mod:`drawbar.jobs.node.ssh_host`, and then, on
the same standard input, the message that says what that program is to run.
"""

import re
import secrets
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from drawbar.errors import ExitCode, UserError
from drawbar.jobs.hosts_file import Host
from drawbar.jobs.job import Job
from drawbar.jobs.settings import ClusterSection
from drawbar.jobs.ssh.protocol import HostJob, host_message

_OPTIONS = {
    "BatchMode": "yes",  # nobody is there to answer for each host
    "ControlMaster": "no",  # a master that this run started would stay when the run is over
    "RemoteCommand": "none",
    "ClearAllForwardings": "yes",  # a second connection could not listen on the same port
    "ConnectTimeout": "10",
    "ServerAliveInterval": "3",  # a host that is gone is noticed within nine seconds
    "ServerAliveCountMax": "3",
    "AddressFamily": "inet",  # the rendezvous is over IPv4
}
_HIDDEN = "***"
SSH_FAILED = 255
"""ssh's exit code where the connection is not made, or ends."""


@dataclass(frozen=True)
class RemoteStart:
    """How one host is started."""

    host: Host
    command: tuple[str, ...]
    """The ssh command."""
    script: bytes
    """What bash reads there."""
    host_job: HostJob


def remote_starts(job: Job, hosts: Sequence[Host]) -> list[RemoteStart]:
    """The starts of all hosts."""
    on_host = HostJob(
        launch_id=f"drawbar-{secrets.token_hex(8)}",
        node=0,
        names=tuple(host.name for host in hosts),
        argv=job.argv,
        config=job.config,
        workdir=str(job.workdir),
        environment=job.environment,
        interface=job.cluster.interface,
        program=next((word for word in job.argv[1:2] if word.endswith(".py")), None),
    )
    script = start_script(job, "drawbar.jobs.node.ssh_host")
    return [
        RemoteStart(host, ssh_command(job.cluster, host), script, replace(on_host, node=node))
        for node, host in enumerate(hosts)
    ]


def ssh_command(cluster: ClusterSection, host: Host) -> tuple[str, ...]:
    """What starts a shell on the host. ssh takes the first of two values, so the user's come before ours."""
    words = ["ssh", "-T"]
    if cluster.ssh_config is not None:
        words += ["-F", cluster.ssh_config]
    for name, value in [*cluster.ssh_options.items(), *_OPTIONS.items()]:
        words += ["-o", f"{name}={value}"]
    shell = "bash -l" if cluster.modules else "bash"  # a login shell knows the command module
    return (*words, "--", host.name, f"exec {shell}")  # `exec bash` is the same in every shell a user may have


def start_script(job: Job, module: str) -> bytes:
    """What bash reads on a host, to become a drawbar module in the environment of the job."""
    cluster = job.cluster
    lines = [f"export {name}={shlex.quote(value)}" for name, value in cluster.environment.items()]
    before = [*(f"module load {shlex.quote(module)} || exit" for module in cluster.modules), *cluster.setup]
    if before:  # none of these commands may read standard input: the host's job follows there
        lines += ["{", *before, "} < /dev/null"]
    if job.container is not None:
        lines += job.container.script()
    inside = "" if job.container is None else '"${container[@]}" '
    lines.append(f"exec {inside}{shlex.quote(job.python)} -P -m {module}")
    return "\n".join([*lines, ""]).encode(errors="surrogateescape")


def forwarded(patterns: Iterable[str], environ: Mapping[str, str], set_already: Iterable[str]) -> dict[str, str]:
    """The variables of ``environ`` that the patterns name: whole names, or prefixes followed by ``*``."""
    shapes = [re.compile(re.escape(pattern).replace(r"\*", ".*")) for pattern in patterns]
    taken = set(set_already)
    return {
        name: value
        for name, value in sorted(environ.items())
        if name not in taken and any(shape.fullmatch(name) for shape in shapes)
    }


def describe(name: str, starts: Sequence[RemoteStart]) -> str:
    """What would run, as text to read in bash's syntax: the ssh commands, and what each host reads."""
    first = starts[0]
    hidden = dict.fromkeys(first.host_job.environment, _HIDDEN)
    shown = asdict(replace(first.host_job, environment=hidden, config="", launch_id="drawbar-…"))
    numbers = "; ".join(f"{start.host.name} is node {start.host_job.node}" for start in starts)
    parts = [
        f"# Run {name} on {len(starts)} host{'s' * (len(starts) > 1)}; made by drawbar submit.",
        "# These start at the same time, and each ends with its connection:",
        *(shlex.join(start.command) for start in starts),
        "",
        "# The bash of each host reads, over the connection:",
        first.script.decode(errors="surrogateescape").rstrip(),
        "",
        f"# drawbar there reads one more line: in it config is the text below, and node the host's number: {numbers}.",
        f"# {host_message(job=shown).decode().rstrip()}",
        "#",
        *(f"# {line}".rstrip() for line in first.host_job.config.splitlines()),
        "",
    ]
    return "\n".join(parts)


def no_start(failed: Sequence[tuple[str, int, Sequence[bytes]]], where: str | None = None) -> UserError:
    """The error of hosts on which drawbar does not start: each one's name, exit code, and what was said."""
    lines, unreachable = [], False
    for name, code, errors in failed:
        unreachable |= code == SSH_FAILED
        said = [text for line in errors if (text := line.decode(errors="replace").strip())]
        kind = "ssh cannot reach it" if code == SSH_FAILED else f"drawbar does not start there, exit code {code}"
        lines.append(f"host {name}: {kind}: {said[-1] if said else 'it does not say why'}")
    return UserError(
        "\n".join(lines),
        where=where,
        remedy=f"make `ssh {failed[0][0]} true` work without a question: the name, the key, the host's key"
        if unreachable
        else "set cluster.python to a Python of the hosts that has drawbar, and cluster.setup to what it needs",
        exit_code=ExitCode.FAILED if unreachable else ExitCode.WRONG_REQUEST,
    )


def no_answer(names: Sequence[str], seconds: float) -> UserError:
    """The error of hosts that say nothing."""
    return UserError(
        f"no answer within {seconds:.0f}s from: {', '.join(names)}",
        remedy="look at what cluster.setup does there; a longer wait is launch.timeout=SECONDS",
        exit_code=ExitCode.FAILED,
    )
