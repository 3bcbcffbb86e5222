"""Decides ``data.padding_free``. Where it is true, the samples of a micro-batch are joined in one row, and with
``data.batching=packed``, whose rows are joined already, attention is computed by segment; where it is false, neither.
Also collates micro-batches so."""

from dataclasses import dataclass

import torch

from drawbar.config.rules.parallel_rules import COMPILED_BY_FLASH, PADDING_FREE
from drawbar.config.schema.run_config import RunConfig
from drawbar.data.dataset import Sample
from drawbar.data.loader import Collate
from drawbar.data.packing import LabelPlacement, RowLayout
from drawbar.errors import UserError
from drawbar.models.huggingface import load_model_config
from drawbar.models.packed import attends_by_flash, packs_without_mask
from drawbar.runtime.safetensors_reader import DTYPES
from drawbar.tasks.batch import Batch
from drawbar.tasks.method_errors import is_user_defined
from drawbar.tasks.pretrained import PretrainedTask
from drawbar.tasks.task import Task

MODEL = ("build_model", "build_meta_model")
"""Methods by which a user provides their own model: it is not known to take rows of several samples."""
ROWS = ("encode", "augment", "collate", "forward", "loss", "num_targets")
"""Methods that may expect a row for each sample, where a user wrote them. With ``data.batching=packed`` they get rows
of several samples in any case, and are not looked at."""
DEVICES = ("cpu", "cuda")


def choose_padding_free(task: Task, config: RunConfig, device: torch.device) -> RunConfig:
    """The configuration with ``data.padding_free`` decided.

    Args:
        task: with its tokenizer.
        config: with its dtypes decided (``choose_dtypes``).

    Raises:
        UserError: ``data.padding_free`` is true, and the task, its model or its compiled blocks need padding.
    """
    wanted = config.data.padding_free
    if wanted is False:
        return config
    decided = config.model_copy(update={"data": config.data.model_copy(update={"padding_free": True})})
    forbidden = next((rule.reason for rule in PADDING_FREE if rule.broken(decided)), None)
    obstacle = forbidden or _obstacle(task, config, device)
    if obstacle is None:
        return decided
    if wanted is True:
        raise UserError(obstacle, where="data.padding_free", remedy="set data.padding_free=auto")
    return config.model_copy(update={"data": config.data.model_copy(update={"padding_free": False})})


def _obstacle(task: Task, run: RunConfig, device: torch.device) -> str | None:
    """Why the run cannot do without padding, or None."""
    if device.type not in DEVICES:
        return f"attention within samples is not tried on {device.type}"
    if not isinstance(task, PretrainedTask):
        return f"{type(task).__name__} is not built on a task of drawbar's own"
    for name in MODEL if task.data.batching == "packed" else (*MODEL, *ROWS):
        if is_user_defined(task, name):
            return f"{type(task).__name__} has a {name} of its own, which may expect a row for each sample"
    try:
        config = load_model_config(task.model_name, task.config.from_scratch, task.tokenizer)
    except UserError:
        return None  # the task says it, and what to do, when it builds its model
    if not packs_without_mask(config, task.head):
        return f"a {config.model_type} model of {task.config.type} cannot be kept from looking beyond a sample"
    if run.parallel.compile and not attends_by_flash(config, DTYPES[run.precision], device):
        return COMPILED_BY_FLASH
    return None


def train_collate(task: Task, config: RunConfig) -> Collate[Batch]:
    """How the rows of a training micro-batch become a batch; ``data.padding_free`` is decided."""
    if config.data.padding_free is not True or config.data.batching == "packed" or task.label_placement is None:
        return task.collate
    return _JoinedCollate(task, task.label_placement)


@dataclass(frozen=True)
class _JoinedCollate:
    """Collates samples as one row. It pickles, as tasks do."""

    task: Task
    placement: LabelPlacement

    def __call__(self, samples: list[Sample]) -> Batch:
        return self.task.collate([RowLayout.of_sample(samples[0], self.placement).join(samples)])
