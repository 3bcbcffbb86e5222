"""What the launcher and the program that it starts on each host say to each other: a line of JSON each time.

All of it travels over the connection itself and none of it in a command line, which anybody on a machine can read.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

ANSWER = b"\x1edrawbar "
"""Begins what is for the launcher, among the lines of output."""
HEARTBEAT_SECONDS = 10
"""How often the launcher says that it is still there."""


@dataclass(frozen=True)
class Order:
    """What a host is to run. The configuration is in it, as the host may have no file of it."""

    job: str
    """The same on all hosts, and another one for each launch."""
    node: int
    names: tuple[str, ...]
    """Of all hosts, in their order."""
    argv: tuple[str, ...]
    """The command; the path of the configuration comes behind it."""
    config: str
    """As YAML."""
    workdir: str
    environment: Mapping[str, str]
    """Variables to set besides those that the host has."""
    interface: str | None = None
    script: str | None = None
    """The user's own program, which the host must have."""
    patience: float = 60
    """Seconds without a word from the launcher after which it counts as gone."""

    @property
    def nodes(self) -> int:
        return len(self.names)


def order_line(order: Order) -> bytes:
    return say(order=asdict(order))


def read_order(values: Mapping[str, Any]) -> Order:
    return Order(**{**values, "argv": tuple(values["argv"]), "names": tuple(values["names"])})


def say(**words: Any) -> bytes:
    """A line to a host."""
    return json.dumps(words).encode() + b"\n"  # in ASCII: an order may hold names of files that are no UTF-8


def answer(**words: Any) -> bytes:
    """A line to the launcher."""
    return ANSWER + say(**words)
