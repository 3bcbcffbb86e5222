"""Stops a run whose loss or gradient norm is not finite, with an error that suggests causes."""

import math

from drawbar.distributed.process_group import Distributed
from drawbar.distributed.rank_info import name_ranks
from drawbar.errors import EVERY_RANK, ExitCode, UserError
from drawbar.train.run import Run
from drawbar.train.saver import Saver
from drawbar.train.step import StepInfo


def check_finite(info: StepInfo, run: Run) -> None:
    """Stop a run whose loss or gradient norm is not finite, before such weights are saved. Collective, if they are
    not.

    Raises:
        UserError: on every rank; it names the ranks whose own samples have no finite loss.
    """
    try:
        _check(info, run.saver)
    except UserError as error:
        error.origin = _ranks_without_loss(info, run.world)
        raise


def _ranks_without_loss(info: StepInfo, world: Distributed) -> str:
    own = math.isfinite(info.result.own_loss) if world.dp_ranks.is_dp_leader else None  # others have the same samples
    found = world.all_gather(own)
    ranks = [rank for rank, is_finite in enumerate(found) if is_finite is False]
    return name_ranks(ranks) if ranks and True in found else EVERY_RANK


def _check(info: StepInfo, saver: Saver) -> None:
    if info.result.rejected:  # the weights do not have it: ``train.on_spike``
        return
    found = {"loss": float(info.result.loss)}
    if not info.result.skipped:  # a skipped step (fp16 overflow) has no finite norm, but is harmless
        found["gradient norm"] = float(info.result.grad_norm)
    for name, value in found.items():
        if not math.isfinite(value):
            if info.step == 1:
                raise _nan_at_first_step(name, value)
            if info.step == saver.first_step:
                raise _nan_after_checkpoint(name, value, info.step)
            has_checkpoint = saver.last_saved_progress is not None
            raise UserError(
                f"the run has diverged and stops: the {name} of step {info.step} is {value}",
                where="every checkpoint was written before that" if has_checkpoint else "there is no checkpoint yet",
                remedy="lower optim.lr, lengthen optim.warmup or set a smaller train.gradient_clip; "
                + (
                    "continue from the newest checkpoint with --fork NEWNAME, or start over under another run.name"
                    if has_checkpoint
                    else "start over under another run.name, or under this one after deleting its folder"
                ),
                exit_code=ExitCode.FAILED,
            )


def _nan_at_first_step(name: str, value: float) -> UserError:
    """The error if the loss or gradient norm of step 1 is not finite: no update has changed the weights yet, so no
    optimizer setting is at fault."""
    return UserError(
        f"the {name} of step 1 is {value}, before any update of the weights, and the run stops",
        where="the data, the loss or the initial model",
        remedy="look for non-finite values in the samples and in the model's weights, and for a division by zero, a "
        "logarithm of zero or an overflow in the loss; start over under another run.name, or under this one after "
        "deleting its folder",
        exit_code=ExitCode.FAILED,
    )


def _nan_after_checkpoint(name: str, value: float, step: int) -> UserError:
    """The error at the first step after a resume or a fork: no step of this process has changed the weights yet."""
    return UserError(
        f"the {name} of step {step} is {value}, and the run stops: it is the first step after the checkpoint of step "
        f"{step - 1}",
        where="the weights or the optimizer state in that checkpoint, or what has changed since it was written",
        remedy="undo what has changed: precision, optim.lr, the data, the task's code, the libraries or the machine; "
        "if nothing has, the last update before the checkpoint was too large: start from an older one with "
        "--resume STEP --fork NEWNAME and a lower optim.lr",
        exit_code=ExitCode.FAILED,
    )
