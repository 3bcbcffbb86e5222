"""``TaskContext``: the constructor argument of tasks."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from drawbar.config.schema.run_config import RunConfig


def _unchanged(model: nn.Module) -> None:
    """Leaves a model as it is."""


@dataclass(frozen=True)
class TaskContext:
    """Inputs for building a task: the run's configuration, and the parts of the task that the run has stored."""

    run_config: RunConfig
    tokenizer: Any = None
    """The run's tokenizer; None if the task should build it."""
    dataset_metadata: dict[str, Any] | None = None
    """What the run knows of its training data; None if the task should find it."""
    has_checkpoint: bool = False
    """Whether the weights of a checkpoint replace those that ``build_model`` returns."""
    trains: bool = True
    """False if a trained model is only used: its frozen weights, which training keeps in the run's precision, then
    stay in fp32, and no layer computes in fp8."""
    weightless: bool = False
    """Whether the values of the weights do not matter: engines then leave those of a new model unset."""
    has_labels: bool = True
    """False if records have no targets to learn from or to compare with: ``encode`` then does without them."""
    initial_model: Path | None = None
    """The folder with a copy of the model that ``task.model`` names, where that is the checkpoint of another run."""
    model_fields: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the config of a transformers model, which take precedence over those that the task sets."""
    change_model: Callable[[nn.Module], None] = _unchanged
    """Called by engines with what ``build_model`` or ``build_meta_model`` returned, to change it in place."""

    @property
    def begins_training(self) -> bool:
        """Whether a run begins with this task: it trains, and has no checkpoint to resume from. What would make such a
        run useless is then refused; a run that exists is left as it is."""
        return self.trains and not self.has_checkpoint
