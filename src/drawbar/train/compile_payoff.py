"""Logs whether ``parallel.compile`` pays off within a run: its cost, and the time saved per step."""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from statistics import quantiles

import torch

from drawbar.data.loader import MicroBatch
from drawbar.engines.engine import Engine
from drawbar.engines.trial_step import trial_step
from drawbar.engines.updaters import TorchUpdater
from drawbar.parallel.compile import CompileClock, uncompiled_blocks
from drawbar.runtime.log import logger
from drawbar.tasks.batch import Batch
from drawbar.tracking.meters import Throughput
from drawbar.train.memory_probe import memory_of

FIRST_COMPARED = 10
"""First step to compare; a run compiles most of its code in earlier steps."""
LAST_COMPARED = 15
"""The steps from ``FIRST_COMPARED`` to this one are also run as trials, compiled and uncompiled."""

Steps = Iterator[tuple[int, list[MicroBatch[Batch]]]]


def logging_compile_payoff(steps: Steps, engine: Engine, meter: Throughput, uncompiled_step_fits: bool) -> Steps:
    """Yield the same steps; if blocks are compiled, log after some of them what compilation has cost and saved.

    Args:
        steps: the remaining steps, made by every rank.
        meter: excludes the time of the trials.
        uncompiled_step_fits: whether an uncompiled step is known to fit into the device's memory.
    """
    left = engine.total_steps - engine.step
    if not engine.config.parallel.compile:
        return steps
    if left < LAST_COMPARED:
        logger.info("parallel.compile: the %d remaining steps are too few to tell whether it pays off", left)
        return steps
    fits = uncompiled_step_fits or engine.world.device.type == "cpu"
    updater = engine.updater if fits and isinstance(engine.updater, TorchUpdater) else None
    return _compared(steps, engine, updater, meter, left)


def _compared(steps: Steps, engine: Engine, updater: TorchUpdater | None, meter: Throughput, left: int) -> Steps:
    clock, saved, memory = CompileClock(), list[float](), memory_of(engine.world.device)
    for number, (step, micro_batches) in enumerate(steps, start=1):
        if updater is not None and FIRST_COMPARED <= number <= LAST_COMPARED:
            with meter.paused():
                # compiled and uncompiled trials alternate in running second, with warm caches
                saved.append(_saved_seconds(engine, updater, micro_batches, compiled_first=number % 2 == 0))
            if memory is not None:
                memory.reset()  # its peak was that of an uncompiled step
        if number == LAST_COMPARED:
            logger.info("parallel.compile: %s", describe_payoff(clock.seconds, saved, left))
        yield step, micro_batches


def _saved_seconds(
    engine: Engine, updater: TorchUpdater, micro_batches: Sequence[MicroBatch[Batch]], compiled_first: bool
) -> float:
    """Seconds that compilation saves in a step's forward and backward passes."""
    seconds = {}
    for is_compiled in (compiled_first, not compiled_first):
        began = _synchronized_time(engine.world.device)
        with nullcontext() if is_compiled else uncompiled_blocks(), trial_step(engine, updater, micro_batches):
            pass
        seconds[is_compiled] = _synchronized_time(engine.world.device) - began
    return seconds[False] - seconds[True]


def _synchronized_time(device: torch.device) -> float:
    """The time after synchronizing the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def describe_payoff(cost: float, saved: Sequence[float], left: int) -> str:
    """Describe what compilation costs and saves.

    Args:
        cost: seconds spent compiling so far.
        saved: seconds saved in each of some steps; empty if unknown.
        left: number of steps that this process makes.
    """
    took = f"it has taken {cost:,.1f} s"
    if not saved:
        return f"{took}; its savings are not measured here"
    low, typical, high = quantiles(saved, n=4)
    what = (
        f"{took} and saves {typical:.2g} s a step ({low:.2g} to {high:.2g} in the middle half of {len(saved)} trials)"
    )
    if cost <= typical * left:
        return f"{what}: it pays after {math.ceil(cost / typical):,} of {left:,} steps"
    if cost <= high * left:
        return f"{what}: whether that pays in {left:,} steps is not clear"
    return f"{what}: that does not pay in {left:,} steps; set parallel.compile=false"
