"""Runs on every node of a Slurm job, once: finds the route to the first node, and becomes the command.

    srun … python -m drawbar.jobs.node.each_node ADDRESS:PORT CONFIG COMMAND [ARGUMENT]...

CONFIG is the path that the configuration is written to; its text comes in the variable DRAWBAR_CONFIG.
"""

import base64
import os
import socket
import sys
from pathlib import Path
from typing import NoReturn

from drawbar.config.io.user_code import SNAPSHOT
from drawbar.jobs.node.network import describe, find_route
from drawbar.launch.rendezvous import Rendezvous, launch_id_of
from drawbar.util.atomic_files import write_atomically

CONFIG = "DRAWBAR_CONFIG"
"""Environment variable: the configuration of the run, as YAML in base64."""
NODES = "DRAWBAR_NODES"
"""Environment variable: all nodes by name, in Slurm's order. The batch script sets it: not all nodes can ask Slurm."""


def main(arguments: list[str]) -> NoReturn:
    endpoint, config, *command = arguments
    nodes, node = int(os.environ["SLURM_STEP_NUM_NODES"]), int(os.environ["SLURM_NODEID"])
    head = endpoint.rpartition(":")[0]
    host = os.environ.get("SLURMD_NODENAME", socket.gethostname())
    try:
        route = find_route(head, os.environ)
    except OSError as error:
        fix = "set cluster.interface to a network that all nodes are on"
        _refuse(f"node {host} has no route to the first node, {head}: {error}", fix)
    try:
        write_atomically(Path(config), base64.b64decode(os.environ.pop(CONFIG)))
    except OSError as error:
        _refuse(f"node {host} cannot write the configuration of the run: {error}", "set run.dir to another folder")
    snapshot = os.environ.get(SNAPSHOT)
    if snapshot is not None and not Path(snapshot).is_dir():
        fix = "set run.dir to a folder that all nodes share, or submit without --snapshot"
        _refuse(f"node {host} has no copy of the code that was submitted: {snapshot}", fix)
    names = tuple(os.environ.get(NODES, "").split())
    job = launch_id_of(os.environ["SLURM_JOB_ID"])
    rendezvous = Rendezvous(job, endpoint, nodes, node, route.address, names if len(names) == nodes else ())
    print(describe(route, rendezvous, os.environ), flush=True)
    os.environ.update(route.variables)
    if nodes > 1:
        rendezvous.to_environment()
    os.execvp(command[0], command)


def _refuse(what: str, fix: str) -> NoReturn:
    print(f"error: {what}\n  fix:   {fix}", file=sys.stderr)
    sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
