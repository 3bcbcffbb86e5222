"""Network interfaces of this machine, asked of the kernel and not of a program whose output would have to be read."""

import fcntl
import socket
import struct
from pathlib import Path

_SIOCGIFADDR = 0x8915
_INFINIBAND = "32"  # ARPHRD_INFINIBAND
_SYSFS = Path("/sys/class/net")


def interface_address(name: str) -> str | None:
    """The first IPv4 address of an interface; None where it has none or does not exist."""
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
    return _read(_SYSFS / name / "type") == _INFINIBAND and _read(_SYSFS / name / "operstate") == "up"


def infiniband() -> str | None:
    """An InfiniBand interface that is up and has an address."""
    return next(filter(is_infiniband, sorted(interfaces())), None)


def address_towards(host: str) -> str:
    """The address that this machine sends from to reach ``host``. Raises OSError where there is no way."""
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


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
