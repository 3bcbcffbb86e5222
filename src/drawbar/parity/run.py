"""``drawbar parity``: does a strategy compute what one process computes?

Rank 0 trains alone first, in fp32 (to compare in lower precision, only the first step; and, after each strategy, that
strategy's last step again, from the state before it). Then all ranks train together under one
strategy after another, with a new process group for each. If a strategy differs, a step of few rows is made both ways
to find the first module that differs.

In fp32 a strategy must give nearly equal numbers at each step. In a lower precision two right trainings drift apart,
however little they differ at first, as the optimizer makes full-size steps even where a gradient is nothing but
rounding. So in that case one process makes the first step, and later the last one from the strategy's state before it:
in fp32, and several times in the lower precision, with noise, to see what rounding does to this very step.
"""

import gc
import logging
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TypeVar

import torch
from torch import nn

from drawbar.config.parallel_dims import ParallelDims
from drawbar.config.schema.run_config import ParallelSection, RunConfig
from drawbar.distributed.process_group import Distributed
from drawbar.distributed.rank_info import RankInfo, choose_device, without_rank_in_environment
from drawbar.errors import ExitCode, UserError
from drawbar.parity.cases import Case, check_case
from drawbar.parity.comparison import (
    FP32_TOLERANCES,
    Comparison,
    Distances,
    Limits,
    Reference,
    Tolerances,
    Trace,
    allowed_gradient_error,
    distances,
    noises,
    tolerances,
)
from drawbar.parity.divergence import compare_modules, diagnose, find_divergence
from drawbar.parity.recorder import StepStart, check_finite, clean_name, train, train_with_dropout
from drawbar.parity.result import Result, ResultsDir, curves_of
from drawbar.parity.workload import Workload
from drawbar.runtime.log import logger
from drawbar.runtime.seed import use_deterministic_kernels
from drawbar.tracking.console import Console


def reference_config(config: RunConfig, precision: str = "fp32") -> RunConfig:
    """The configuration of the reference: one process, and the defaults of ``parallel``."""
    return config.with_parallel(ParallelSection(strategy="single")).model_copy(update={"precision": precision})


