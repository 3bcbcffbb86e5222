"""From a task to a model on this rank: whole, or the parts of it that are this rank's."""

from collections.abc import Mapping

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from drawbar.config.schema import RunConfig
from drawbar.models.huggingface import weights_without_file
from drawbar.models.lora import Base, add_adapters, add_adapters_to_base
from drawbar.models.packed import allow_packing
from drawbar.models.plans import plan_for
from drawbar.parallel.apply import parallelize
from drawbar.parallel.tensor import Packed, packed_parameters
from drawbar.parallel.weights import broadcast_shards, load_shard, materialize, named_tensors
from drawbar.runtime.dist import Distributed
from drawbar.runtime.log import logger
from drawbar.runtime.mesh import ParallelDims
from drawbar.tasks.task import Task


def with_adapters(structure: nn.Module, config: RunConfig, base: Base | None) -> nn.Module:
    """A model without its weights, with the adapters of the run, where it has any.

    Args:
        base: what the whole model was found to be.
    """
    return structure if config.lora is None or base is None else add_adapters(structure, config.lora, base.new)


def _build_adapted(task: Task, config: RunConfig) -> tuple[nn.Module, Base | None]:
    """The whole model, with the adapters of the run, where it has any, and what there is to know below them."""
    model = task.build_model()
    if config.lora is None:
        return model, None
    return model, add_adapters_to_base(model, config.lora, weights_without_file(model))


def pack(model: nn.Module, task: Task, config: RunConfig) -> None:
    """Let the model take packed rows, where the data are packed."""
    if config.data.batching == "packed" and isinstance(model, PreTrainedModel):
        allow_packing(model, per_sample=task.targets == "sample")


def build_whole(
    task: Task, config: RunConfig, world: Distributed, device: torch.device, precision: str
) -> tuple[nn.Module, Base | None]:
    """The model of one process, also where it is replicated, and what is below its adapters. It is made on the CPU, so
    that it starts from the same random numbers on every device."""
    with world.together("building the model"):
        model, base = _build_adapted(task, config)
        pack(model, task, config)
        parallelize(model, plan_for(model), config.parallel, ParallelDims(), None, precision)
        model = model.to(device)
    return model, world.from_first(lambda: base, "building the model")  # its weights are those of all


def build_spread(
    task: Task, config: RunConfig, world: Distributed, dims: ParallelDims, mesh: DeviceMesh, precision: str
) -> tuple[nn.Module, dict[str, Packed], Base | None]:
    """The parts of the model that this rank holds, which of its parameters are stored in another order, and what is
    below its adapters.

    Where the task can say in which files the weights are, each rank reads its own; else rank 0 builds the whole model,
    and the others get their parts from it.
    """
    structure, source, base = build_structure(task, config, world)
    pack(structure, task, config)
    parallelize(structure, plan_for(structure), config.parallel, dims, mesh, precision)
    packed = packed_parameters(structure)
    materialize(structure, torch.device("cpu") if config.parallel.offload else world.device, world.device)
    fill_parts(structure, source, packed, world)
    return structure, packed, base


def fill_parts(
    module: nn.Module,
    source: Mapping[str, torch.Tensor] | nn.Module | None,
    packed: Mapping[str, Packed],
    world: Distributed,
) -> None:
    """The first weights of what this rank holds of a model, from where ``build_structure`` says."""
    if isinstance(source, Mapping):
        with world.together("reading the weights"):
            for name, parameter in module.named_parameters():
                load_shard(parameter, source, name, packed.get(name))
    else:
        broadcast_shards(named_tensors(module), source, packed, world.device)


def build_structure(
    task: Task, config: RunConfig, world: Distributed
) -> tuple[nn.Module, Mapping[str, torch.Tensor] | nn.Module | None, Base | None]:
    """The model without its parameters; where they come from: files, or the whole model, which rank 0 has; and what is
    below its adapters."""
    files = None
    if config.lora is None:
        with world.working("finding the weights"):
            structure = task.build_structure()
            files = task.stored_weights(structure)
        if world.sum(files is not None) == world.size:
            return structure, files, None
    # first the whole model: it must start from the same random numbers as that of one process
    with world.together("building the model"):
        source, base = _build_adapted(task, config) if world.first else (None, None)
    base = world.from_first(lambda: base, "building the model")
    with world.together("building the model"):
        structure = with_adapters(task.build_structure(), config, base)
    logger.info("weights: rank 0 builds the model, and sends each process its part")
    return structure, source, base
