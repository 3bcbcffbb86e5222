"""What an engine is composed of: a ``LocalModel``, and three parts that each implement one aspect of a strategy.

They do not inherit from one another: shared code is in functions. A strategy's builder chooses them.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from drawbar.data.loader import MicroBatch
from drawbar.engines.local_model import LocalModel
from drawbar.optim.average import WeightAverage
from drawbar.parallel.local_boxes import LocalBox
from drawbar.tasks.batch import Batch


class Executor(Protocol):
    """Runs forward and backward of micro-batches through this rank's part of the model."""

    def forward_backward(self, micro_batches: list[MicroBatch[Batch]], scale: float) -> torch.Tensor:
        """Accumulate the gradients of ``scale`` times the loss of every micro-batch, averaged over the ranks that see
        different tokens (dp and cp). Return the unscaled sum of the losses (0-d; 0 on ranks without the last stage)."""

    def evaluate(self, batch: Batch) -> tuple[torch.Tensor, list[Any] | None]:
        """The loss (0-d, on the device) of a batch, and the task's predictions, if any; without gradients."""

    def has_gradient(self, batch: Batch, training: bool) -> bool:
        """Whether the loss of a batch on the device requires grad; True on ranks without the last stage.

        Args:
            training: compute in training mode, else in evaluation mode; a pipeline does not distinguish them.
        """

    def inference(self) -> AbstractContextManager[Any]:
        """Context manager that yields a model to call like the full model, for forward passes without gradients."""


@dataclass(frozen=True)
class Update:
    """The result of an update."""

    grad_norm: torch.Tensor
    """Global gradient norm before clipping (0-d)."""
    skipped: bool
    """Whether the update was skipped on every rank because of fp16 overflow."""
    rejected: bool = False
    """Whether ``before_update`` refused it."""


class Updater(Protocol):
    """Gradient norm, clipping and the optimizer's step."""

    @property
    def loss_scale(self) -> float:
        """The factor that the executor multiplies the loss by, so that fp16 gradients stay in range."""

    def step(self, lr: float, before_update: Callable[[torch.Tensor], bool]) -> Update:
        """Clip once, update, and clear the gradients.

        Args:
            before_update: called with the gradient norm once the gradients are fully reduced, before they are clipped
                or used. Returns whether to update. Another library's engine ignores that, and may not know the norm
                yet (nan).
        """

    def scaler_state(self) -> dict[str, float]:
        """The loss scale, and the number of steps since it last changed; empty without fp16."""

    def load_scaler_state(self, state: dict[str, float]) -> None:
        """Restore the result of ``scaler_state``, from any strategy."""

    def close(self) -> None:
        """Free its resources."""


class StateAccess(Protocol):
    """Gathers full tensors, by full-model name, from the shards, and loads them; or lists the shards of this rank.
    Gathering is collective."""

    def model(self) -> dict[str, torch.Tensor]:
        """Full weights in host memory on rank 0 (for a pipeline stage, on its leader); empty on other ranks."""

    def optimizer(self) -> dict[str, torch.Tensor]:
        """The same for the optimizer state: ``{"<parameter>/<key>": tensor}``."""

    def gradients(self) -> dict[str, torch.Tensor]:
        """Full gradients, unscaled, in host memory on rank 0; between backward and update."""

    def load_model(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Set this rank's shards; each rank reads little more than these from stored tensors. Not collective, so an
        error on one rank leaves no other waiting (except for ZeRO-3 with NVMe, or with hpZ's secondary partition
        (``zero_hpz_partition_size``), which gathers weights to set them). Names and shapes have been checked."""

    def load_optimizer(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """The same for the optimizer state."""

    def tied(self) -> dict[str, str]:
        """Maps each alias of a tied weight to the name that it is saved under. The same on every rank."""

    def local_weight_boxes(self) -> list[LocalBox]:
        """The boxes of weights on this rank, with tied weights listed once. Not collective."""

    def local_optimizer_boxes(self) -> list[LocalBox]:
        """The same for the optimizer state, named ``<parameter>/<key>``."""

    def equal_on_replicas(self) -> dict[str, nn.Parameter]:
        """This rank's parameters, by name, that must be bitwise equal on all ranks with the same shard."""

    def gradients_equal_on_replicas(self) -> dict[str, torch.Tensor]:
        """The same for their gradients, between backward and update."""


@dataclass(frozen=True)
class EngineParts:
    """The result of a strategy's builder."""

    model: LocalModel
    executor: Executor
    updater: Updater
    state: StateAccess
    average: WeightAverage | None = None
    """The moving average of the weights, with ``optim.ema``."""
