"""The reference of a comparison: the same training in one process, in fp32.

In fp32 a strategy must give nearly equal numbers at each step. In a lower precision two right trainings drift apart,
however little they differ at first, as the optimizer makes full-size steps even where a gradient is nothing but
rounding. So in that case one process makes the first step, and later the last one from the strategy's state before it:
in fp32, and several times in the lower precision, with noise, to see what rounding does to this very step.
"""

from dataclasses import replace

import torch

from drawbar.config.deepspeed.zero_settings import with_parallel
from drawbar.config.schema.run_config import ParallelSection, RunConfig
from drawbar.distributed.process_group import Distributed
from drawbar.distributed.rank_info import RankInfo
from drawbar.parity.comparison import FP32_TOLERANCES, Limits, Reference, Tolerances, Trace, distances
from drawbar.parity.recorder import StepStart, check_finite, train
from drawbar.parity.rounding import allowed_gradient_error, noises, tolerances
from drawbar.parity.workload import Workload
from drawbar.tracking.console import Console


def reference_config(config: RunConfig, precision: str = "fp32") -> RunConfig:
    """The configuration of the reference: one process, and the defaults of ``parallel``."""
    return with_parallel(config, ParallelSection(strategy="single")).model_copy(update={"precision": precision})


def make_reference(
    workload: Workload, device: torch.device, precision: str = "fp32", console: Console | None = None
) -> Reference:
    """The reference: all steps for fp32; only the first step for a lower precision (see ``with_last_step``).

    Raises:
        UserError: the training cannot be made, or its loss is no number.
    """
    if precision != "fp32":
        reference = reference_of_step(workload, device, precision, None, console)
    else:
        trace = train(workload, reference_config(workload.config), _single_process(workload, device), console)
        reference = Reference(trace, FP32_TOLERANCES)
    check_finite(reference.trace)
    return reference


def with_last_step(
    reference: Reference, workload: Workload, device: torch.device, precision: str, trace: Trace
) -> Reference:
    """Complete a reference for what ``trace`` did in a lower precision: repeat the last step from the same state."""
    if trace.before_last is None:
        return reference
    last = reference_of_step(workload, device, precision, trace.before_last)
    one, other = reference.trace, last.trace
    both = replace(
        other,
        losses=one.losses | other.losses,
        grad_norms=one.grad_norms | other.grad_norms,
        gradients=one.gradients | other.gradients,
    )
    return Reference(both, _merged(reference.tolerances, last.tolerances))


def _merged(first: Tolerances, last: Tolerances) -> Tolerances:
    """The tolerances of both steps. For loss and gradient norm, the larger: a single number may be right by chance."""
    return Tolerances(
        loss=Limits(max(first.loss.base, last.loss.base)),
        grad_norm=Limits(max(first.grad_norm.base, last.grad_norm.base)),
        gradients=Limits(last.gradients.base, {**first.gradients.at, **last.gradients.at}),
        weights=last.weights,
        max_gradient_error=last.max_gradient_error,
    )


def reference_of_step(
    workload: Workload, device: torch.device, precision: str, start: StepStart | None, console: Console | None = None
) -> Reference:
    """One step of one process in fp32, with tolerances from noisy runs of it in ``precision`` (``rounding.noises``).

    Args:
        start: where it begins; by default, where the training does.
    """
    until = 1 if start is None else start.step + 1
    alone = _single_process(workload, device)
    trace = train(workload, reference_config(workload.config), alone, console, start, until)
    low = reference_config(workload.config, precision)
    rounded = (train(replace(workload, noise=noise), low, alone, None, start, until) for noise in noises(precision))
    return Reference(
        trace, tolerances(precision, [distances(one, trace, allowed_gradient_error(precision)) for one in rounded])
    )


def _single_process(workload: Workload, device: torch.device) -> Distributed:
    return Distributed(RankInfo(), device, workload.config.launch.timeout)
