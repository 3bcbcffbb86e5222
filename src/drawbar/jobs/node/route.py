"""``NetworkRoute``: how a node reaches the first one, and what makes gloo and NCCL take the same route."""

import socket
from collections.abc import Mapping
from dataclasses import dataclass

from drawbar.jobs.node.network_interfaces import address_of_host_name, address_towards, interfaces
from drawbar.launch.rendezvous import Rendezvous

GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"


@dataclass(frozen=True)
class NetworkRoute:
    """How a node reaches the first one."""

    address: str
    """The node's own address on that route."""
    interface: str | None
    """The interface with that address; None if no interface has it as its first address."""
    variables: dict[str, str]
    """What to set so that gloo and NCCL take the same route."""


def find_route(head: str, environ: Mapping[str, str]) -> NetworkRoute:
    """The route to the machine ``head``. What the user has set stays.

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


def describe(route: NetworkRoute, rendezvous: Rendezvous, environ: Mapping[str, str]) -> str:
    """One line for the job's log."""
    kept = [f"{name}={environ[name]} was set already" for name in (GLOO, NCCL) if name in environ]
    said = [f"{name}={value}" for name, value in route.variables.items()] + kept
    name = environ.get("SLURMD_NODENAME", socket.gethostname())
    return (
        f"drawbar: node {rendezvous.node + 1} of {rendezvous.nodes}, {name}: "
        f"meets the others at {rendezvous.endpoint} over {route.interface or 'an interface'} ({route.address})"
        + (f"; {', '.join(said)}" if said else "")
    )
