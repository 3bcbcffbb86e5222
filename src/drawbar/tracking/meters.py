"""Measures a run: speed, time left, memory."""

import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

Clock = Callable[[], float]
"""Seconds from any origin; only differences count."""


class Throughput:
    """Units (tokens, examples) trained per second of training, excluding time spent on anything else."""

    def __init__(self, clock: Clock = time.perf_counter) -> None:
        self._clock = clock
        self._units = 0.0
        self._start = clock()

    def add(self, units: float) -> None:
        """Count the units of one step, over all processes."""
        self._units += units

    def read(self) -> float:
        """Units per second since the last reading, outside :meth:`paused`; 0 if no time has passed."""
        now = self._clock()
        seconds = now - self._start
        rate = self._units / seconds if seconds > 0 else 0.0
        self._units, self._start = 0.0, now
        return rate

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time spent inside, such as for evaluating and saving. May be nested; do not read inside."""
        trained = self._clock() - self._start
        try:
            yield
        finally:
            # Set from the time trained so far, not from the pause's length, so that a nested pause counts once.
            self._start = self._clock() - trained


class TimeLeft:
    """Estimates the wall time until the last step, from the mean of the steps so far.

    The mean includes evaluation and saving, which the remaining steps will need too, but not the first step, which
    includes compilation and warm-up.
    """

    def __init__(self, total_steps: int, first_step: int, clock: Clock = time.perf_counter) -> None:
        """``first_step`` steps are already done when the run starts or resumes."""
        self._clock = clock
        self._total_steps = total_steps
        self._step = self._from_step = first_step
        self._from_time: float | None = None

    def advance(self, step: int) -> None:
        """``step`` steps are done."""
        self._step = step
        if self._from_time is None:
            self._from_step, self._from_time = step, self._clock()

    def seconds(self) -> float | None:
        """Seconds left; None until the second step is done."""
        if self._from_time is None or self._step == self._from_step:
            return None
        mean = (self._clock() - self._from_time) / (self._step - self._from_step)
        return mean * (self._total_steps - self._step)


def peak_memory(device: torch.device) -> int:
    """Peak memory in bytes: of tensors on a CUDA device since the last reset, else resident memory of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # getrusage(2) counts in bytes on macOS and in KiB on Linux.
    return peak if sys.platform == "darwin" else peak * 1024
