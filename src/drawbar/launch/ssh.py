"""A job as ssh hosts take it: for each host a command that starts a shell there, and what that shell reads.

The command is the same few words for all jobs. Everything else goes to the host over the standard input of ssh, and
stands in no list of processes: first a bash script, which ends by becoming :mod:`drawbar.launch.remote`, and then, on
the same standard input, the order for that program.
"""

import re
import secrets
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from drawbar.config.cluster import ClusterSection
from drawbar.config.hosts import Host
from drawbar.errors import UserError
from drawbar.launch.job import Job
from drawbar.launch.order import Order, say

_OPTIONS = {
    "BatchMode": "yes",  # nobody is there to answer for each host
    "ControlMaster": "no",  # one that this run would start stays when the run is over
    "RemoteCommand": "none",
    "ClearAllForwardings": "yes",  # a second connection could not listen on the same port
    "ConnectTimeout": "10",
    "ServerAliveInterval": "3",  # a host that is gone is noticed within nine seconds
    "ServerAliveCountMax": "3",
    "AddressFamily": "inet",  # the nodes meet over IPv4
}
_HIDDEN = "***"


@dataclass(frozen=True)
class Start:
    """How one host is started."""

    host: Host
    command: tuple[str, ...]
    """The ssh command."""
    script: bytes
    """What bash reads there."""
    order: Order


def render(job: Job, cluster: ClusterSection, hosts: Sequence[Host]) -> list[Start]:
    """The starts of all hosts."""
    order = Order(
        job=f"drawbar-{secrets.token_hex(8)}",
        node=0,
        names=tuple(host.name for host in hosts),
        argv=job.argv,
        config=job.config,
        workdir=str(job.workdir),
        environment=job.environment,
        interface=cluster.interface,
        script=next((word for word in job.argv[1:2] if word.endswith(".py")), None),
    )
    script = _script(job, cluster)
    return [
        Start(host, ssh_command(cluster, host), script, replace(order, node=node)) for node, host in enumerate(hosts)
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


def _script(job: Job, cluster: ClusterSection) -> bytes:
    lines = [f"export {name}={shlex.quote(value)}" for name, value in cluster.environment.items()]
    before = [*(f"module load {shlex.quote(module)} || exit" for module in cluster.modules), *cluster.setup]
    if before:  # none of them may read what follows
        lines += ["{", *before, "} < /dev/null"]
    if job.container is not None:
        lines += job.container.script()
    inside = "" if job.container is None else '"${container[@]}" '
    lines.append(f"exec {inside}{shlex.quote(job.python)} -P -m drawbar.launch.remote")
    return "\n".join([*lines, ""]).encode(errors="surrogateescape")


def forwarded(patterns: Iterable[str], environ: Mapping[str, str], set_already: Iterable[str]) -> dict[str, str]:
    """The variables of ``environ`` that the patterns name: whole names, or beginnings with ``*`` behind."""
    shapes = [re.compile(re.escape(pattern).replace(r"\*", ".*")) for pattern in patterns]
    taken = set(set_already)
    return {
        name: value
        for name, value in sorted(environ.items())
        if name not in taken and any(shape.fullmatch(name) for shape in shapes)
    }


def describe(name: str, starts: Sequence[Start], commands: Sequence[Sequence[str]]) -> str:
    """What would run, for people and for bash: the commands, and what each host reads."""
    first = starts[0]
    hidden = dict.fromkeys(first.order.environment, _HIDDEN)
    order = say(order=asdict(replace(first.order, environment=hidden, config="", job="drawbar-…"))).decode().rstrip()
    counts = "; ".join(f"{start.host.name} is node {start.order.node}" for start in starts)
    parts = [
        f"# Run {name} on {len(starts)} host{'s' * (len(starts) > 1)}; made by drawbar submit.",
        "# These start at the same time, and each ends with its connection:",
        *(shlex.join(command) for command in commands),
        "",
        "# The bash of each host reads, over the connection:",
        first.script.decode(errors="surrogateescape").rstrip(),
        "",
        f"# What it becomes reads one line more, in which config is the text below, and node its own number: {counts}.",
        f"# {order}",
        "#",
        *(f"# {line}".rstrip() for line in first.order.config.splitlines()),
        "",
    ]
    return "\n".join(parts)


def check_programs(program: str, path: str | None) -> None:
    """Raises UserError where ``program`` was not found, which gave ``path`` None."""
    if path is None:
        raise UserError(
            f"there is no {program} here: it is not installed",
            where="--to ssh",
            remedy=f"apt-get install {'openssh-client' if program == 'ssh' else program}, or what your system calls it",
        )
