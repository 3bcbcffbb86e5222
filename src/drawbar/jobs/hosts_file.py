"""Hosts as users write them: ``name:slots`` in settings and on the command line, ``name slots=N`` in a hostfile."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from drawbar.errors import UserError

_NAME = re.compile(r"([A-Za-z0-9_][A-Za-z0-9_.-]*@)?[A-Za-z0-9_][A-Za-z0-9_.-]*")
"""ssh cannot mistake such a name for an option, and a shell reads it as one plain word."""
_LONGEST_NAME = 255


@dataclass(frozen=True)
class Host:
    """A machine that ssh reaches, and how many processes it has room for."""

    name: str
    """As ssh knows it: a name, an address, an alias of the user's ssh configuration; ``user@`` may be in front."""
    slots: int | None = None
    """None if not given."""

    def __str__(self) -> str:
        """As :func:`parse_host` reads it."""
        return self.name if self.slots is None else f"{self.name}:{self.slots}"

    @property
    def machine(self) -> str:
        return self.name.rpartition("@")[2]


def parse_host(text: str) -> Host:
    """``name`` or ``name:slots``. Raises ValueError with the reason."""
    name, colon, slots = text.partition(":")
    return Host(check_name(name), check_slots(slots) if colon else None)


def check_name(name: str) -> str:
    """``name`` itself. Raises ValueError if it cannot be the name of a host."""
    if len(name) > _LONGEST_NAME or not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no name of a host; expected one such as gpu1, gpu1.example.org or me@gpu1")
    return name


def check_slots(text: str) -> int:
    """The number of slots. Raises ValueError if ``text`` is not a whole number from 1 to 99,999."""
    if not re.fullmatch(r"[1-9][0-9]{0,4}", text):
        raise ValueError(f"expected a whole number of slots, 1 or more, got {text!r}")
    return int(text)


def check_hosts(hosts: Iterable[Host]) -> list[Host]:
    """The same hosts. Raises ValueError if a machine occurs twice."""
    known: dict[str, Host] = {}
    for host in hosts:
        if host.machine in known:
            raise ValueError(f"the host {host.machine} comes twice; give it once, with all of its slots")
        known[host.machine] = host
    return list(known.values())


def parse_hosts(text: str) -> list[Host]:
    """The value of ``--hosts``: ``name:slots`` with commas between.

    Raises:
        UserError: a part of it is not a host, or a host occurs twice.
    """
    try:
        return check_hosts(parse_host(part.strip()) for part in text.split(","))
    except ValueError as error:
        raise UserError(
            str(error), where=f"--hosts {text}", remedy="write hosts with their slots, such as --hosts gpu1:8,gpu2:8"
        ) from error


def read_hostfile(path: Path) -> list[Host]:
    """The hosts of a file in the format of MPI and DeepSpeed: ``name slots=N`` lines, comments after ``#``, empty
    lines.

    Raises:
        UserError: the file cannot be read, has no host, or has a line that is not a host (the error gives its number).
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"the hostfile cannot be read: {error}",
            where=str(path),
            remedy="write a text file with a line such as `gpu1 slots=8` for each host",
        ) from error
    hosts: list[Host] = []
    for number, line in enumerate(lines, start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            hosts = check_hosts([*hosts, _parse_line(words)])
        except ValueError as error:
            raise UserError(
                str(error), where=f"{path}:{number}", remedy="write each host once, as `gpu1 slots=8`"
            ) from error
    if not hosts:
        raise UserError("the hostfile names no host", where=str(path), remedy="write a line such as `gpu1 slots=8`")
    return hosts


def _parse_line(words: list[str]) -> Host:
    name, *rest = words
    if not rest:
        return Host(check_name(name))
    key, equals, slots = rest[0].partition("=")
    if len(rest) > 1 or key != "slots" or not equals:
        raise ValueError(f"expected `{name} slots=N`, got {' '.join(words)!r}")
    return Host(check_name(name), check_slots(slots))
