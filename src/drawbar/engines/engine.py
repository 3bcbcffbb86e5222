"""The seam between the loop and every strategy.

The trainer hands over micro-batches and gets a :class:`StepResult`; it never names a strategy. The engine owns the
model, the optimizer and the loss contract: gradients are those of ``sum(loss) / sum(weight)`` over the global batch.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from drawbar.data.loader import MicroBatch
from drawbar.engines.results import EngineState, EvalResult, StepResult
from drawbar.models.lora import Base
from drawbar.tasks.batch import Ask, Batch


class Engine(ABC):
    """Runs training and evaluation steps under one strategy."""

    positions: int | None
    """Most tokens of a text that the model has positions for; None where there is no such limit."""
    base: Base | None
    """What is below the adapters of the run, the same on every rank; None of a run without adapters."""
    total_steps: int
    """Optimizer steps of the whole run, for the schedule; it must be set before the first."""

    @property
    @abstractmethod
    def checkpoint_bytes(self) -> int:
        """About how large a full checkpoint is."""

    @abstractmethod
    def train_step(self, micro_batches: list[MicroBatch[Batch]]) -> StepResult:
        """Forward, backward, reduce, clip and update for one global batch, of which this is the rank's share."""

    @abstractmethod
    def share_buffers(self) -> None:
        """Make the buffers that training changes the same on all ranks, before they evaluate. Every rank calls it."""

    @abstractmethod
    def eval_step(self, batch: Batch) -> EvalResult:
        """Loss and predictions of this rank's batch, without gradients. All ranks call it equally often."""

    @abstractmethod
    def predict_step(self, batch: Batch, ask: Ask) -> list[Any]:
        """What ``ask`` (``task.predict``, say) answers to this rank's batch alone: its records need no labels."""

    @abstractmethod
    def generate(self, inputs: dict[str, torch.Tensor], **options: Any) -> torch.Tensor:
        """Token ids (B, L): the inputs and what the model goes on with, by transformers' ``generate(**options)``."""

    @abstractmethod
    def state(self, writers: Sequence[int] = (0,)) -> EngineState:
        """The full state, in host memory on the ranks ``writers``, rank 0 among them, sharing nothing with the live
        one; no tensors on other ranks. Every rank calls it."""

    @abstractmethod
    def gradients(self) -> dict[str, torch.Tensor]:
        """The full gradients by parameter name, before clipping, in host memory on rank 0, nothing on other ranks.
        Every rank calls it, between backward and update."""

    @abstractmethod
    def load(self, state: EngineState) -> None:
        """Put back a state of any strategy and world size. Raises ``UserError`` for another model or optimizer."""

    @abstractmethod
    def load_model(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Put back the weights alone, for evaluation, generation and a fork."""

    @abstractmethod
    def export(self, folder: Path, base_name: str, merge: bool) -> None:
        """Write the model as a folder that transformers loads; of a LoRA run the adapter of the model ``base_name``
        alone, or, with ``merge``, a whole model: the engine is of no more use then.

        Raises:
            UserError: the model is none of transformers'.
        """

    @abstractmethod
    def close(self) -> None:
        """Free what the engine holds."""
