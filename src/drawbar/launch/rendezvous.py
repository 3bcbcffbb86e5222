"""``Rendezvous``: the parameters by which the launchers of a job's nodes find one another."""

import json
import os
from collections.abc import MutableMapping
from dataclasses import asdict, dataclass

VARIABLE = "DRAWBAR_RENDEZVOUS"
"""Environment variable: the rendezvous that ``drawbar train`` takes part in, as JSON."""


def launch_id_of(number: str) -> str:
    """The launch id of the scheduler's job with this number."""
    return f"drawbar-{number}"


@dataclass(frozen=True)
class Rendezvous:
    """One node's part in a job of several nodes."""

    launch_id: str
    """The same on all nodes. Over ssh, a new one for each launch; for a scheduler's job, ``launch_id_of`` its number,
    and so the same after each restart of the job (``restart_number``)."""
    endpoint: str
    """``address:port`` of the first node."""
    nodes: int
    node: int
    """Number of this node. Node 0, the first, hosts the store where the nodes meet."""
    address: str
    """The address at which the others reach this node."""
    names: tuple[str, ...] = ()
    """The names of all nodes, in order, as Slurm or the list of hosts calls them; empty if unknown."""

    def name(self, node: int) -> str:
        """The name of a node in messages."""
        return self.names[node] if self.names else f"{node + 1} of {self.nodes}"

    def to_environment(self, environ: MutableMapping[str, str] = os.environ) -> None:
        """Write it to the environment of the program that this process starts or execs (``drawbar train``)."""
        environ[VARIABLE] = json.dumps(asdict(self))

    @staticmethod
    def from_environment(environ: MutableMapping[str, str] = os.environ) -> "Rendezvous | None":
        """Read the rendezvous from the environment, and remove it there: it is for one launcher, not for the ranks that
        it starts."""
        text = environ.pop(VARIABLE, None)
        if text is None:
            return None
        values = json.loads(text)
        return Rendezvous(**{**values, "names": tuple(values["names"])})
