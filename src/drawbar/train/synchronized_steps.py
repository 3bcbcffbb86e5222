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
"""The files of torch that call collectives."""


@dataclass(frozen=True)
class SynchronizedStep:
    """A step that every rank is about to make."""

    step: int
    micro_batches: list[MicroBatch[Batch]]
    """This rank's."""
    num_targets: float
    """Of the whole global batch."""
    num_tokens: int
    """Tokens of the whole global batch, without padding; samples, where they have no tokens."""
    is_first: bool
    """Whether this process has made no step before."""


def synchronized_steps(
    steps: Steps, loader: Loader[Batch], engine: Engine, stop: Stop, world: Distributed
) -> Iterator[SynchronizedStep]:
    """Yield the steps until the ranks agree to stop; the step that they stop before is not yielded.

    Before each, one host collective sums its targets and tokens over the ranks, and finds out whether a rank wants to
    stop. On a stop, the preparation of the step is undone, so that the run can be saved as after the step before. An
    error in making the batches is such a stop, too.

    Args:
        steps: those of the loader that are left.
    """
    is_first = True  # an error in the first batches is one of the user's settings or data (WRONG_REQUEST)
    while True:
        error: Exception | None = None
        micro_batches: list[MicroBatch[Batch]] = []
        counts = 0.0, 0.0
        try:
            step, micro_batches = next(steps)
            world.set_activity(f"step {step}")
            with name_failing_method(engine.task):
                counts = count_targets(engine.task, micro_batches), loader.tokens
        except StopIteration:
            stop.agree()  # a callback may have failed, or asked for a stop, after the last step
            return
        except OtherRankFailed:
            pass  # that rank asks for the stop
        except Exception as caught:  # noqa: BLE001 - the trainer raises it, once it has saved
            error = caught
            stop.request(Reason.NO_BATCH)
        num_targets, num_tokens = stop.agree_and_sum(*counts)
        if stop.has_agreed:
            if error is not None and stop.reason is Reason.NO_BATCH:
                if not is_first:
                    logger.warning("the next step's batches cannot be made: the run saves where it is, and ends")
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
            raise error.__cause__ from None  # a peer is gone, which is no fault of the method that waited for it
        log_to_file("".join(traceback.format_exception(error)).rstrip())
        if not agreed.is_first:
            error.exit_code = ExitCode.FAILED
            error.remedy = f"{error.remedy}; the same command goes on from the newest checkpoint, if there is one"
        raise


def _raised_in_collective(error: BaseException) -> bool:
    files = {Path(frame.filename).name for frame in traceback.extract_tb(error.__traceback__)}
    return isinstance(error, DistError) or not files.isdisjoint(_COLLECTIVE_FILES)


def _step_error(error: Exception) -> UserError:
    if not isinstance(error, UserError) or error.__cause__ is not None:
        log_to_file("".join(traceback.format_exception(error)).rstrip())
    if isinstance(error, UserError):
        return error
    failure = UserError(
        f"making the batches of the next step failed: {cause(error)}",
        where="the traceback is in the log file of this rank",
        remedy="mend what it names; the same command goes on from the step that was saved",
    )
    failure.__cause__ = error
    return failure
