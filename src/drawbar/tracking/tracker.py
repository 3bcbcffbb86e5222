"""What a tracker is, and all trackers by name."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from drawbar.util.registry import Registry


@dataclass(frozen=True)
class TrackedRun:
    """The run, as its trackers see it when it starts or goes on."""

    folder: Path
    """The run directory; it exists."""
    settings: Mapping[str, Any]
    """The whole configuration, as plain values by section."""
    resume_step: int | None = None
    """Step of the checkpoint that the run goes on from; None where it starts from the beginning."""
    evaluated: bool = True
    """False where the run will evaluate the step of that checkpoint: scores that an earlier process has written for it
    are then to be dropped."""
    id: str = ""
    """For background trackers: an id that a run keeps when it goes on; another if it starts from the beginning."""

    @property
    def name(self) -> str:
        """``run.name``."""
        return self.folder.name


class Tracker(ABC):
    """Receives what a run measures.

    Every rank makes each tracker before anything is trained, with its options as keyword arguments: so the constructor
    refuses wrong ones (``UserError``, ``TypeError`` or ``ValueError``), and does nothing else. The other methods are
    called on rank 0 alone. What they raise is a warning; only ``start``, if not in the background, may end the run.
    """

    packages: ClassVar[Mapping[str, str]] = {}
    """Modules that it imports, each with what to ``pip install`` for it. One that is missing is an error at once."""
    in_background: ClassVar[bool] = True
    """Whether its methods are called in a thread of their own: they may wait for a network, and get the values of
    each call of ``log`` once, even if a killed run repeats steps. Otherwise ``start`` must itself discard values after
    ``resume_step``."""

    @abstractmethod
    def start(self, run: TrackedRun) -> None:
        """Once, before anything else."""

    @abstractmethod
    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Keep ``values`` by their flat names, such as ``train/loss``, for the state after ``step`` steps."""

    @abstractmethod
    def finish(self) -> None:
        """Write what is still buffered: the run ends, or will go on in another process."""

    def service_problem(self) -> str | None:
        """For a tracker that logs to a server: why it does not answer, with its name; None where it does. It says so
        within seconds. In the background, it is called at the end of a run while another call has not come back."""
        return None


TRACKERS: Registry[type[Tracker]] = Registry(
    "tracker",
    "drawbar.trackers",
    {
        "mlflow": "drawbar.tracking.mlflow:MLflowTracker",
        "tensorboard": "drawbar.tracking.tensorboard:TensorBoardTracker",
        "trackio": "drawbar.tracking.trackio:TrackioTracker",
        "wandb": "drawbar.tracking.wandb:WandbTracker",
    },
)
"""Names for ``tracking.trackers``. A tracker of your own is also found as ``package.module:Class``."""
