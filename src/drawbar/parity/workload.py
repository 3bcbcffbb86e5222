"""The workload of a comparison: a user's configuration, changed so that all strategies must compute the same.

The steps are the first ones of the configuration: its task, data, batches, optimizer and schedule. Two things change.
Dropout is switched off, since ranks draw other random numbers than one process does. And the model is made smaller on
request. (Two side checks change more: ``noise`` adds rounding, ``keeps_dropout`` keeps it on.)
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from drawbar.config.schema.run_config import RunConfig
from drawbar.config.schema.task_sections import COLUMNS_BY_SHAPE
from drawbar.data.loader import Loader
from drawbar.distributed.process_group import Distributed
from drawbar.distributed.rank_info import RankInfo
from drawbar.engines.build import build_engine
from drawbar.engines.engine import Engine
from drawbar.errors import UserError
from drawbar.models.huggingface import load_model_config
from drawbar.parity.comparison import Noise
from drawbar.runtime.seed import seed_everything
from drawbar.tasks.batch import Batch
from drawbar.tasks.padding import choose_padding_free
from drawbar.tasks.pretrained import PretrainedTask
from drawbar.tasks.task import Task
from drawbar.tasks.task_context import TaskContext
from drawbar.tasks.user_methods import make_task, name_failing_method
from drawbar.tracking.console import Console
from drawbar.train.batches import make_loader
from drawbar.train.setup import build_task, count_steps

_HOST = torch.device("cpu")
LAYER_COUNTS = ("num_hidden_layers", "num_layers", "num_decoder_layers", "encoder_layers", "decoder_layers")
"""What architectures call the number of their blocks."""


@dataclass(frozen=True)
class Workload:
    """A configuration, with its task's tokenizer and dataset metadata, which must be the same in every process."""

    config: RunConfig
    task_type: type[Task]
    steps: int
    layers: int | None = None
    """Blocks to keep of the model; None for all."""
    noise: Noise | None = None
    """Rounding to add to the outputs of the model's modules; None for none."""
    keeps_dropout: bool = False
    """Whether dropout stays on."""
    initial_model: Path | None = None
    """See ``TaskContext``."""
    tokenizer: Any = None
    dataset_metadata: dict[str, Any] = field(default_factory=dict)
    columns: dict[str, Any] = field(default_factory=dict)
    """The task's options that name columns, as the data have them."""

    def with_tokenizer_and_metadata(self) -> "Workload":
        """With the tokenizer and the dataset's metadata, made only in this process."""
        alone = Distributed(RankInfo(), _HOST, self.config.launch.timeout)
        task = build_task(self.task_type, self.config, alone, self.config.run_dir, initial_model=self.initial_model)
        found = task.run_config.task
        columns = {name: getattr(found, name) for name in COLUMNS_BY_SHAPE if hasattr(found, name)}
        metadata = task.dataset_metadata
        return replace(self, tokenizer=task.tokenizer, dataset_metadata=metadata, columns=columns)

    def loader(self, config: RunConfig, world: Distributed, console: Console | None = None) -> Loader[Batch]:
        task = make_task(self.task_type, self._context(config))
        config = choose_padding_free(task, config, world.device)
        return make_loader(task, config, world, console or Console())

    def total_steps(self, config: RunConfig, steps_per_epoch: int | None) -> int:
        """See ``Engine``."""
        return max(self.steps, count_steps(config.train, steps_per_epoch))

    def engine(self, config: RunConfig, world: Distributed, total_steps: int = 0) -> Engine:
        """An engine whose model starts from the same weights in every world.

        Args:
            total_steps: see ``Engine``.

        Raises:
            UserError: the configuration cannot be run so, or the strategy does not let its model be changed.
        """
        if config.lora is not None and not self.keeps_dropout:
            config = config.model_copy(update={"lora": config.lora.model_copy(update={"dropout": 0.0})})
        context = self._context_of_changed_model(config)
        changed: list[nn.Module] = []

        def change(model: nn.Module) -> None:
            context.change_model(model)
            changed.append(model)

        task = make_task(self.task_type, replace(context, change_model=change))
        config = choose_padding_free(task, config, world.device)
        seed_everything(config.run.seed)
        with name_failing_method(task):
            engine = build_engine(task, config, world, total_steps)
        if not changed:
            engine.close()
            raise UserError(
                "the strategy builds its model by task.build_model(), so parity could not switch off its dropout",
                where=f"parallel.strategy={config.parallel.strategy}",
                remedy="build it by drawbar.engines.local_model.build_model(task), or by build_whole there",
            )
        return engine

    def _context(self, config: RunConfig) -> TaskContext:
        config = config.model_copy(update={"task": config.task.model_copy(update=self.columns)})
        return TaskContext(config, self.tokenizer, self.dataset_metadata, initial_model=self.initial_model)

    def _context_of_changed_model(self, config: RunConfig) -> TaskContext:
        """The context of a task whose model is changed as this workload says."""
        layers, fields = self.layers, {}
        if layers is not None and self.task_type.build_model is PretrainedTask.build_model:
            # the blocks to leave out are never built, or read
            fields, layers = _fewer_layers(config.task, self.initial_model, self.tokenizer, layers), None

        def change(model: nn.Module) -> None:
            if layers is not None:
                keep_blocks(model, layers)
            if not self.keeps_dropout:
                switch_off_dropout(model)
            if self.noise is not None:
                self.noise.add_to(model)

        return replace(self._context(config), model_fields=fields, change_model=change)


