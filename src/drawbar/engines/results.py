"""What an engine returns: the results of a step and of an evaluation, and its own state."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from drawbar.config.schema.run_config import RunConfig


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did, the same on every rank. Tensors stay on the device until somebody reads them."""

    loss: torch.Tensor
    """Mean loss over the targets of the global batch, before the update (0-d)."""
    grad_norm: torch.Tensor
    """Global gradient norm before clipping (0-d)."""
    num_targets: float
    """Targets (tokens, examples or decisions) in the global batch."""
    lr: float
    """Learning rate of the update."""
    skipped: bool
    """Whether fp16 overflowed, and the update was left out on every rank."""


@dataclass(frozen=True)
class EvalResult:
    """This rank's share of an evaluation."""

    loss: torch.Tensor
    """Sum of the loss over the batch's targets (0-d); in a pipeline, 0 on ranks without the last stage. It stays on the
    device until somebody reads it."""
    num_targets: float
    """Number of targets in the batch."""
    predictions: list[Any] | None
    """One a sample, in the order of the batch's ids; None for a task without ``predict``."""


@dataclass
class EngineState:
    """All that an engine needs to go on exactly: tensors under fully qualified names, and plain values."""

    model: Mapping[str, torch.Tensor]
    optimizer: Mapping[str, torch.Tensor]
    values: dict[str, Any] = field(default_factory=dict)
    """What ``saved_values`` returns."""


def saved_values(step: int, config: RunConfig, scaler: dict[str, float]) -> dict[str, Any]:
    """What a checkpoint holds of an engine besides tensors. ``scaler``: from ``Updater.scaler_state``."""
    return {"step": step, "optimizer": config.optim.name, "precision": config.precision, "scaler": scaler}
