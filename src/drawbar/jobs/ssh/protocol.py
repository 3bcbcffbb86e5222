"""Messages between the submitting process and the program that it starts on each host: a line of JSON for each.

They travel over the connection itself and not in a command line, which anybody on a machine can read.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

ANSWER = b"\x1edrawbar "
"""Begins a message for the submitting process, among the lines of output."""
HEARTBEAT_SECONDS = 10
"""How often the submitting process says that it is still there."""
GRACE = 5.0
"""Seconds that a command has to end by itself before it is killed."""


@dataclass(frozen=True)
class HostJob:
    """What one host should run. The configuration is in it, as the host may lack the file."""

    launch_id: str
    """For the rendezvous: the same on all hosts, and another one for each launch. Not the number of the job."""
    node: int
    names: tuple[str, ...]
    """Of all hosts, in their order."""
    argv: tuple[str, ...]
    """The command; the path of the configuration follows it."""
    config: str
    """As YAML."""
    workdir: str
    environment: Mapping[str, str]
    """Variables to set besides those that the host has."""
    interface: str | None = None
    program: str | None = None
    """The user's own program, which the host must have."""
    patience: float = 60
    """Seconds without a message from the submitting process after which it counts as gone."""

    @property
    def nodes(self) -> int:
        return len(self.names)

    def message(self) -> bytes:
        return host_message(job=asdict(self))

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> "HostJob":
        return HostJob(**{**values, "argv": tuple(values["argv"]), "names": tuple(values["names"])})


def host_message(**values: Any) -> bytes:
    """A message to a host."""
    return json.dumps(values).encode() + b"\n"  # in ASCII: a job may contain file names that are not UTF-8


def submitter_message(**values: Any) -> bytes:
    """A message to the submitting process."""
    return ANSWER + host_message(**values)
