"""Runs on every node of a Slurm job, once: finds the way to the first node, and becomes the command.

srun … python -m drawbar.launch.node ADDRESS:PORT CONFIG COMMAND [ARGUMENT]...

CONFIG is the file that the configuration is written to, which comes in an environment variable.
"""

import base64
import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from drawbar.config.imports import SNAPSHOT
from drawbar.launch.network import address_of_host_name, address_towards, interfaces
from drawbar.launch.rendezvous import Rendezvous, job_name

GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
NODES = "DRAWBAR_NODES"
"""Environment variable: the names of all nodes, in Slurm's order. The script asks for them once: not every node can."""
CONFIG = "DRAWBAR_CONFIG"
"""Environment variable: the configuration of the run, as YAML in base64."""


@dataclass(frozen=True)
class NetworkRoute:
    """How a node reaches the first one."""

    address: str
    """Its own, on that way."""
    interface: str | None
    """None where no interface has the address as its first."""
    variables: dict[str, str]
    """What to set so that gloo and NCCL take the same way."""


def find_way(head: str, environ: Mapping[str, str]) -> NetworkRoute:
    """The way to the machine ``head``. What the user has set stays.

    Raises:
        OSError: there is none.
    """
    address = address_towards(head)
    known = interfaces()
    interface = next((name for name, own in known.items() if own == address), None)
    variables: dict[str, str] = {}
    if interface is not None:
        if GLOO not in environ and address_of_host_name() != address:
            variables[GLOO] = interface
        others = [name for name in known if name not in (interface, "lo") and not name.startswith("docker")]
        if NCCL not in environ and (others or interface == "lo"):  # NCCL never takes lo, and may take any other
            variables[NCCL] = interface
    return NetworkRoute(address, interface, variables)


def describe(way: NetworkRoute, meeting: Rendezvous, environ: Mapping[str, str]) -> str:
    """One line for the job's log."""
    kept = [f"{name}={environ[name]} was set already" for name in (GLOO, NCCL) if name in environ]
    said = [f"{name}={value}" for name, value in way.variables.items()] + kept
    return (
        f"drawbar: node {meeting.node + 1} of {meeting.nodes}, {environ.get('SLURMD_NODENAME', socket.gethostname())}: "
        f"meets the others at {meeting.endpoint} over {way.interface or 'an interface'} ({way.address})"
        + (f"; {', '.join(said)}" if said else "")
    )


def write_config(path: Path, node: int) -> None:
    """Write the configuration down, whole or not at all. Nodes may do it at the same time, in the same folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{node}.tmp")
    draft.write_bytes(base64.b64decode(os.environ.pop(CONFIG)))
    os.replace(draft, path)


def main(arguments: list[str]) -> NoReturn:
    endpoint, config, *command = arguments
    nodes, node = int(os.environ["SLURM_STEP_NUM_NODES"]), int(os.environ["SLURM_NODEID"])
    head = endpoint.rpartition(":")[0]
    host = os.environ.get("SLURMD_NODENAME", socket.gethostname())
    try:
        way = find_way(head, os.environ)
    except OSError as error:
        fix = "set cluster.interface to a network that all nodes are on"
        _refuse(f"node {host} has no way to the first node, {head}: {error}", fix)
    try:
        write_config(Path(config), node)
    except OSError as error:
        _refuse(f"node {host} cannot write the configuration of the run: {error}", "set run.dir to another folder")
    snapshot = os.environ.get(SNAPSHOT)
    if snapshot is not None and not Path(snapshot).is_dir():
        fix = "set run.dir to a folder that all nodes share, or submit without --snapshot"
        _refuse(f"node {host} has no copy of the code that was submitted: {snapshot}", fix)
    names = tuple(os.environ.get(NODES, "").split())
    job = job_name(os.environ["SLURM_JOB_ID"])
    meeting = Rendezvous(job, endpoint, nodes, node, way.address, names if len(names) == nodes else ())
    print(describe(way, meeting, os.environ), flush=True)
    os.environ.update(way.variables)
    if nodes > 1:
        meeting.announce()
    os.execvp(command[0], command)


def _refuse(what: str, fix: str) -> NoReturn:
    print(f"error: {what}\n  fix:   {fix}", file=sys.stderr)
    sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
