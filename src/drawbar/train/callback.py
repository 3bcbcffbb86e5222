"""The callback interface: code of the user or of drawbar that is called at the events of a run."""

import inspect
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drawbar.config.io.user_modules import cause, find_class, make_with_options
from drawbar.config.schema.run_config import RunConfig
from drawbar.distributed.liveness import is_peer_failure
from drawbar.distributed.process_group import Distributed
from drawbar.distributed.pulse import Kind
from drawbar.errors import ExitCode, UserError, nearest
from drawbar.runtime.log import log_to_file, logger
from drawbar.train.step import RunProgress, StepInfo
from drawbar.train.stop import Reason, Stop
from drawbar.util.registry import Registry


@dataclass(frozen=True)
class RunHandle:
    """A callback's access to the run. The same object in every call of a process."""

    config: RunConfig
    progress: RunProgress
    """Progress of the run; read-only."""
    rank: int
    world_size: int
    total_steps: int
    _stop: Stop
    _log: Callable[[int, Mapping[str, float]], None]

    @property
    def run_dir(self) -> Path:
        """The run directory. Rank 0 writes metrics, scores and status. One rank per disk (only rank 0 if all nodes
        share a disk) writes configuration, tokenizer and checkpoints. Every rank writes its own log, profile and part
        of a checkpoint."""
        return self.config.run_dir

    @property
    def step(self) -> int:
        """Optimizer steps made."""
        return self.progress.step

    def log(self, values: Mapping[str, float]) -> None:
        """Log named numbers, such as ``{"mine/gap": 0.5}``, to the run's trackers for this step. No-op on ranks other
        than 0."""
        self._log(self.step, {name: float(value) for name, value in values.items()})

    def request_save(self) -> None:
        """Request a checkpoint after the next step, when all ranks know. A request from one rank is enough."""
        self._stop.request(Reason.SAVE)

    def request_stop(self) -> None:
        """Request to save this step and end training. A request from one rank is enough."""
        self._stop.request(Reason.CALLBACK)


class Callback:
    """Called at the events of a run: override what you need.

    Every rank creates its own callback before training, and calls it at the same steps in the same order. So
    ``on_train_start``, ``on_step``, ``on_evaluate``, ``on_save`` and ``on_train_end`` may call a collective of
    ``torch.distributed`` if every rank does; ``on_exception`` must not, as the other ranks may be anywhere.

    If a callback raises, the run saves the step just made and ends with an error that names the callback and the
    method. The exception is a callback that calls collectives and fails on some ranks only: the others are left
    waiting, and that step is not saved.
    """

    def on_train_start(self, run: RunHandle) -> None:
        """Called on every rank before this process's first step and any evaluation; again if the run goes back to a
        checkpoint (``train.on_spike``)."""

    def on_step(self, run: RunHandle, info: StepInfo) -> None:
        """Called on every rank after every optimizer step and anything due at it (logging, saving, evaluating)."""

    def on_evaluate(self, run: RunHandle, scores: Mapping[str, float]) -> None:
        """Called on every rank after every evaluation, with the same scores, named as in ``metrics.jsonl``."""

    def on_save(self, run: RunHandle, checkpoint: Path) -> None:
        """Called on every rank when the state of a step has been copied for its checkpoint. The folder is written in
        the background, by rank 0 or, in parts, by all ranks. It appears atomically once it is complete, or not at all
        if the save fails (``checkpoint.on_error``)."""

    def on_exception(self, run: RunHandle, error: Exception) -> None:
        """Called when training ends with this error, on the ranks that raise it, which may not be all."""

    def on_train_end(self, run: RunHandle) -> None:
        """Called once on every rank, after this process's last step and once every checkpoint is written. Not called if
        a step fails."""


CALLBACKS: Registry[type[Callback]] = Registry("callback", "drawbar.callbacks")
"""Names for ``callbacks``; most are given as ``package.module:Class``."""


def make_callbacks(config: Sequence[str | Mapping[str, Mapping[str, Any]]]) -> list[Callback]:
    """Create the user's callbacks from the setting ``callbacks``.

    Raises:
        UserError: there is no such callback, or it rejects its options.
    """
    where = "callbacks"
    return [
        make_with_options(find_class(CALLBACKS, Callback, name, where), options, f"the callback {name}", where)
        for item in config
        for name, options in ({item: {}} if isinstance(item, str) else item).items()
    ]


