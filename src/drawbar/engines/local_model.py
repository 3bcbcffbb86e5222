"""``LocalModel``: the part of a task's model on one rank (full model, shards or stages), and how to build it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from drawbar.config.parallel_dims import ParallelDims
from drawbar.config.schema.run_config import RunConfig
from drawbar.distributed.device_mesh import buffer_replicas
from drawbar.distributed.process_group import Distributed
from drawbar.engines.loss_choice import choose_cross_entropy
from drawbar.models.huggingface import weights_without_file
from drawbar.models.lora import FrozenBaseInfo, add_adapters, add_adapters_to_base
from drawbar.models.packed import allow_packing
from drawbar.models.plans import plan_for
from drawbar.parallel.apply import parallelize
from drawbar.parallel.fp8 import compute_in_fp8
from drawbar.parallel.low_precision_weights import store_frozen_weights_low
from drawbar.parallel.tensor import FusedLayout, fused_layouts
from drawbar.parallel.weights import broadcast_shards, load_shard, materialize, named_tensors
from drawbar.runtime.log import logger
from drawbar.tasks.task import Task

WeightSource: TypeAlias = Mapping[str, torch.Tensor] | nn.Module | None
"""Where the initial weights come from: tensors by name, or the full model (on rank 0; None on the others)."""


@dataclass(frozen=True)
class LocalModel:
    """What one rank holds of a model."""

    module: nn.Module
    """The full model, its shards (DTensor), or this rank's pipeline stages."""
    meta_model: nn.Module
    """A model with all names and full shapes, perhaps without values; it may be ``module`` itself."""
    base: FrozenBaseInfo | None
    """Digest and newly initialized parameters of the base model under LoRA; None without LoRA."""
    fused: dict[str, FusedLayout] = field(default_factory=dict)
    """Parameters that are stored in another order than in the whole model."""
    replicas: list[dist.ProcessGroup] = field(default_factory=list)
    """Process groups over which ``share_buffers`` makes the model's buffers equal; none for pipeline stages."""
    cross_entropy: str = "plain"
    """The setting ``task.cross_entropy``, with ``auto`` resolved."""

    @property
    def loss_in_head(self) -> bool:
        """Whether the model returns the loss of a batch that has targets for its head."""
        return self.cross_entropy != "plain"


def with_adapters(structure: nn.Module, config: RunConfig, base: FrozenBaseInfo | None) -> nn.Module:
    """The model ``structure`` (without its weights), with LoRA adapters if the run has them.

    Args:
        base: digest and newly initialized parameters of the base model; None without LoRA.
    """
    return structure if config.lora is None or base is None else add_adapters(structure, config.lora, base.new)


def build_model(task: Task) -> nn.Module:
    """The task's model, after ``task_context.change_model``."""
    return _changed(task, task.build_model())


def build_meta_model(task: Task) -> nn.Module:
    """The task's model without its weights, after ``task_context.change_model``."""
    return _changed(task, task.build_meta_model())


def _changed(task: Task, model: nn.Module) -> nn.Module:
    task.task_context.change_model(model)
    return model


def _build_adapted(task: Task, config: RunConfig) -> tuple[nn.Module, FrozenBaseInfo | None]:
    """The full model, with the run's LoRA adapters if any, and what identifies their base model (None without)."""
    model = build_model(task)
    if config.lora is None:
        return model, None
    return model, add_adapters_to_base(model, config.lora, weights_without_file(model))


def allow_packed_rows(model: nn.Module, task: Task, config: RunConfig) -> None:
    """Let the model take packed rows, where the data are packed, or micro-batches are made one row."""
    padding_free = config.data.padding_free is True
    if (padding_free or config.data.batching == "packed") and isinstance(model, PreTrainedModel):
        allow_packing(model, per_sample=task.label_placement == "sample", under_mask=not padding_free)


def apply_formats(model: nn.Module, task: Task, config: RunConfig) -> None:
    """Give a model that is trained the run's number formats: those that frozen weights are stored in, and that linear
    layers multiply in (autocast does the rest). Call this before the model is parallelized."""
    if not task.task_context.trains:
        return
    store_frozen_weights_low(model, config.precision)
    if config.parallel.fp8 is not None:
        compute_in_fp8(model, config.parallel.fp8)


def build_whole(task: Task, config: RunConfig, world: Distributed, device: torch.device) -> LocalModel:
    """All of the model, on every rank. It is made on the CPU, so that it starts from the same random numbers on every
    device."""
    with world.barrier_after("building the model"):
        model, base = _build_adapted(task, config)
        allow_packed_rows(model, task, config)
        cross_entropy = choose_cross_entropy(task, config, model, [model])
        apply_formats(model, task, config)
        parallelize(model, plan_for(model), config.parallel, ParallelDims(), None, config.precision)
        model = model.to(device)
    base = world.from_rank0(lambda: base, "building the model")  # all ranks will hold rank 0's weights
    return LocalModel(model, model, base, {}, [dist.group.WORLD] if world.size > 1 else [], cross_entropy)


def build_shards(task: Task, config: RunConfig, world: Distributed, mesh: DeviceMesh) -> LocalModel:
    """The shards of the model that this rank holds.

    Without LoRA, if the task knows the weight files, each rank reads its shards; else rank 0 builds the full model and
    broadcasts it tensor by tensor, and every rank keeps its shards.
    """
    model, source, base = build_meta(task, config, world)
    allow_packed_rows(model, task, config)
    cross_entropy = choose_cross_entropy(task, config, model, [model])
    apply_formats(model, task, config)
    parallelize(model, plan_for(model), config.parallel, world.dims, mesh, config.precision)
    fused = fused_layouts(model)
    materialize(model, torch.device("cpu") if config.parallel.offload else world.device, world.device)
    load_first_weights(model, source, fused, world)
    return LocalModel(model, model, base, fused, buffer_replicas(mesh), cross_entropy)


def load_first_weights(
    module: nn.Module,
    source: WeightSource,
    fused: Mapping[str, FusedLayout],
    world: Distributed,
) -> None:
    """Load the initial weights of this rank's part of the model from the source that ``build_meta`` returned."""
    if isinstance(source, Mapping):
        with world.barrier_after("reading the weights"):
            for name, parameter in module.named_parameters():
                load_shard(parameter, source, name, fused.get(name))
    else:
        broadcast_shards(named_tensors(module), source, fused, world.device)


def build_meta(
    task: Task, config: RunConfig, world: Distributed
) -> tuple[nn.Module, WeightSource, FrozenBaseInfo | None]:
    """The model on the meta device; the source of its weights (files, or the full model on rank 0); and what
    identifies the base model under its LoRA adapters (None without LoRA)."""
    files = None
    if config.lora is None:
        with world.working("finding the weights"):
            structure = build_meta_model(task)
            files = task.stored_weights(structure)
        if world.sum(files is not None) == world.size:
            return structure, files, None
    # build the full model first: it must draw the same random numbers as in a single-process run
    with world.barrier_after("building the model"):
        source, base = _build_adapted(task, config) if world.is_rank0 else (None, None)
    base = world.from_rank0(lambda: base, "building the model")
    with world.barrier_after("building the model"):
        structure = with_adapters(build_meta_model(task), config, base)
    logger.info("weights: rank 0 builds the model, and sends each process its part")
    return structure, source, base
