"""How this machine would reach others."""

import os
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from drawbar.doctor.finding import Finding, Fix, Level
from drawbar.launch.node.network_interfaces import address_towards, interface_address, is_free, is_infiniband

SECTION = "Network"
USUAL_PORT = 29500
"""Where torchrun meets unless it is told otherwise."""
_SOMEWHERE = "198.51.100.1"
"""A reserved address (RFC 5737): the route to it is the default route."""
_SOCKET_NAMES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


@dataclass(frozen=True)
class Interface:
    name: str
    address: str
    """IPv4; empty where it has none."""
    infiniband: bool


@dataclass(frozen=True)
class Network:
    """Facts."""

    host: str
    host_address: str
    """What the host name stands for; empty where nothing knows it."""
    interfaces: tuple[Interface, ...]
    first_node: str
    """The node at which the processes meet, by MASTER_ADDR or Slurm's list of nodes; it may be this machine. Empty
    where none is known."""
    first_node_address: str
    route_address: str
    """This machine's own address on the way there, or else on the way to anywhere; empty without a route."""
    port: int
    port_is_given: bool
    """By MASTER_PORT."""
    port_is_free: bool
    socket_names: tuple[tuple[str, str], ...]
    """Variables that name interfaces."""


def collect_network(environ: Mapping[str, str] = os.environ) -> Network:
    """Sends nothing but look-ups of host names: a route is asked of the kernel."""
    host = socket.gethostname()
    first_node = environ.get("MASTER_ADDR") or first_host(environ.get("SLURM_JOB_NODELIST", ""))
    first_node_address = _resolve(first_node) if first_node else ""
    port = environ.get("MASTER_PORT", "")
    number = int(port) if port.isdigit() and 0 < int(port) < 65536 else USUAL_PORT
    return Network(
        host=host,
        host_address=_resolve(host),
        interfaces=tuple(
            Interface(name, interface_address(name) or "", is_infiniband(name)) for _, name in socket.if_nameindex()
        ),
        first_node=first_node,
        first_node_address=first_node_address,
        route_address=_route(first_node_address or _SOMEWHERE),
        port=number,
        port_is_given="MASTER_PORT" in environ,
        port_is_free=is_free(number),
        socket_names=tuple((name, environ[name]) for name in _SOCKET_NAMES if environ.get(name)),
    )


def first_host(nodes: str) -> str:
    """``n[07-09,12],m1`` → ``n07``"""
    match = re.match(r"([^,\[]+)(?:\[([^\],-]+))?", nodes)
    return "".join(part or "" for part in match.groups()) if match else ""


def _resolve(host: str) -> str:
    try:
        return socket.gethostbyname(host)
    except (OSError, UnicodeError):
        return ""


def _route(host: str) -> str:
    try:
        return address_towards(host)
    except OSError:
        return ""


def choose_interface(network: Network) -> tuple[Interface | None, str]:
    """The interface for nodes to talk over, and why: InfiniBand if it has an address, else that to the first node."""
    addressed = [interface for interface in network.interfaces if interface.address]
    for interface in addressed:
        if interface.infiniband:
            return interface, "InfiniBand"
    if network.route_address:
        # only the first address of each interface is known, and only on Linux: route_address may be none of them
        nameless = Interface("", network.route_address, False)
        on_the_way = (interface for interface in addressed if interface.address == network.route_address)
        way = f"the way to {network.first_node}" if network.first_node else "the way to other networks"
        return next(on_the_way, nameless), way
    others = [interface for interface in addressed if not interface.address.startswith("127.")]
    if others:
        return others[0], "there is no route to networks beyond it"
    return next(iter(addressed), None), "there is no network but this machine's own"


