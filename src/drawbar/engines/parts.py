"""What an engine is composed of: a ``LocalModel``, and three parts that each implement one aspect of a strategy.

None of them inherits code from another: what two of them share is a function. A strategy's builder chooses them.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from drawbar.data.loader import MicroBatch
from drawbar.engines.local_model import LocalModel
from drawbar.parallel.local_boxes import LocalBox
from drawbar.tasks.batch import Batch


class Executor(Protocol):
    """Forward and backward of micro-batches, through what this rank has of the model."""

    def forward_backward(self, micro_batches: list[MicroBatch[Batch]], scale: float) -> torch.Tensor:
        """Accumulate the gradients of ``scale`` times the loss of every micro-batch, averaged over the ranks that see
        different tokens (dp and cp). Return the unscaled sum of the losses (0-d; 0 on ranks without the last stage)."""

    def evaluate(self, batch: Batch) -> tuple[torch.Tensor, list[Any] | None]:
        """The loss (0-d, on the device) of a batch, and the task's predictions where it makes any; no gradients."""

    def has_gradient(self, batch: Batch, training: bool) -> bool:
        """Whether the loss of a batch on the device requires grad; True on ranks without the last stage.

        Args:
            training: compute in training mode, else in evaluation mode; a pipeline does not tell them apart.
        """

    def inference(self) -> AbstractContextManager[Any]:
        """A model that is called like the full model, for forward passes without gradients inside the context."""


@dataclass(frozen=True)
class Update:
    """What an update did."""

    grad_norm: torch.Tensor
    """Global gradient norm before clipping (0-d)."""
    skipped: bool
    """Whether fp16 overflowed, and the update was left out on every rank."""


class Updater(Protocol):
    """Gradient norm, clipping and the optimizer's step."""

    @property
    def loss_scale(self) -> float:
        """What the executor multiplies the loss by, so that fp16 gradients stay in range."""

    def step(self, lr: float, before_update: Callable[[], None]) -> Update:
        """Clip once, update, and clear the gradients.

        Args:
            before_update: called once the gradients are fully reduced, before they are clipped or used.
        """

    def scaler_state(self) -> dict[str, float]:
        """The loss scale, and the steps since it last changed; nothing without fp16."""

    def load_scaler_state(self, state: dict[str, float]) -> None:
        """Put back what ``scaler_state`` returned, under any strategy."""

    def close(self) -> None:
        """Free what it holds."""


class StateAccess(Protocol):
    """Gathers full tensors, by full-model name, from the shards, and loads them; or says which shards this rank holds.
    Gathering is collective: every rank calls each."""

    def model(self) -> dict[str, torch.Tensor]:
        """Full weights in host memory on rank 0 (of a pipeline's stage, on its leader); nothing on others."""

    def optimizer(self) -> dict[str, torch.Tensor]:
        """The same of the optimizer's state: ``{"<parameter>/<key>": tensor}``."""

    def gradients(self) -> dict[str, torch.Tensor]:
        """Full gradients, unscaled, in host memory on rank 0; between backward and update."""

    def load_model(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Set this rank's shards; each rank reads little more than these from stored tensors. Not collective, so that
        an error on one rank leaves no other waiting (but for ZeRO-3 with NVMe, or with hpZ's secondary partition
        (``zero_hpz_partition_size``), which gathers weights to set them). Names and shapes have been checked."""

    def load_optimizer(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """The same of the optimizer's state."""

    def tied(self) -> dict[str, str]:
        """Maps each further name of a tied weight to the name that it is saved under. The same on every rank."""

    def local_weight_boxes(self) -> list[LocalBox]:
        """The boxes of weights on this rank, a tied one once. Not collective."""

    def local_optimizer_boxes(self) -> list[LocalBox]:
        """The same of the optimizer's state: their names are ``<parameter>/<key>``."""

    def equal_on_replicas(self) -> dict[str, nn.Parameter]:
        """This rank's parameters, by name, that must be bitwise equal on all ranks with the same shard."""

    def gradients_equal_on_replicas(self) -> dict[str, torch.Tensor]:
        """The same of their gradients, between backward and update."""


@dataclass(frozen=True)
class EngineParts:
    """What a strategy's builder returns."""

    model: LocalModel
    executor: Executor
    updater: Updater
    state: StateAccess
