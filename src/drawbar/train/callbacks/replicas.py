"""``parallel.check_replicas``: compares the weights of ranks that must hold the same ones."""

from collections.abc import Mapping
from functools import partial

from drawbar.distributed.rank_info import name_ranks
from drawbar.errors import EVERY_RANK, ExitCode, UserError
from drawbar.parallel.replicas import unequal_replicas
from drawbar.train.callback import Callback, RunHandle
from drawbar.train.run import Run
from drawbar.train.step import StepInfo


class ReplicasCallback(Callback):
    """Every few steps, before anything else is done with a step, ends the run if replicas differ in any bit."""

    def __init__(self, run: Run) -> None:
        self._every = run.config.parallel.check_replicas or 1
        self._run = run

    def on_step(self, run: RunHandle, info: StepInfo) -> None:
        if info.step % self._every == 0:
            unequal = unequal_replicas(self._run.engine.equal_on_replicas(), self._run.world)
            self._run.world.from_rank0(partial(_refuse, unequal, info.step), "comparing the weights of the ranks")


def _refuse(unequal: Mapping[str, list[list[int]]], step: int) -> None:
    if not unequal:
        return
    name, (most, *others) = next(iter(unequal.items()))
    odd = [rank for ranks in others for rank in ranks]
    known = len(most) > len(others[0])  # else there is no telling which are right
    named = name_ranks(odd if known else sorted(most + odd))
    error = UserError(
        f"after step {step}, the weights of {named} differ from "
        f"{'those that the other ranks hold' if known else 'one another'}: {name}"
        + (f" and {len(unequal) - 1} more" if len(unequal) > 1 else ""),
        remedy="test the memory of their machines, and look for code that changes weights on some ranks alone; "
        "checkpoints since the last comparison may hold such weights: go on from an older one with --resume STEP "
        "--fork NEWNAME",
        exit_code=ExitCode.FAILED,
    )
    error.origin = named if known else EVERY_RANK
    raise error
