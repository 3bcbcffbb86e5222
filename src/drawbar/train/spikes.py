"""Spikes: steps whose loss or gradient norm is far above that of the steps before them, and ``train.on_spike``."""

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

import torch

from drawbar.engines.results import StepResult
from drawbar.errors import EVERY_RANK, UserError
from drawbar.runtime.log import logger
from drawbar.train.run import Run
from drawbar.train.synchronized_steps import SynchronizedStep

WINDOW = 100
"""Number of steps that a step is compared with."""
MOST_SPIKES = 10
"""With more spikes than this in the window, ``skip`` and ``rewind`` end the run: it does not get better by itself."""
_FEWEST = 3
_SHOWN = 20
"""Maximum number of samples that a message names for a rank."""
_SHOWN_RANKS = 2


def deviations(value: float, before: Sequence[float]) -> float:
    """How many robust standard deviations a value is above the median of those before it; infinite if it is no number.

    The values are compared by their logarithms, as losses and gradient norms vary by factors; those without one are
    left out. The deviation is 1.4826 times the median absolute deviation (Leys et al. 2013,
    doi:10.1016/j.jesp.2013.03.013), but at least 0.1, and 2/n for n values, as a few values happen to be close.
    """
    if not math.isfinite(value):
        return math.inf
    logs = [math.log(other) for other in before if 0 < other < math.inf]
    if value <= 0 or len(logs) < _FEWEST:
        return 0.0
    middle = median(logs)
    spread = 1.4826 * median(abs(log - middle) for log in logs)
    return (math.log(value) - middle) / max(spread, 0.1, 2 / len(logs))


class HostCopy:
    """A number on its way from a device, which goes on computing. A plain ``item()`` would wait for all work queued so
    far, and so would a copy to memory that is not page-locked."""

    def __init__(self, number: torch.Tensor) -> None:
        self._number, self._copied = number.detach(), None
        if number.is_cuda:
            self._number = torch.empty_like(number, device="cpu", pin_memory=True).copy_(number, non_blocking=True)
            self._copied = torch.cuda.current_stream(number.device).record_event()

    def read(self) -> float:
        if self._copied is not None:
            self._copied.synchronize()
        return float(self._number)


class SpikeWatch:
    """Looks for spikes, and does what ``train.on_spike`` says.

    With ``warn``, a step is looked at after the next one, so that no GPU waits for its host. Otherwise all ranks decide
    together whether the weights are updated; what they decide from is part of the progress, so a resumed run decides
    the same.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._action, self._threshold = run.config.train.on_spike, run.config.train.spike_threshold
        if self._action == "warn":
            run.progress.recent = []  # a run that decides again begins anew
        else:
            run.engine.approve = self._approve
        self._recent = run.progress.recent
        self._newest: tuple[int, list[int], HostCopy, HostCopy] | None = None
        self._what = ""

    def look(self, agreed: SynchronizedStep, result: StepResult) -> bool:
        """Call after each step. Returns whether the run must go back to its newest checkpoint; the same on every
        rank."""
        ids = [number for micro in agreed.micro_batches if not micro.is_padding for number in micro.batch.ids]
        if self._action == "warn":
            copies = HostCopy(result.loss), HostCopy(result.grad_norm)
            self.warn()
            self._newest = None if result.skipped else (agreed.step, ids, *copies)
            return False
        self._run.progress.recent = self._recent
        return result.rejected and self._act(agreed.step, self._samples_of_all(ids, float(result.own_loss)))

    def warn(self) -> None:
        """Warn if the newest step is a spike. One without finite values stops the run elsewhere: ``check_finite``."""
        if self._newest is None:
            return
        (step, ids, loss, grad_norm), self._newest = self._newest, None
        self._add(loss.read(), grad_norm.read())
        if self._what and all(map(math.isfinite, self._recent[-1])):
            logger.warning("step %d: %s; its samples on this rank: %s", step, self._what, _shown(ids))

    def _approve(self, loss: torch.Tensor, grad_norm: torch.Tensor) -> bool:
        """Whether this step, whose values these are, is no spike; the same on every rank."""
        self._add(float(loss), float(grad_norm))
        is_spike = self._run.world.sum_all([float(bool(self._what))])[0] > 0
        if is_spike:
            self._recent = [*self._recent[:-1], [0.0, 0.0, 1.0]]
            self._what = self._what or "another rank's loss or gradient norm is far above the usual"
        return not is_spike

    def _add(self, loss: float, grad_norm: float) -> None:
        self._what = ""
        for place, (name, value) in enumerate((("loss", loss), ("gradient norm", grad_norm))):
            before = [values[place] for values in self._recent if not values[2]]
            if deviations(value, before) > self._threshold:
                usual = f", and the median of the steps before is {median(before):.4g}" if before else ""
                self._what = f"the {name} is {value:,.6g}{usual}"
                break
        self._recent = [*self._recent[1 - WINDOW :], [loss, grad_norm, 0.0]]

    def _samples_of_all(self, ids: Sequence[int], own_loss: float) -> str:
        """The samples of the step, beginning with those of the rank with the largest loss. Collective."""
        world = self._run.world
        gathered = enumerate(world.all_gather((own_loss, ids) if world.dp_ranks.is_dp_leader else None))
        shares = {rank: share for rank, share in gathered if share is not None}
        ranks = sorted(shares, key=lambda rank: (math.isfinite(shares[rank][0]), -shares[rank][0]))
        if len(ranks) == 1:
            return _shown(ids)
        more = f"; and those of {len(ranks) - _SHOWN_RANKS} more ranks" if len(ranks) > _SHOWN_RANKS else ""
        return "; ".join(f"on rank {rank}: {_shown(shares[rank][1])}" for rank in ranks[:_SHOWN_RANKS]) + more

    def _act(self, step: int, samples: str) -> bool:
        """Report a spike, whose update was not made. Returns whether the run must go back. Collective."""
        spike = f"step {step} is a spike, and its update is not made: {self._what}"
        spikes = sum(values[2] > 0 for values in self._recent)
        if self._action == "stop" or spikes > MOST_SPIKES:
            more = "" if self._action == "stop" else f" ({spikes} spikes in the last {len(self._recent)} steps)"
            error = UserError(
                spike + more,
                where=f"samples {samples}",
                remedy="look at these samples, lower optim.lr or lengthen optim.warmup; the same command goes on after "
                "them; if such values are normal here, raise train.spike_threshold",
            )
            error.origin = EVERY_RANK
            self._run.stop.fail(error)
            return False
        logger.warning("%s; samples: %s", spike, samples)
        return self._action == "rewind" and self._go_back(step)

    def _go_back(self, step: int) -> bool:
        """Let the newest checkpoint go on with the samples after this step, also in another process. Returns whether
        there is one. Collective."""
        progress, saver = self._run.progress, self._run.saver
        saved = saver.newest(progress)
        if saved is None or saved.step == progress.went_back_to:
            why = "this run has no checkpoint to go back to"
            if saved is not None:
                why = "the run has gone back to its newest checkpoint before"
            logger.warning("%s: the run continues without this update", why)
            return False
        changed = replace(saved, recent=self._recent, went_back_to=saved.step)
        if not saver.amend_newest(changed):
            return False
        logger.warning(
            "the run goes back to step %d, without the samples trained since then, up to step %d", saved.step, step
        )
        vars(progress).update(vars(changed))
        return True


def _shown(ids: Sequence[int]) -> str:
    more = f" and {len(ids) - _SHOWN:,} more" if len(ids) > _SHOWN else ""
    return ", ".join(map(str, ids[:_SHOWN])) + more
