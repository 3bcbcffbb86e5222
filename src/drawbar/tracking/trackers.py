"""The trackers of a run: created from its configuration, and called as one. Those that wait for a network run in a
thread: training never waits for them, and a resumed run sends them no value twice."""

import importlib.util
import json
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any, Self, TypeVar

from drawbar.config.io.user_modules import cause, find_class, make_with_options
from drawbar.config.schema.run_config import TrackingSection
from drawbar.errors import UserError
from drawbar.tracking.jsonl import JsonlTracker
from drawbar.tracking.tracker import TRACKERS, TrackedRun, Tracker
from drawbar.util.atomic_files import write_atomically

T = TypeVar("T")
logger = logging.getLogger(__name__)
SETTING = "tracking.trackers"
LONGEST_QUEUE = 10_000
"""Maximum number of ``log`` calls that wait for a tracker; further ones are dropped."""
FINISH_SECONDS = 60.0
"""How long a run waits at its end for a tracker to send what it still has."""
SECONDS_TO_CHECK = 5.0
"""After this much of it, the tracker is asked whether its service answers: a run does not wait for one that is gone."""


class TrackerGuard:
    """Calls a tracker, and logs whatever it raises as a warning: once, until a call succeeds again."""

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker
        self._failing = False

    def attempt(self, call: Callable[[Tracker], None], after: str = "and retries with the next values") -> bool:
        """Return whether the call succeeded. ``after``: what the run does after a failure, for the warning."""
        try:
            call(self._tracker)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - neither may stop training
            if not self._failing:
                what = str(error) if isinstance(error, UserError) else f"{type(self._tracker).__name__}: {cause(error)}"
                logger.warning("%s\n  the run continues %s", what, after)
            self._failing = True
        else:
            self._failing = False
        return not self._failing


@dataclass
class _Delivered:
    """What was already sent to a tracker, stored in the run directory, so that repeated steps are not sent again:
    their values are the same."""

    path: Path
    id: str
    step: int = -1
    names: tuple[str, ...] = ()
    """Names of the values of that step that were already sent."""

    @classmethod
    def of(cls, path: Path, begins_anew: bool) -> Self:
        try:
            if not begins_anew:
                return cls(path, **json.loads(path.read_text("utf-8")))
        except (OSError, ValueError, TypeError):  # a run that did not have this tracker
            pass
        return cls(path, secrets.token_hex(4))

    def has(self, step: int, names: Mapping[str, object]) -> bool:
        return step < self.step or (step == self.step and set(names) <= set(self.names))

    def add(self, step: int, names: Mapping[str, object]) -> None:
        self.names = (*self.names, *names) if step == self.step else tuple(names)
        self.step = step
        self.write()

    def write(self) -> None:
        content = json.dumps({"id": self.id, "step": self.step, "names": self.names})
        write_atomically(self.path, f"{content}\n".encode())


class BackgroundTracker(Tracker):
    """Forwards all calls to another tracker, in a thread; one that fails to start is left out of the run."""

    def __init__(self, tracker: Tracker, name: str) -> None:
        self._tracker = tracker
        self._name = name.rpartition(":")[2]
        self._file = f"{name.replace(':', '.')}.json"  # with the module: two trackers may share a class name
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._guard = TrackerGuard(tracker)
        self._started = False
        self._ended = Event()
        self._warned_full = False

    def start(self, run: TrackedRun) -> None:
        self._calls.put(lambda: self._start(run))
        Thread(target=self._work, name=f"tracker-{self._name}", daemon=True).start()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._queue(step, dict(values), lambda tracker, kept: tracker.log(step, kept))

    def log_texts(self, step: int, texts: Mapping[str, str]) -> None:
        self._queue(step, dict(texts), lambda tracker, kept: tracker.log_texts(step, kept))

    def _queue(self, step: int, values: dict[str, T], send: Callable[[Tracker, dict[str, T]], None]) -> None:
        if self._calls.qsize() < LONGEST_QUEUE:
            self._calls.put(lambda: self._deliver(step, values, lambda tracker: send(tracker, values)))
        elif not self._warned_full:
            self._warned_full = True
            logger.warning("the tracker %s is too slow: it does not get all values", self._name)

    def finish(self) -> None:
        self._calls.put(self._finish)
        if self._ended.wait(SECONDS_TO_CHECK):
            return
        problem = self._tracker.service_problem()
        if problem is not None:
            logger.warning("the tracker %s has not sent everything, and the run ends: %s", self._name, problem)
        elif not self._ended.wait(FINISH_SECONDS - SECONDS_TO_CHECK):
            logger.warning("the tracker %s has not sent everything in %.0f s: the run ends", self._name, FINISH_SECONDS)

    def _work(self) -> None:
        while not self._ended.is_set():
            self._calls.get()()

    def _start(self, run: TrackedRun) -> None:
        self._delivered = _Delivered.of(run.folder / "tracking" / self._file, run.resume_step is None)
        of_tracker = replace(run, id=self._delivered.id)
        after = f"without the tracker {self._name}"
        self._started = self._guard.attempt(lambda tracker: tracker.start(of_tracker), after)
        if self._started:
            self._guard.attempt(lambda tracker: self._delivered.write())

    def _deliver(self, step: int, values: Mapping[str, object], send: Callable[[Tracker], None]) -> None:
        def deliver(tracker: Tracker) -> None:
            send(tracker)
            self._delivered.add(step, values)

        if self._started and not self._delivered.has(step, values):
            self._guard.attempt(deliver)

    def _finish(self) -> None:
        if self._started:
            self._guard.attempt(lambda tracker: tracker.finish(), after="and ends without it")
        self._ended.set()


class Trackers:
    """Several trackers as one that never fails during training: the failure of any one becomes a warning."""

    def __init__(self, trackers: Sequence[Tracker] = ()) -> None:
        self._trackers = trackers
        self._guards = [TrackerGuard(tracker) for tracker in trackers]

    def start(self, run: TrackedRun) -> None:
        """Start all of them. Raises ``UserError`` if one cannot write its files: nothing has been trained yet."""
        started = []
        for tracker, guard in zip(self._trackers, self._guards, strict=True):
            try:
                tracker.start(run)
            except UserError:
                raise
            except Exception as error:  # noqa: BLE001 - a tracker of the user's: the run continues without it
                logger.warning("%s: %s\n  the run continues without this tracker", type(tracker).__name__, cause(error))
            else:
                started.append(guard)
        self._guards = started

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Send all of them the values of a step."""
        self._call_all(lambda tracker: tracker.log(step, values))

    def log_texts(self, step: int, texts: Mapping[str, str]) -> None:
        """Send all of them the texts of a step."""
        self._call_all(lambda tracker: tracker.log_texts(step, texts))

    def finish(self) -> None:
        """Finish all of them."""
        self._call_all(lambda tracker: tracker.finish())

    def _call_all(self, call: Callable[[Tracker], None]) -> None:
        for guard in self._guards:
            guard.attempt(call)


def make_trackers(config: TrackingSection) -> list[Tracker]:
    """Create the trackers that the configuration asks for, without starting them; ``metrics.jsonl`` is always included.

    Raises:
        UserError: a tracker does not exist, lacks a package, or rejects its options.
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
