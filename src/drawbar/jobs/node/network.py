"""How the nodes of a job reach one another: the network interfaces of this machine, queried from the kernel and not
from a program whose output would have to be parsed; the endpoint of a rendezvous; and the route to it
(``NetworkRoute``)."""

import fcntl
import hashlib
import socket
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from drawbar.launch.rendezvous import Rendezvous

PORTS = range(15000, 32000)
"""Ports below those that the kernel gives to outgoing connections: such a connection could take a port after it was
found free, and before the store listens at it."""
_TRIES = 200
GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915
_INFINIBAND = "32"  # ARPHRD_INFINIBAND
_SYSFS = Path("/sys/class/net")


def interface_address(name: str) -> str | None:
    """The first IPv4 address of an interface; None if it has none or does not exist."""
    request = struct.pack("256s", name.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])


def interfaces() -> dict[str, str]:
    """The IPv4 address of every interface that has one."""
    found = {name: interface_address(name) for _, name in socket.if_nameindex()}
    return {name: address for name, address in found.items() if address is not None}


def is_infiniband(name: str) -> bool:
    """Whether an interface is InfiniBand, and up."""
    return read_text(_SYSFS / name / "type") == _INFINIBAND and read_text(_SYSFS / name / "operstate") == "up"


def infiniband() -> str | None:
    """An InfiniBand interface that is up and has an address."""
    return next(filter(is_infiniband, sorted(interfaces())), None)


def address_towards(host: str) -> str:
    """The address that this machine sends from to reach ``host``. Raises OSError if there is no way."""
    address = socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_DGRAM)[0][4][0]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # sends nothing: the kernel only looks for a route
        return str(probe.getsockname()[0])


def address_of_host_name() -> str | None:
    """What gloo would take for this machine's address: that of its host name."""
    try:
        return str(socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)[0][4][0])
    except OSError:
        return None


def is_free(port: int) -> bool:
    """Whether a server could listen on the port, on all addresses."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the store: a restart uses the same port
        try:
            server.bind(("", port))
            server.listen(1)
        except OSError:
            return False
    return True


def choose_port(job: str, free: Callable[[int], bool] = is_free) -> int:
    """A port that is free on this machine. Jobs that start at the same time look at different ones.

    Raises:
        OSError: none of many is free.
    """
    for attempt in range(_TRIES):
        digest = hashlib.sha256(f"{job}/{attempt}".encode()).digest()
        port = PORTS[int.from_bytes(digest[:8], "big") % len(PORTS)]
        if free(port):
            return port
    raise OSError(f"none of {_TRIES} ports between {PORTS.start} and {PORTS.stop} is free")


def choose_address(name: str, interface: str | None) -> str:
    """The address of this machine that the other nodes should connect to.

    Raises:
        OSError: the interface has no address, or the name has none.
    """
    chosen = interface or infiniband()
    if chosen is None:
        return str(socket.getaddrinfo(name, None, socket.AF_INET)[0][4][0])
    address = interface_address(chosen)
    if address is None:
        raise OSError(f"the interface {chosen} has no IPv4 address (cluster.interface)")
    return address


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


def read_text(path: Path) -> str:
    """The text of a kernel file; empty if it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
