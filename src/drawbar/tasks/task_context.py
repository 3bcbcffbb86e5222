"""``TaskContext``: what a task is built from."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from drawbar.config.schema.run_config import RunConfig
from drawbar.tasks.old_names import section_of_config


def _unchanged(model: nn.Module) -> None:
    """Leaves a model as it is."""


@dataclass(frozen=True)
class TaskContext:
    """What a task is built from: the run's configuration, and what is known of the run already."""

    run_config: RunConfig
    tokenizer: Any = None
    """The run's tokenizer; None where the task is to build it."""
    dataset_metadata: dict[str, Any] | None = None
    """What the run knows of its training data; None where the task is to find it."""
    has_checkpoint: bool = False
    """Whether the weights of a checkpoint take the place of those that ``build_model`` returns."""
    trains: bool = True
    """False where a trained model is only used: its frozen weights then stay in fp32, and no layer computes in fp8."""
    has_labels: bool = True
    """False where records have no targets to learn from or to compare with: ``encode`` then does without them."""
    model_fields: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the config of a transformers model, which take precedence over those that the task sets."""
    change_model: Callable[[nn.Module], None] = _unchanged
    """Called by engines with what ``build_model`` or ``build_meta_model`` returned, to change it in place."""

    def __getattr__(self, name: str) -> Any:
        return section_of_config(self, name)
