"""How long each step of a training took, and its loss: what every peer returns."""

import os
import time
from typing import Any

import torch

from benchmarks.common.gpu_memory import memory
from benchmarks.common.process_memory import status_bytes
from benchmarks.common.turns import Turn
from benchmarks.peers.step_profile import StepProfile, StepTrace
from benchmarks.peers.workload import Workload


class Recorder:
    """Stamps steps: on a GPU by events in its stream, which nobody waits for before the end. Losses stay on their
    device until then, so that reading them costs no step anything."""

    def __init__(self, workload: Workload, device: torch.device | None = None) -> None:
        self.workload = workload
        self.device = device or default_device()
        self._losses: list[Any] = []
        self._stamps: list[tuple[Any, Any]] = []
        self._last: Any = None
        self._first_step_at = 0.0
        self._turn = Turn()
        self._profile = StepProfile(self.device) if workload.profiled else None
        self._trace = StepTrace() if workload.traced else None
        self._seconds_by_kind: dict[str, float] = {}
        self._counts: dict[str, float] = {}

    def begin(self) -> None:
        """Right before the first step."""
        self._turn.begin()
        self._last = self._stamp()

    def step(self, loss: Any) -> None:
        """After each step, with its mean loss over the global batch, or this rank's if ranks have equally many
        targets."""
        self._losses.append(loss)
        self._stamps.append((self._last, self._stamp()))
        if self.steps == 1 or self._turn.is_shared:  # whoever's turn is next has the device for itself
            self._synchronize()
        if self.steps == 1:
            self._first_step_at = time.time() - self._turn.waited
        self._turn.step()
        if self._profile is not None and self.steps == self.workload.warm_up:
            self._synchronize()
            self._profile.start()
        if self._profile is not None and self.steps == self.workload.steps:
            self._synchronize()
            self._seconds_by_kind = self._profile.stop()
        if self._trace is not None:
            self._trace_steps(self._trace)
        self._last = self._stamp()

    def _trace_steps(self, trace: StepTrace) -> None:
        work = self.workload
        if self.steps == work.steps - work.traced:
            self._synchronize()
            trace.start()
        if self.steps == work.steps:
            self._synchronize()
            counts = trace.stop(work.trace)
            self._counts = {name: count / work.traced for name, count in counts.items()}

    @property
    def steps(self) -> int:
        return len(self._losses)

    def result(self, model: torch.nn.Module | None = None) -> dict[str, Any]:
        """Args: model: that was trained, for the loss of held-out data, where there are any."""
        losses = torch.tensor([float(loss) for loss in self._losses])
        if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
            losses = losses.to(self.device)
            torch.distributed.all_reduce(losses)
            losses /= torch.distributed.get_world_size()
        self._synchronize()
        steps = [self._seconds(begin, end) for begin, end in self._stamps]
        timed = slice(self.workload.warm_up, self.workload.steps - self.workload.traced)
        return {
            "losses": losses.tolist(),
            "step_seconds": steps,
            "targets_per_second": sum(self.workload.targets()[timed]) / sum(steps[timed]),
            "first_step_at": self._first_step_at,
            "peak_bytes": peak_bytes(self.device),
            "memory": memory(self.device),
            "seconds_by_kind": self._seconds_by_kind,
            "counts": self._counts,
            "held_out_loss": None if model is None else self.workload.held_out_loss(model),
        }

    def _stamp(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, begin: Any, end: Any) -> float:
        return begin.elapsed_time(end) / 1e3 if self.device.type == "cuda" else end - begin

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def default_device() -> torch.device:
    """The GPU of this rank, or the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    return torch.device("cpu")


def peak_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return status_bytes("VmHWM")


def rank_and_size() -> tuple[int, int]:
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
