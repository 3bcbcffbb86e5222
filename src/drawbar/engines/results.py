"""The results of an engine: of a step and of an evaluation, and its state."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from drawbar.config.schema.run_config import RunConfig


@dataclass(frozen=True)
class StepResult:
    """The result of one optimizer step; all but ``own_loss`` are the same on every rank. Tensors stay on the device
    until read."""

    loss: torch.Tensor
    """Mean loss over the targets of the global batch, before the update (0-d)."""
    grad_norm: torch.Tensor
    """Global gradient norm before clipping (0-d)."""
    num_targets: float
    """Targets (tokens, examples or decisions) in the global batch."""
    lr: float
    """Learning rate of the update."""
    skipped: bool
    """Whether the update was skipped on every rank because of fp16 overflow."""
    rejected: bool
    """Whether the update was left out on every rank because ``Engine.approve`` refused it."""
    own_loss: torch.Tensor
    """Sum of the loss over this rank's share of the global batch, before the update (0-d; 0 on ranks without the last
    stage)."""


@dataclass(frozen=True)
class EvalResult:
    """This rank's share of an evaluation."""

    loss: torch.Tensor
    """Sum of the loss over the batch's targets (0-d); in a pipeline, 0 on ranks without the last stage. Stays on the
    device until read."""
    num_targets: float
    """Number of targets in the batch."""
    predictions: list[Any] | None
    """One per sample, in the order of the batch's ids; None for a task without ``predict``."""


@dataclass
class EngineState:
    """Everything an engine needs to resume exactly: tensors under fully qualified names, and plain values."""

    model: Mapping[str, torch.Tensor]
    optimizer: Mapping[str, torch.Tensor]
    values: dict[str, Any] = field(default_factory=dict)
    """The result of ``saved_values``."""


def saved_values(step: int, config: RunConfig, scaler: dict[str, float]) -> dict[str, Any]:
    """An engine's values in a checkpoint besides tensors. ``scaler``: from ``Updater.scaler_state``."""
    return {"step": step, "optimizer": config.optim.name, "precision": config.precision, "scaler": scaler}
