"""Exports a checkpoint to a folder that transformers loads. Weights are copied from file to file, usually without
building a model.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from drawbar.checkpoint.format import Snapshot
from drawbar.checkpoint.read import explain_unusable, read_snapshot, weights_to_use
from drawbar.checkpoint.space import rust_errors_as_oserror
from drawbar.config.schema.run_config import LoraSection, RunConfig
from drawbar.distributed.process_group import Distributed
from drawbar.engines.local_model import build_meta_model
from drawbar.errors import UserError
from drawbar.models.lora import (
    AdaptedParameter,
    adapted_parameters,
    add_adapters_to_meta_model,
    as_stored,
    merged,
    merged_weight,
    save_adapter,
    saved_tensors,
)
from drawbar.models.saving import rounded, save_transformers
from drawbar.parallel.weights import check_weights
from drawbar.runtime.safetensors_reader import DTYPES
from drawbar.tasks.pretrained import PretrainedTask
from drawbar.tasks.task import Task
from drawbar.train.setup import checkpoint_of, on_one_process, open_checkpoint, task_of_run, warn_of_other_base


@dataclass(frozen=True)
class ExportFormat:
    """Which parts of a model are exported, and how."""

    merge: bool = False
    """For a LoRA run: write the full model with merged adapters instead of the adapters alone."""
    dtype: str = "fp32"
    """Dtype of the weights: a key of ``DTYPES``."""
    shard_size: str = "5GB"
    """Maximum size of one file of weights, so that a reader of part of the model need not read all of it. The export
    takes about as much memory."""


class CheckpointExport:
    """Writes the model and the tokenizer of a checkpoint for transformers' ``from_pretrained``.

    Needs memory for the weights of one file (``form.shard_size``) and a copy of one tensor. The full model is built
    only if the files of a LoRA run's pretrained model lack some of its weights, such as a new classification head.

    Args:
        checkpoint: see ``checkpoint_of``.
        world: of one process.

    Raises:
        UserError: there is no such checkpoint, or the model is not a transformers model.
    """

    def __init__(
        self,
        config: RunConfig,
        task_type: type[Task] | None,
        checkpoint: str | None,
        form: ExportFormat,
        world: Distributed,
    ) -> None:
        self._config = config = on_one_process(config)
        self._form = form
        self._task = task_of_run(task_type, config, world)
        self.path = checkpoint_of(config, checkpoint, world)
        snapshot = read_snapshot(self.path)
        self.step = snapshot.step
        self._whole = _checked(build_meta_model(self._task))
        self.model: nn.Module = self._whole
        """The model as trained (with adapters for a LoRA run), usually on the meta device: class and shapes."""
        self._weights = weights_to_use(snapshot)
        self._read: Callable[[str], Tensor] = self._weights.__getitem__
        if config.lora is not None:
            self._adapt(config.lora, snapshot, world)
        else:
            check_weights(saved_tensors(self._whole, config), self._weights)

    def _adapt(self, lora: LoraSection, snapshot: Snapshot, world: Distributed) -> None:
        """Set ``model`` and ``_read`` for a LoRA run, whose checkpoint lacks the frozen weights."""
        merge, weights = self._form.merge, self._task.stored_weights(self._whole)
        if weights is None:
            engine, _ = open_checkpoint(self._task, self._config, str(self.path), world)
            self.model = engine.module
            self._read = (merged(self.model) if merge else self.model).state_dict().__getitem__
            return
        self.model = _checked(build_meta_model(self._task))
        warn_of_other_base(snapshot, add_adapters_to_meta_model(self.model, lora, weights))
        check_weights(saved_tensors(self.model, self._config), self._weights)
        weights = as_stored(self.model, lora, weights)
        adapted = adapted_parameters(self.model) if merge else {}
        self._read = partial(_read_adapted, adapted, self._weights, weights)

    def write(self, folder: Path) -> None:
        """Write config, weights and tokenizer.

        Args:
            folder: an existing, empty folder; unusable after an error.

        Raises:
            UserError: a weight is too large for ``form.dtype``, or the checkpoint is damaged or cannot be read.
            OSError: the disk is full or fails.
        """
        with rust_errors_as_oserror(folder):
            self._write(folder)

    def _write(self, folder: Path) -> None:
        task, dtype = self._task, DTYPES[self._form.dtype]
        if self._config.lora is None or self._form.merge:
            save_transformers(self._whole, self._explained_read, folder, dtype, self._form.shard_size)
        else:
            base_name = task.model_name if isinstance(task, PretrainedTask) else getattr(task.config, "model", "")
            save_adapter(self.model, folder, base_name, lambda name: rounded(name, self._explained_read(name), dtype))
        if hasattr(task.tokenizer, "save_pretrained"):
            tokenizer = task.tokenizer_to_export() if isinstance(task, PretrainedTask) else task.tokenizer
            tokenizer.save_pretrained(str(folder))

    def _explained_read(self, name: str) -> Tensor:
        with explain_unusable(self.path):
            return self._read(name)


def _read_adapted(
    adapted: Mapping[str, AdaptedParameter], trained: Mapping[str, Tensor], weights: Mapping[str, Tensor], name: str
) -> Tensor:
    """A tensor of a LoRA run's model. Into an ``adapted`` one, the adapter is merged."""
    if name in adapted:
        return merged_weight(adapted[name], trained, weights)
    return trained[name] if name in trained else weights[name]


def _checked(model: Any) -> PreTrainedModel:
    if not isinstance(model, PreTrainedModel):
        raise UserError(
            f"{type(model).__name__} is not a transformers model, and has no format to export to",
            where="RUN",
            remedy="its weights are in the run's checkpoints, as safetensors",
        )
    return model
