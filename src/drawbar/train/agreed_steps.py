"""The steps of a run: each is yielded when all ranks have its batches and no rank wants to stop."""

from collections.abc import Iterator
from dataclasses import dataclass

from drawbar.data.loader import Loader
from drawbar.data.prefetch import MicroBatch
from drawbar.distributed.process_group import Distributed
from drawbar.engines.engine import Engine
from drawbar.engines.executors import count_targets
from drawbar.tasks.batch import Batch
from drawbar.train.compile_payoff import Steps
from drawbar.train.stop import Reason, Stop


@dataclass(frozen=True)
class AgreedStep:
    """A step that every rank is about to make."""

    step: int
    micro_batches: list[MicroBatch[Batch]]
    """This rank's."""
    num_targets: float
    """Of the whole global batch."""
    num_tokens: int
    """Tokens of the whole global batch, without padding; samples, where they have no tokens."""


def agreed_steps(
    steps: Steps, loader: Loader[Batch], engine: Engine, stop: Stop, world: Distributed
) -> Iterator[AgreedStep]:
    """Yield the steps until the ranks agree to stop; the step that they stop before is not yielded.

    Before each, one host collective sums its targets and tokens over the ranks, and finds out whether a rank wants to
    stop. A stop undoes what was done for the step: the run is then where the step before ended, and can be saved. So an
    error in making batches is raised after that collective, and only if no rank wants to stop.

    Args:
        steps: those of the loader that are left.
    """
    while True:
        error: Exception | None = None
        micro_batches: list[MicroBatch[Batch]] = []
        counts = 0.0, 0.0
        try:
            step, micro_batches = next(steps)
            world.note(f"step {step}")
            counts = count_targets(engine.task, micro_batches), loader.tokens
        except StopIteration:
            stop.agreed()  # a callback may have failed, or asked for a stop, after the last step
            return
        except Exception as caught:  # noqa: BLE001 - raised below
            error = caught
            stop.request(Reason.NO_BATCH)
        num_targets, num_tokens = stop.agree_and_sum(*counts)
        if stop.has_agreed:
            loader.give_back()
            return
        if error is not None:
            raise error
        if stop.reason is Reason.NO_BATCH:
            world.barrier("making batches")  # never passed: the rank without batches raises its error and ends
        yield AgreedStep(step, micro_batches, num_targets, int(num_tokens))
