"""The endpoint of a rendezvous: an address of the first node that the others can reach, and a free port."""

import hashlib
import socket
from collections.abc import Callable

from drawbar.jobs.node.network_interfaces import infiniband, interface_address, is_free

PORTS = range(15000, 32000)
"""Ports below those that the kernel gives to outgoing connections: such a connection could take a port after it was
found free, and before the store listens at it."""
_TRIES = 200


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
