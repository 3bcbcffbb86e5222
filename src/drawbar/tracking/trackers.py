"""The trackers of a run: made from its configuration, and told everything as one."""

import importlib.util
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from drawbar.config.io.user_modules import cause, find_class, make_with_options
from drawbar.config.schema.run_config import TrackingSection
from drawbar.errors import UserError
from drawbar.tracking.background import BackgroundTracker, TrackerGuard
from drawbar.tracking.jsonl import JsonlTracker
from drawbar.tracking.tracker import TRACKERS, TrackedRun, Tracker

SETTING = "tracking.trackers"
logger = logging.getLogger(__name__)


class Trackers:
    """Several trackers as one that never fails while the run trains: what goes wrong with one is a warning."""

    def __init__(self, trackers: Sequence[Tracker] = ()) -> None:
        self._trackers = trackers
        self._guards = [TrackerGuard(tracker) for tracker in trackers]

    def start(self, run: TrackedRun) -> None:
        """Start all of them. Raises ``UserError`` where one cannot write its files: nothing is trained yet."""
        started = []
        for tracker, guard in zip(self._trackers, self._guards, strict=True):
            try:
                tracker.start(run)
            except UserError:
                raise
            except Exception as error:  # noqa: BLE001 - a tracker of the user's: the run goes on without it
                logger.warning("%s: %s\n  the run goes on without this tracker", type(tracker).__name__, cause(error))
            else:
                started.append(guard)
        self._guards = started

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Tell all of them the values of a step."""
        self._call_all(lambda tracker: tracker.log(step, values))

    def finish(self) -> None:
        """End all of them."""
        self._call_all(lambda tracker: tracker.finish())

    def _call_all(self, call: Callable[[Tracker], None]) -> None:
        for guard in self._guards:
            guard.attempt(call)


def make_trackers(config: TrackingSection) -> list[Tracker]:
    """The trackers that the configuration asks for, not started; ``metrics.jsonl`` is always among them.

    Raises:
        UserError: there is no such tracker, it lacks a package, or refuses its options.
    """
    usual: dict[str, dict[str, Any] | None] = {"tensorboard": {}} if config.tensorboard else {}
    wanted = usual | config.trackers
    return [JsonlTracker(), *(_make(name, options) for name, options in wanted.items() if options is not None)]


def _make(name: str, options: Mapping[str, Any]) -> Tracker:
    where = f"{SETTING}.{name}"
    made = find_class(TRACKERS, Tracker, name, SETTING)
    for module, package in made.packages.items():
        if not _is_installed(module):
            raise UserError(
                f"the tracker {name} needs {module}, which is not installed",
                where=where,
                remedy=f'pip install "{package}", or remove {where}',
            )
    tracker = make_with_options(made, options, f"the tracker {name}", where)
    return BackgroundTracker(tracker, name) if tracker.in_background else tracker


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package that holds the module is not installed either
        return False