def _fewer_layers(options: Any, initial_model: Path | None, tokenizer: Any, layers: int) -> dict[str, Any]:
    """Fields of the model's own config that leave it ``layers`` blocks."""
    config = load_model_config(str(initial_model or options.model), options.from_scratch, tokenizer)
    counts = {name: getattr(config, name, None) for name in LAYER_COUNTS}
    fields: dict[str, Any] = {name: min(value, layers) for name, value in counts.items() if isinstance(value, int)}
    if not fields:
        raise UserError(
            f"a {config.model_type} model does not say how many layers it has",
            where="--layers",
            remedy="leave out --layers, or set the number in task.from_scratch",
        )
    whole = max(value for value in counts.values() if isinstance(value, int))
    for name, value in config.to_dict().items():
        if isinstance(value, list) and len(value) == whole > layers and name.startswith("layer"):  # layer_types
            fields[name] = value[:layers]
    return fields


def keep_blocks(model: nn.Module, layers: int) -> None:
    """Keep the first blocks of each outermost ``nn.ModuleList`` of two modules or more, in place.

    Raises:
        UserError: there is no such list.
    """
    lists = [child for child in model.modules() if isinstance(child, nn.ModuleList) and len(child) > 1]
    if not lists:
        raise UserError(
            f"a {type(model).__name__} has no nn.ModuleList of blocks to leave some out of",
            where="--layers",
            remedy="leave out --layers, and make the model smaller by its own settings",
        )
    inside = {id(part) for whole in lists for block in whole for part in block.modules()}
    for blocks in lists:
        if id(blocks) not in inside:
            del blocks[layers:]
    config: Any = getattr(model, "config", None)
    if hasattr(config, "num_hidden_layers"):
        config.num_hidden_layers = min(layers, config.num_hidden_layers)


def switch_off_dropout(model: nn.Module) -> None:
    """Every probability to drop something becomes 0."""
    for holder, name in _probabilities(model):
        setattr(holder, name, 0.0)


def has_dropout(model: nn.Module) -> bool:
    """Whether the model has dropout in training."""
    return any(getattr(holder, name) > 0 for holder, name in _probabilities(model))


def _probabilities(model: nn.Module) -> Iterator[tuple[Any, str]]:
    """Where a model keeps its probabilities to drop something: in dropout modules, in attributes of others, and in
    its own config."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            yield module, "p"
        for holder in (module, getattr(module, "config", None)):
            for name, value in list(getattr(holder, "__dict__", {}).items()):
                if "drop" in name and isinstance(value, float):
                    yield holder, name
