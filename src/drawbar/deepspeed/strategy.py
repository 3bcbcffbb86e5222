"""The strategy ``deepspeed``: ZeRO stages 0 to 3, offloading, its tensor parallelism (AutoTP) and its pipeline.

DeepSpeed casts, shards, reduces, clips and updates; optimizer, schedule, loss and checkpoints are those of every other
strategy.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from drawbar.config.parallel_dims import ParallelDims
from drawbar.config.schema.run_config import RunConfig
from drawbar.deepspeed.config_json import deepspeed_json
from drawbar.deepspeed.parts import DeepSpeedState, DeepSpeedUpdater
from drawbar.deepspeed.settings import zero_stage
from drawbar.deepspeed.stages import (
    DeepSpeedPipeline,
    Stage,
    cast_received,
    check_layers,
    pipeline_module,
    shard_layers,
)
from drawbar.deepspeed.state import (
    MasterState,
    import_deepspeed,
    initialize_deepspeed,
    is_tp_shard,
)
from drawbar.distributed.process_group import Distributed
from drawbar.engines.executors import ModelExecutor, PipelineExecutor, TrainingForward, task_loss
from drawbar.engines.local_model import (
    EmptyStages,
    LocalModel,
    WeightSource,
    build_meta,
    build_meta_model,
    build_stages,
    build_whole,
    prepare_attention,
    prepared_meta_model,
)
from drawbar.engines.loss_choice import choose_cross_entropy
from drawbar.engines.parts import EngineParts
from drawbar.engines.state_access import StagesState
from drawbar.errors import UserError
from drawbar.models.plans import plan_for
from drawbar.optim.optimizers import build_optimizers
from drawbar.parallel.apply import parallelize
from drawbar.parallel.fsdp import check_shardable
from drawbar.parallel.synced_generate import synchronize_generate
from drawbar.parallel.weights import expanded_empty, materialize, named_tensors, tensors_from_rank0
from drawbar.runtime.log import logger
from drawbar.runtime.safetensors_reader import DTYPES
from drawbar.tasks.task import Task

_HOST = torch.device("cpu")
_FOR_PIPELINES: dict[str, Any] = {
    # by default, DeepSpeed shards the hidden states that it sends over the tensor-parallel ranks, and keeps the shapes
    # of the first step for all later ones, which have others here
    "pipeline": {"pipe_partitioned": False, "grad_partitioned": False},
    "steps_per_print": None,  # with any number, DeepSpeed prints the first step's loss
}


def build(task: Task, config: RunConfig, world: Distributed) -> EngineParts:
    """The builder of the strategy.

    Raises:
        UserError: DeepSpeed is missing or refuses the run, or the model cannot be divided as ``config`` says.
    """
    return _build_pipeline(task, config, world) if world.dims.pp > 1 else _build_one_model(task, config, world)


def _build_one_model(task: Task, config: RunConfig, world: Distributed) -> EngineParts:
    import_deepspeed(world.device)
    world.ensure_process_group()
    stage = zero_stage(config)
    local, source = _partitioned(task, config, world) if stage == 3 else _replicated(task, config, world)
    # after the model: adapters draw random numbers here, too, and must not change those that the model starts from
    meta_model = prepared_meta_model(build_meta_model(task), config, local.base)
    check_shardable(local.module, "DeepSpeed")
    optimizer = _optimizer(local, config)
    values = _json(config, world)
    ds_engine = initialize_deepspeed(local.module, optimizer, values, world.device, is_zero3=stage == 3)
    local = replace(
        local, module=ds_engine.module, meta_model=meta_model, replica_groups=[torch.distributed.group.WORLD]
    )
    _check_tp_shards(local, config.parallel.tensor)
    state = DeepSpeedState(local, MasterState.of(ds_engine), config, world, world.is_rank0)
    _set_first_weights(local.module, source, state, world.device)
    if stage == 3:
        synchronize_generate(local.module)

    def synchronizing(last: bool) -> AbstractContextManager[None]:
        ds_engine.set_gradient_accumulation_boundary(last)
        return nullcontext()

    loss, backward = partial(task_loss, task, None, ds_engine), partial(ds_engine.backward, scale_wrt_gas=False)
    training_forward = TrainingForward(ds_engine, loss, synchronizing, backward)
    executor = ModelExecutor(
        task, local.module, training_forward, world, config.precision, loss_in_head=local.loss_in_head
    )
    return EngineParts(local, executor, DeepSpeedUpdater(state.masters, config.precision), state)


def _replicated(task: Task, config: RunConfig, world: Distributed) -> tuple[LocalModel, WeightSource]:
    """The full model, for ZeRO stages 0 to 2; and in low precision its fp32 weights, to be set again: in stages 1 and
    2, DeepSpeed derives its master weights from low-precision ones. (In stage 0 this changes nothing.)"""
    local = build_whole(task, config, world, _HOST)
    if config.precision == "fp32":
        return local, {}
    return local, {name: parameter.detach() for name, parameter in local.module.named_parameters()}


def _partitioned(task: Task, config: RunConfig, world: Distributed) -> tuple[LocalModel, WeightSource]:
    """The model without memory for its parameters, which ZeRO-3 will shard; and the source of its weights."""
    model, source, base = build_meta(task, config, world)
    prepare_attention(model, task, config)
    cross_entropy = choose_cross_entropy(task, config, model, [model])
    parallelize(model, plan_for(model), config.parallel, ParallelDims(), None, config.precision)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(DTYPES[config.precision])
    materialize(model, _HOST, _HOST, expanded_empty)
    return LocalModel(model, model, base, cross_entropy=cross_entropy), source


def _optimizer(local: LocalModel, config: RunConfig) -> Optimizer:
    # the rules refuse muon and bf16 moments, which may make two
    (optimizer,) = build_optimizers(local.module, config.optim, local.meta_model)
    return optimizer


def _json(config: RunConfig, world: Distributed) -> dict[str, Any]:
    """DeepSpeed's own configuration."""
    found = deepspeed_json(config, world.size, config.precision)
    for note in found.notes:
        logger.warning("deepspeed: %s", note)
    return dict(found.values)