def make_reference(
    workload: Workload, device: torch.device, precision: str = "fp32", console: Console | None = None
) -> Reference:
    """The reference: all steps for fp32; only the first step for a lower precision (see ``with_last_step``).

    Raises:
        UserError: the training cannot be made, or its loss is not a number.
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


T = TypeVar("T")
LogProgress = Callable[[str], None]
"""Prints how far the comparison is."""

RANK0_TIMEOUT = 24 * 3600
"""Timeout in seconds while rank 0 trains alone: a day."""
REFUSAL_SECONDS = 30.0
"""How long a rank that refuses a case waits for the other ranks to refuse it, too."""


@dataclass(frozen=True)
class ParityRequest:
    """What to compare."""

    cases: Sequence[Case]
    precision: str = "fp32"
    asked_for: bool = True
    """Whether the user named the cases."""


def run_case(
    workload: Workload, case: Case, world: Distributed, expected: Reference | None, request: ParityRequest
) -> Result | None:
    """Train under a strategy, and compare; every rank of ``world`` calls it.

    Args:
        world: with the ``dims`` of the case.
        expected: the reference; on rank 0.

    Returns:
        What came of it, on rank 0.

    Raises:
        UserError: the strategy cannot run here.
    """
    config = case.apply_to(workload.config, request.precision)
    trace = train(workload, config, world)
    gc.collect()  # free the engine's gradients and buckets before there is another engine
    if case.parallel.tensor > 1:
        trace.unequal += train_with_dropout(workload, config, world)
        gc.collect()
    comparison: Comparison | None = None
    found: Distances | None = None
    if expected is not None:
        with world.working("making the last step in one process"), without_rank_in_environment():
            expected = with_last_step(expected, workload, world.device, request.precision, trace)
        found = distances(trace, expected.trace, expected.tolerances.max_gradient_error)
        comparison = Comparison.of(found, expected.tolerances)
    passes = world.from_rank0(lambda: comparison is not None and comparison.passes, "comparing")
    probe = None
    if not passes:
        probe = find_divergence(workload, config, reference_config(workload.config), world)
    gc.collect()
    if comparison is None or found is None or expected is None:
        return None
    result = Result(case.name, "equal", request.asked_for, comparison=asdict(comparison))
    result = replace(result, curves=curves_of(trace, expected, found))
    if probe is None:
        return result
    modules = compare_modules(probe, found, expected)
    return result.diverging(comparison, diagnose(probe, comparison, trace, expected), modules)


def run_process(
    workload: Workload, request: ParityRequest, folder: ResultsDir, tell: LogProgress, console: Console
) -> None:
    """What each process does: the reference, and then every case that ``folder`` has no result of.

    Args:
        workload: without the tokenizer and the dataset's metadata of its task.
        folder: rank 0 keeps the reference and the results there.

    Raises:
        UserError: the reference cannot be trained.
    """
    rank_info = RankInfo.from_environment()
    device = choose_device(workload.config.device, rank_info)
    logger.setLevel(logging.WARNING if rank_info.is_rank0 else logging.CRITICAL)
    if workload.config.run.deterministic:
        use_deterministic_kernels()
    expected = None
    if rank_info.is_rank0:
        workload = workload.with_tokenizer_and_metadata()
        if not folder.has_reference:
            tell(f"one process, fp32: {workload.steps if request.precision == 'fp32' else 1} steps")
            with without_rank_in_environment():
                folder.save_reference(make_reference(workload, device, request.precision, console))
        expected = folder.reference()
    tokenizer, metadata, columns, done = _rank0_result(
        rank_info, device, lambda: (workload.tokenizer, workload.dataset_metadata, workload.columns, folder.names())
    )
    workload = replace(workload, tokenizer=tokenizer, dataset_metadata=metadata, columns=columns)
    for case in request.cases:
        if case.name in done:
            continue
        result = _try_case(workload, case, rank_info, device, expected, request, folder)
        if rank_info.is_rank0 and result is not None:
            folder.add(result)
            tell(result.line())


def refused_cases(request: ParityRequest, config: RunConfig, ranks: int) -> list[Result]:
    """The cases that cannot run with these settings on this many processes, as far as is known before any starts."""
    refused = []
    for case in request.cases:
        try:
            check_case(case, config, ranks, request.precision)
        except UserError as error:
            refused.append(_refused(case, request, error))
    return refused


def _rank0_result(rank_info: RankInfo, device: torch.device, make: Callable[[], T]) -> T:
    """Call ``make`` on rank 0, and broadcast the result; the other ranks wait ``RANK0_TIMEOUT`` seconds at most."""
    made = make() if rank_info.is_rank0 else None
    with Distributed(rank_info, device, RANK0_TIMEOUT) as world:
        return world.from_rank0(lambda: made, "the next case")  # type: ignore[return-value]


def _try_case(
    workload: Workload,
    case: Case,
    rank_info: RankInfo,
    device: torch.device,
    expected: Reference | None,
    request: ParityRequest,
    folder: ResultsDir,
) -> Result | None:
    """One case, in its own world."""
    config = case.apply_to(workload.config, request.precision)
    alone = case.alone or rank_info.world_size == 1
    try:
        check_case(case, workload.config, rank_info.world_size, request.precision)
    except UserError as error:
        return _refused(case, request, error)
    if alone:
        return _rank0_result(rank_info, device, lambda: _run_alone(workload, case, device, expected, request))
    with Distributed(
        rank_info, device, config.launch.timeout, ParallelDims.of(case.parallel, rank_info.world_size)
    ) as world:
        try:
            return run_case(workload, case, world, expected, request)
        except UserError as error:
            folder.save_crash(str(error))
            # unless all ranks refuse, the process ends: those that continue would wait for it in vain
            if error.exit_code is not ExitCode.WRONG_REQUEST or not _all_refuse(world):
                raise
            folder.drop_crash()
            return _refused(case, request, error)
        except Exception as error:
            folder.save_crash(describe(error))
            raise


def _all_refuse(world: Distributed) -> bool:
    """Whether every rank refuses the case; each that does calls it. By the store, as the others may be in a
    collective."""
    world.store.set(f"refused/{world.rank}", "")
    end = time.monotonic() + REFUSAL_SECONDS
    while time.monotonic() < end:
        if world.store.check([f"refused/{rank}" for rank in range(world.size)]):
            return True
        time.sleep(0.05)
    return False


def _run_alone(
    workload: Workload, case: Case, device: torch.device, expected: Reference | None, request: ParityRequest
) -> Result | None:
    """A case of one process, on rank 0."""
    try:
        alone = Distributed(RankInfo(), device, workload.config.launch.timeout)
        with without_rank_in_environment(), alone as world:
            return run_case(workload, case, world, expected, request)
    except UserError as error:
        if error.exit_code is not ExitCode.WRONG_REQUEST:
            raise
        return _refused(case, request, error)


def _refused(case: Case, request: ParityRequest, error: UserError) -> Result:
    return Result(case.name, "refused", request.asked_for, [str(error)])


def describe(error: Exception) -> str:
    """Describe an error, with the module whose forward raised it, if any."""
    owners = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    modules = [owner for owner in owners if isinstance(owner, nn.Module)]
    text = f"{type(error).__name__}: {error}"
    for root in modules:
        names = {id(module): name for name, module in root.named_modules()}
        name = clean_name(names.get(id(modules[-1]), "")).removeprefix("module.")
        if name and name != "module":  # DDP's own name for what it wraps
            return f"in {name}: {text}"
    return text
