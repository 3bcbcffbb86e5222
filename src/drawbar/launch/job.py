"""``Job``: what is to run, on how many machines, before any launcher puts it into its own words."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

FOLDER = "launch"
"""Inside a run directory: what the launchers write."""


@dataclass(frozen=True)
class Job:
    """A command that runs once on each node and starts that node's processes."""

    name: str
    argv: tuple[str, ...]
    """The command, its interpreter first."""
    workdir: Path
    """Absolute, as is ``run_dir``."""
    run_dir: Path
    nodes: int = 1
    processes: int = 1
    """On each node."""
    environment: Mapping[str, str] = field(default_factory=dict)
    grace: int = 60
    """Seconds that the other nodes have to end by themselves after the first has: longer than they wait for one whose
    program ended before it could answer."""

    @property
    def python(self) -> str:
        """The interpreter, which runs drawbar's own parts on the nodes, too."""
        return self.argv[0]

    @property
    def folder(self) -> Path:
        return self.run_dir / FOLDER
