"""``synchronized_steps``: yields each training step once all ranks have its batches and no rank wants to stop."""

import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from torch.distributed import DistError

from drawbar.config.io.user_modules import cause
from drawbar.data.loader import Loader, OtherRankFailed
from drawbar.data.prefetch import MicroBatch
from drawbar.distributed.process_group import Distributed
from drawbar.engines.engine import Engine
from drawbar.engines.executors import count_targets
from drawbar.engines.results import StepResult
from drawbar.errors import ExitCode, UserError
from drawbar.runtime.log import log_to_file, logger
from drawbar.tasks.batch import Batch
from drawbar.tasks.user_methods import name_failing_method
from drawbar.train.compile_payoff import Steps
from drawbar.train.stop import Reason, Stop

_COLLECTIVE_FILES = {
    "distributed_c10d.py",
    "_functional_collectives.py",
    "_fsdp_collectives.py",
    "_fsdp_param_group.py",
}
"""Files of torch that call collectives."""


@dataclass(frozen=True)
class SynchronizedStep:
    """A step that all ranks are about to make."""

    step: int
    micro_batches: list[MicroBatch[Batch]]
    """This rank's micro-batches."""
    num_targets: float
    """Number of targets in the global batch."""
    num_tokens: int
    """Tokens of the global batch, without padding; number of samples if they have no tokens."""
    is_first: bool
    """Whether this is the first step of this process."""


def synchronized_steps(
    steps: Steps, loader: Loader[Batch], engine: Engine, stop: Stop, world: Distributed
) -> Iterator[SynchronizedStep]:
    """Yield steps until the ranks agree to stop; the step that they stop before is not yielded.

    Before each step, one host collective sums its targets and tokens over the ranks, and finds out whether a rank wants
    to stop. On a stop, the preparation of the step is undone, so that the run can be saved in its state after the
    previous step. An error in making the batches is also such a stop.

    Args:
        steps: the loader's remaining steps.
    """
    is_first = True  # an error in the first batches is due to the user's settings or data (WRONG_REQUEST)
    while True:
        error: Exception | None = None
        micro_batches: list[MicroBatch[Batch]] = []
        counts = 0.0, 0.0
        try:
            world.set_activity("making the next batches")
            step, micro_batches = next(steps)
            world.begin_step(step)
            with name_failing_method(engine.task):
                counts = count_targets(engine.task, micro_batches), loader.tokens
        except StopIteration:
            stop.agree()  # a callback may have failed, or requested a stop, after the last step
            return
        except OtherRankFailed:
            pass  # that rank requests the stop
        except Exception as caught:  # noqa: BLE001 - the trainer raises it after saving
            error = caught
            _log_whole(error)  # first: if another rank is gone, agreeing raises another error
            stop.request(Reason.NO_BATCH)
        num_targets, num_tokens = stop.agree_and_sum(*counts)
        if stop.has_agreed:
            if error is not None and stop.reason is Reason.NO_BATCH:
                if not is_first:
                    logger.warning("the next step's batches cannot be made: the run saves its current step, then ends")
                stop.fail(_step_error(error), ExitCode.WRONG_REQUEST if is_first else ExitCode.FAILED)
            loader.undo_step()
            return
        yield SynchronizedStep(step, micro_batches, num_targets, int(num_tokens), is_first)
        is_first = False


def make_step(engine: Engine, agreed: SynchronizedStep) -> StepResult:
    """Make one optimizer step: forward, backward, reduce, clip, update.

    Raises:
        UserError: a method of the task fails; the traceback is in the log file of the rank.
    """
    try:
        with name_failing_method(engine.task):
            return engine.train_step(agreed.micro_batches, agreed.num_targets)
    except UserError as error:
        if error.__cause__ is not None and _raised_in_collective(error.__cause__):
            raise error.__cause__ from None  # a peer is gone: not the fault of the method that waited for it
        _log_whole(error)
        if not agreed.is_first:
            error.exit_code = ExitCode.FAILED
            error.remedy = f"{error.remedy}; the same command resumes from the newest checkpoint, if there is one"
        raise


def _raised_in_collective(error: BaseException) -> bool:
    files = {Path(frame.filename).name for frame in traceback.extract_tb(error.__traceback__)}
    return isinstance(error, DistError) or not files.isdisjoint(_COLLECTIVE_FILES)


def _log_whole(error: Exception) -> None:
    log_to_file("".join(traceback.format_exception(error)).rstrip())


def _step_error(error: Exception) -> UserError:
    if isinstance(error, UserError):
        return error
    failure = UserError(
        f"making the batches of the next step failed: {cause(error)}",
        where="the traceback is in the log file of this rank",
        remedy="fix the cause; the same command resumes from the saved step",
    )
    failure.__cause__ = error
    return failure
