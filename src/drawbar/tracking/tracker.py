"""The base class of trackers, and all trackers by name."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from drawbar.util.registry import Registry


@dataclass(frozen=True)
class TrackedRun:
    """What trackers know of a run when it starts or resumes."""

    folder: Path
    """The run directory; it exists."""
    settings: Mapping[str, Any]
    """The whole configuration, as plain values by section."""
    resume_step: int | None = None
    """Step of the checkpoint that the run resumes from; None if it starts from the beginning."""
    evaluated: bool = True
    """False if the run will evaluate the step of that checkpoint: the tracker must then drop the scores that an earlier
    process wrote for it."""
    id: str = ""
    """For background trackers: an id that a run keeps when it resumes, but not if it starts from the beginning."""

    @property
    def name(self) -> str:
        """``run.name``."""
        return self.folder.name


class Tracker(ABC):
    """Receives the numbers that a run measures.

    Every rank creates each tracker before training, with its options as keyword arguments: the constructor rejects
    invalid ones (``UserError``, ``TypeError`` or ``ValueError``), and does nothing else. The other methods are called
    on rank 0 alone. What they raise becomes a warning; only ``start``, if not in the background, may end the run.
    """

    packages: ClassVar[Mapping[str, str]] = {}
    """Modules that it imports, each with what to ``pip install`` for it. If one is missing, the run does not start."""
    in_background: ClassVar[bool] = True
    """Whether its methods are called in a thread of their own: they may wait for a network, and get the values of
    each call of ``log`` once, even if a killed run repeats steps. Otherwise, ``start`` must itself discard values after
    ``resume_step``."""

    @abstractmethod
    def start(self, run: TrackedRun) -> None:
        """Called once, before any other method."""

    @abstractmethod
    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record ``values`` by their flat names, such as ``train/loss``, for the state after ``step`` steps."""

    def log_texts(self, step: int, texts: Mapping[str, str]) -> None:  # noqa: B027 - not every tracker takes texts
        """Record texts by their flat names, such as ``samples/1``: ``eval.samples``. A tracker that takes numbers alone
        leaves this out."""

    @abstractmethod
    def finish(self) -> None:
        """Write what is still buffered: the run ends, or will resume in another process."""

    def service_problem(self) -> str | None:
        """For a tracker that logs to a server: why the server, by name, does not answer; None if it does. Must return
        within seconds. In the background, it is called at the end of a run while another call has not returned."""
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
