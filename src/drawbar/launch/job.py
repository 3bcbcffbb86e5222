"""``Job``: what is to run, on how many machines, before any launcher puts it into its own words."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # what runs on the nodes reads FOLDER alone, and should not wait for the configuration's modules
    from drawbar.launch.container import Container

FOLDER = "launch"
"""Inside a run directory: what the launchers write."""


def config_file(run_dir: Path, number: str) -> Path:
    """The configuration of a job, or of an element, as it was submitted."""
    return run_dir / FOLDER / f"config-{number}.yaml"


@dataclass(frozen=True)
class Job:
    """A command that runs once on each node and starts that node's processes."""

    name: str
    argv: tuple[str, ...]
    """The command, its interpreter first; the path of the configuration comes behind it, and then ``settings``."""
    workdir: Path
    """Absolute, as is ``run_dir``."""
    run_dir: Path
    config: str = ""
    """The whole configuration as YAML: what its files say when the job starts is of no matter."""
    nodes: int = 1
    processes: int = 1
    """On each node."""
    settings: tuple[str, ...] = ()
    """``KEY=VALUE``, over the configuration."""
    environment: Mapping[str, str] = field(default_factory=dict)
    container: "Container | None" = None
    """Where ``argv`` runs, and drawbar's own parts; None: on the node itself."""
    elements: "tuple[Job, ...]" = ()
    """The runs of a sweep; this job then says what they all ask for. Each has its name, configuration, settings and
    directory."""
    at_once: int | None = None
    """So many elements run at the same time, at most."""
    version: str | None = None
    """Of the user's own code, where git knows it."""
    snapshot: Path | None = None
    """The copy of that code which the job uses."""
    allocation: str | None = None
    """The number of the allocation that it runs in, at a terminal; None where it waits in a queue."""
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
