"""``Task``: what a user writes. Override one method or all of them.

The engine calls ``forward``, ``loss`` and ``weight`` for training, and ``predict`` for evaluation. A task never divides
a loss, never moves a tensor to a device and never asks how many processes there are: the engine does.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from drawbar.config.schema import DataSection, RunConfig, TaskConfig
from drawbar.data.dataset import Sample
from drawbar.data.sources import open_records
from drawbar.errors import UserError
from drawbar.tasks.batch import Batch, pad_and_stack


class Task:
    """A model, its data, its loss and its scores."""

    Config: type[TaskConfig] = TaskConfig
    """This task's own options; each field is a key under ``task:`` and a command-line override."""

    def __init__(self, run_config: RunConfig) -> None:
        self.config: Any = run_config.task
        self.data: DataSection = run_config.data
        self.tokenizer: Any = None
        """What ``build_tokenizer`` returned; set before anything else is called."""

    def build_tokenizer(self) -> Any:
        """The tokenizer, or None for a task that needs none. Called once, on rank 0; it is sent to the others."""
        return None

    def build_model(self) -> nn.Module:
        """The model, in fp32, on the CPU."""
        raise NotImplementedError(f"{type(self).__name__} does not define build_model()")

    def records(self, split: str) -> Sequence[dict[str, Any]]:
        """The records of ``train``, ``validation`` or ``test``: plain dicts, in a fixed order.

        Raises:
            UserError: ``data.<split>`` is not set, or cannot be read.
        """
        source = getattr(self.data, split)
        if source is None:
            raise UserError(f"there is no {split} data", where=f"data.{split}", remedy=f"set data.{split}=FILE")
        return open_records(source, split, self.data.sample_by)

    def encode(self, record: dict[str, Any], train: bool) -> Sample | list[Sample] | None:
        """One record as a sample, or as several; None drops it, and is counted."""
        return record

    def collate(self, samples: list[Sample]) -> Batch:
        """Samples as one batch of tensors."""
        return pad_and_stack(samples)

    def forward(self, model: nn.Module, batch: Batch) -> Any:
        """The model's outputs."""
        return model(**batch.inputs)

    def loss(self, outputs: Any, batch: Batch) -> torch.Tensor:
        """The SUM of the loss over the batch's units (never a mean), as a 0-d tensor."""
        raise NotImplementedError(f"{type(self).__name__} does not define loss()")

    def weight(self, batch: Batch) -> float:
        """How many units the loss runs over, from the batch alone; by default its samples."""
        return len(batch.ids)

    def predict(self, model: nn.Module, batch: Batch) -> list[Any]:
        """One prediction a sample, in the order of ``batch.ids``, as plain Python values."""
        raise NotImplementedError(f"{type(self).__name__} does not define predict()")

    @property
    def predicts(self) -> bool:
        """Whether this task defines ``predict``."""
        return type(self).predict is not Task.predict

    def score(self, records: list[dict[str, Any]]) -> dict[str, float]:
        """Scores from the records, each with its ``prediction`` (a list of them, for a record of several samples)."""
        return {}

    def loss_scores(self, loss: float, weight: float, records: list[dict[str, Any]]) -> dict[str, float]:
        """Scores that follow from the summed loss alone; ``records`` are those that were evaluated."""
        return {"loss": loss / weight}