def _check_tp_shards(local: LocalModel, degree: int) -> None:
    """Refuse parameters that AutoTP shards but cannot gather or reduce again, such as T5's position biases."""
    if degree == 1:
        return
    whole = dict(local.meta_model.named_parameters())
    for name, parameter in local.module.named_parameters():
        if parameter.shape != whole[name].shape and not is_tp_shard(parameter):
            raise UserError(
                f"DeepSpeed's tensor parallelism does not know a {type(local.meta_model).__name__}: "
                f"it leaves {name} in parts",
                where="parallel.strategy=deepspeed, parallel.tensor",
                remedy=f"set parallel.strategy=fsdp with parallel.tensor={degree}, or parallel.tensor=1",
            )


def _set_first_weights(module: nn.Module, source: WeightSource, state: DeepSpeedState, device: torch.device) -> None:
    """Set the initial weights that the model (replicated, or sharded by ZeRO-3) does not have yet."""
    here = named_tensors(module)
    if isinstance(source, Mapping):
        state.set_weights({name: here[name] for name in source}, source)
        return
    for name, full in tensors_from_rank0(source, device):
        state.set_weights({name: here[name]}, {name: full})


def _build_pipeline(task: Task, config: RunConfig, world: Distributed) -> EngineParts:
    """Pipeline × tensor × data parallelism, ZeRO stage 0 or 1: DeepSpeed's ``PipelineModule`` over drawbar's
    stages, and AutoTP's layers inside them. Evaluation and generation go through the stages in turn."""
    import_deepspeed(world.device).init_distributed(dist_init_required=False)
    stages = build_stages(task, config, world)
    pipeline_inference = stages.pipeline_inference(world)
    local, tied = _fill_stages(stages, task, config, world)
    check_shardable(local.module, "DeepSpeed")
    optimizer = _optimizer(local, config)
    _check_groups(optimizer, world)
    values = {**_json(config, world), **_FOR_PIPELINES}
    values.pop("tensor_parallel", None)  # shard_layers has sharded the layers already
    layer = Stage(stages.stage_modules[0], stages.group.rank(), world.dims.pp)
    module = pipeline_module(layer, tied, world.dims)
    exact = {parameter: parameter.detach() for parameter in local.module.parameters()}
    ds_engine = initialize_deepspeed(module, optimizer, values, world.device, is_zero3=False)
    masters = MasterState.of(ds_engine)
    if config.precision != "fp32":  # DeepSpeed makes the master weights of ZeRO stages 1 to 3 from low-precision ones
        for parameter, weight in exact.items():
            masters.set_weight(parameter, weight)
    pipeline = DeepSpeedPipeline(ds_engine, layer, world.device, config.precision)
    executor = PipelineExecutor(
        task,
        local.module,
        ds_engine,
        pipeline,
        pipeline_inference,
        world,
        config.precision,
        shards_logits=False,
        loss_in_head=local.loss_in_head,
    )
    own = DeepSpeedState(local, masters, config, world, world.dims.is_stage_leader(world.rank))
    updater = DeepSpeedUpdater(masters, config.precision)
    return EngineParts(local, executor, updater, StagesState(own, local, config, world, stages.tied_name))


def _fill_stages(
    stages: EmptyStages, task: Task, config: RunConfig, world: Distributed
) -> tuple[LocalModel, nn.Parameter | None]:
    """This rank's stage with its first weights, divided over tensor-parallel ranks; its tied weight, or None."""
    (part,) = stages.stage_modules
    if world.dims.tp > 1:
        check_layers(stages.meta_model, stages.plan, world.dims.tp)
    prepare_attention(part, task, config)
    cross_entropy = choose_cross_entropy(task, config, stages.meta_model, [part])
    cast_received(part)
    materialize(part, _HOST, _HOST)  # DeepSpeed casts and moves it
    local, tied = stages.load({}, cross_entropy, world)
    if world.dims.tp > 1:
        shard_layers(part, stages.plan, tied, stages.mesh["tp"].get_group())
    parallelize(part, stages.plan, config.parallel, ParallelDims(), None, config.precision)
    return local, tied


def _check_groups(optimizer: Optimizer, world: Distributed) -> None:
    """Stages must have equally many parameter groups: DeepSpeed all-reduces the norm group by group over all stages."""
    number = len(optimizer.param_groups)
    if world.max(number) != -world.max(-number):
        raise UserError(
            "the stages have different numbers of parameter groups (by learning rate and weight decay): "
            "DeepSpeed's gradient norm needs the same in every stage",
            where="parallel.strategy=deepspeed",
            remedy="set parallel.strategy=ddp, or train the same modules in every stage, without optim.groups and "
            "optim.layer_lr_decay",
        )