def check_callbacks(callbacks: Sequence[object]) -> None:
    """Refuse objects that are not callbacks, and callbacks with a method for an event that does not exist."""
    for callback in callbacks:
        if not isinstance(callback, Callback):
            raise UserError(
                f"{type(callback).__name__} is not a subclass of drawbar.Callback",
                where="callbacks",
                remedy="give Trainer(callbacks=[...]) objects of subclasses of drawbar.Callback",
            )
        for name in vars(type(callback)):
            if name.startswith("on_") and name not in EVENTS:
                raise UserError(
                    f"{type(callback).__name__}.{name} would never be called: there is no such event",
                    where="callbacks",
                    remedy=f"did you mean {nearest(name, EVENTS) or ', '.join(EVENTS)}?",
                )
        for name in EVENTS:
            _check_arguments(callback, name)


def _check_arguments(callback: Callback, event: str) -> None:
    """Raise UserError if the callback's method does not accept its arguments."""
    given = list(inspect.signature(getattr(Callback, event)).parameters)[1:]  # without self
    try:
        inspect.signature(getattr(callback, event)).bind(*given)
    except TypeError as error:
        name = f"{type(callback).__name__}.{event}"
        raise UserError(
            f"{name} cannot be called with ({', '.join(given)}): {error}",
            where="callbacks",
            remedy=f"define it as `def {event}(self, {', '.join(given)})`",
        ) from error


EVENTS = tuple(name for name in vars(Callback) if name.startswith("on_"))


class GuardedCallback(Callback):
    """A callback of the user. Its first error is logged; the run then saves, and ends. On one rank a method may take
    as long as it needs: the other ranks wait for it."""

    def __init__(self, callback: Callback, stop: Stop, world: Distributed) -> None:
        self._callback = callback
        self._stop = stop
        self._world = world
        self.failed = False
        """Whether a call failed, on this rank or (``share_failures``) another; if so, no method is called again."""

    def on_train_start(self, run: RunHandle) -> None:
        self._call("on_train_start", run)

    def on_step(self, run: RunHandle, info: StepInfo) -> None:
        self._call("on_step", run, info)

    def on_evaluate(self, run: RunHandle, scores: Mapping[str, float]) -> None:
        self._call("on_evaluate", run, scores)

    def on_save(self, run: RunHandle, checkpoint: Path) -> None:
        self._call("on_save", run, checkpoint)

    def on_exception(self, run: RunHandle, error: Exception) -> None:
        self._call("on_exception", run, error)

    def on_train_end(self, run: RunHandle) -> None:
        self._call("on_train_end", run)

    def _call(self, event: str, run: RunHandle, *arguments: Any) -> None:
        if self.failed:
            return
        name = f"{type(self._callback).__name__}.{event}"
        try:
            with self._world.working(f"the callback {name}", Kind.CALLBACK):
                getattr(self._callback, event)(run, *arguments)
        except (Exception, SystemExit) as error:  # it costs no step
            self.failed = True
            name += f" on rank {run.rank}" if run.world_size > 1 else ""
            failure = UserError(
                f"the callback {name} failed: {cause(error)}",
                where="callbacks",
                remedy="correct it, or leave it out; the same command resumes from the saved step",
                exit_code=ExitCode.FAILED,
            )
            failure.__cause__ = error
            if is_peer_failure(error):  # the groups of the ranks cannot be used any more, not even for a save
                failure.remedy = "if a callback calls a collective, every rank must; the same command resumes"
                raise failure from error
            logger.warning("the callback %s failed: the run saves, and ends", name)
            log_to_file("".join(traceback.format_exception(error)).rstrip())
            self._stop.fail(failure)


def share_failures(callbacks: Sequence[GuardedCallback], world: Distributed) -> None:
    """Disable on all ranks the callbacks that failed on any: their collectives would hang. Collective."""
    for failed in world.all_gather([callback.failed for callback in callbacks]):
        for callback, has_failed in zip(callbacks, failed, strict=False):  # a rank may have callbacks of its own
            callback.failed = callback.failed or has_failed
