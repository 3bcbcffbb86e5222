"""When each step of a training ended, and its loss: what every peer returns."""

import os
import time
from typing import Any

import torch

from benchmarks.common.process_memory import status_bytes
from benchmarks.common.turns import Turn
from benchmarks.peers.step_profile import StepProfile
from benchmarks.peers.workload import Workload


class Recorder:
    """Stamps steps. Losses stay on their device until the end, so that reading them costs no step anything."""

    def __init__(self, workload: Workload, device: torch.device | None = None) -> None:
        self.workload = workload
        self.device = device or default_device()
        self._losses: list[Any] = []
        self._seconds: list[float] = []
        self._last = 0.0
        self._first_step_at = 0.0
        self._turn = Turn()
        self._profile = StepProfile(self.device) if workload.profiled else None
        self._seconds_by_kind: dict[str, float] = {}

    def begin(self) -> None:
        """Right before the first step."""
        self._turn.begin()
        self._last = self._now()

    def step(self, loss: Any) -> None:
        """After each step, with its mean loss over the global batch, or this rank's if ranks have equally many
        targets."""
        self._losses.append(loss)
        self._seconds.append(self._now() - self._last)
        if len(self._losses) == 1:
            self._first_step_at = time.time() - self._turn.waited
        self._turn.step()
        if self._profile is not None and self.steps == self.workload.warm_up:
            self._profile.start()
        if self._profile is not None and self.steps == self.workload.steps:
            self._seconds_by_kind = self._profile.stop()
        self._last = self._now()

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
        steps = self._seconds
        warm_up = self.workload.warm_up
        return {
            "losses": losses.tolist(),
            "step_seconds": steps,
            "targets_per_second": sum(self.workload.targets()[warm_up:]) / sum(steps[warm_up:]),
            "first_step_at": self._first_step_at,
            "peak_bytes": peak_bytes(self.device),
            "seconds_by_kind": self._seconds_by_kind,
            "held_out_loss": None if model is None else self.workload.held_out_loss(model),
        }

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


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