def check_network(network: Network, many_hosts: bool, opens_port: bool) -> Iterator[Finding]:
    """Args:
    many_hosts: whether the run is on several machines.
    opens_port: whether this process is to listen at MASTER_PORT.
    """
    chosen, why = choose_interface(network)
    if chosen is None:
        up = Fix("ip link set lo up", "processes on one machine meet there, too")
        yield Finding(SECTION, "interface", Level.PROBLEM, "no interface has an address", fix=up)
    else:
        alone = chosen.address.startswith("127.")
        level = Level.PROBLEM if alone and many_hosts else Level.OK
        fix = Fix("ip route", "there must be a way to the other nodes") if level is Level.PROBLEM else None
        yield Finding(SECTION, "interface", level, f"{chosen.name} ({chosen.address})".strip(), why, fix)
    for variable, value in network.socket_names:
        yield _socket_name(variable, value, network, chosen)
    yield _host_name(network, many_hosts)
    if network.first_node and not network.first_node_address:
        what = f"{network.first_node} cannot be resolved"
        fix = Fix(f"getent hosts {network.first_node}", "correct MASTER_ADDR, or add the name to /etc/hosts")
        yield Finding(SECTION, "first node", Level.PROBLEM, what, "the processes meet there", fix)
    yield _port(network, opens_port)


def _socket_name(variable: str, value: str, network: Network, chosen: Interface | None) -> Finding:
    names = [interface.name for interface in network.interfaces]
    excluded = value.startswith("^")
    wanted = value.lstrip("^=").split(",")
    if variable.startswith("NCCL") and not value.lstrip("^").startswith("="):
        found = [name for name in names if any(name.startswith(part) for part in wanted)]
    else:
        found = [name for name in names if name in wanted]
    if excluded or found:
        return Finding(SECTION, variable, Level.OK, f"{value}", "set in the environment")
    right = (
        Fix(f"export {variable}={chosen.name}", f"or: unset {variable}")
        if chosen and chosen.name
        else Fix(f"unset {variable}")
    )
    what = f"{variable}={value}, but there is no such interface here: {', '.join(names)}"
    return Finding(SECTION, variable, Level.PROBLEM, what, "processes would not meet", right)


def _host_name(network: Network, many_hosts: bool) -> Finding:
    line = Fix(f"echo '{network.route_address or '127.0.0.1'} {network.host}' | sudo tee -a /etc/hosts")
    if not network.host_address:
        what = f"nothing knows the address of {network.host}, which is this machine's name"
        return Finding(SECTION, "host name", Level.WARNING, what, "gloo looks it up", line)
    what = f"{network.host} is {network.host_address}"
    if network.host_address.startswith("127.") and many_hosts:
        why = "other nodes would be told to look for this one at themselves"
        chosen, _ = choose_interface(network)
        fix = Fix(f"export GLOO_SOCKET_IFNAME={chosen.name}") if chosen and chosen.name else line
        named = any(name == "GLOO_SOCKET_IFNAME" for name, _ in network.socket_names)
        if not named:
            return Finding(SECTION, "host name", Level.WARNING, what, why, fix)
    return Finding(SECTION, "host name", Level.OK, what)


def _port(network: Network, opens_port: bool) -> Finding:
    if network.port_is_free:
        return Finding(SECTION, "port", Level.OK, f"{network.port} is free")
    if network.port_is_given and not opens_port:
        return Finding(SECTION, "port", Level.OK, f"{network.port}", "MASTER_PORT; another process opens it")
    if opens_port:
        fix = Fix(f"ss -ltnp 'sport = :{network.port}'", f"end that program, or export MASTER_PORT={_free_port()}")
        what = f"{network.port} (MASTER_PORT) is taken by another program"
        return Finding(SECTION, "port", Level.PROBLEM, what, "the processes would meet there", fix)
    fix = Fix("", "give torchrun --standalone, or --rdzv-endpoint=HOST:PORT with another port")
    what = f"{network.port} is taken"
    return Finding(SECTION, "port", Level.NOTE, what, "torchrun's usual one; `drawbar train` takes a free one", fix)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def has_other_hosts(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the environment is that of a run on several machines."""
    world, local = environ.get("WORLD_SIZE", "1"), environ.get("LOCAL_WORLD_SIZE", environ.get("WORLD_SIZE", "1"))
    return environ.get("SLURM_JOB_NUM_NODES", "1") != "1" or world != local


def is_this_host(address: str, interfaces: Sequence[Interface]) -> bool:
    """Whether an address is one of this machine's own."""
    return address.startswith("127.") or any(interface.address == address for interface in interfaces)
