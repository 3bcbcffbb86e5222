"""The pure torch strategies: ``single``, ``dp``, ``ddp``, ``zero1`` and ``fsdp``, with tensor, context and pipeline
parallelism. Each builder assembles the parts of an engine."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial

import torch
from torch import nn
from torch.optim import Optimizer

from drawbar.config.schema.run_config import RunConfig
from drawbar.data.packing import IGNORED_LABEL
from drawbar.distributed.device_mesh import another_group, mesh_of
from drawbar.distributed.process_group import Distributed
from drawbar.engines.executors import ModelExecutor, PipelineExecutor, TrainingForward, task_loss
from drawbar.engines.local_model import (
    LocalModel,
    apply_dtypes,
    build_shards,
    build_stages,
    build_whole,
    prepare_attention,
)
from drawbar.engines.loss_choice import choose_cross_entropy
from drawbar.engines.parts import EngineParts, Executor
from drawbar.engines.state_access import StagesState, TorchState
from drawbar.engines.updaters import SquaredNorm, StagesSquaredNorm, TorchUpdater, model_squared_norm
from drawbar.errors import ExitCode, UserError
from drawbar.optim.average import WeightAverage
from drawbar.optim.optimizers import build_optimizers
from drawbar.parallel.apply import parallelize
from drawbar.parallel.context import ContextParallel, check_context
from drawbar.parallel.ddp import DataParallel, gradient_sync, replicate
from drawbar.parallel.fsdp import digest_of_used_units, prepare_sharded_generate, prepare_unused_units
from drawbar.parallel.pipeline.schedule import Pipeline
from drawbar.parallel.precision import LossScaler
from drawbar.parallel.synced_generate import synchronize_generate
from drawbar.parallel.tensor import FusedLayout, fused_layouts
from drawbar.parallel.weights import materialize
from drawbar.parallel.zero1 import zero1_optimizer
from drawbar.tasks.task import Task


def build_single(task: Task, config: RunConfig, world: Distributed) -> EngineParts:
    """One process, one device."""
    local = build_whole(task, config, world, world.device)
    return assemble(task, config, world, local, _training_forward(task, local.module))


def build_dp(task: Task, config: RunConfig, world: Distributed) -> EngineParts:
    """One process with several CUDA devices.

    Raises:
        UserError: there are fewer than two CUDA devices.
    """
    devices = torch.cuda.device_count() if world.device.type == "cuda" else 0
    if devices < 2:
        raise UserError(
            "parallel.strategy is dp, which is one process with several CUDA devices: here "
            + (f"are {devices}" if devices != 1 else "is 1"),
            where="parallel.strategy",
            remedy="set parallel.strategy=ddp, which has one process per device, and is faster",
        )
    local = build_whole(task, config, world, world.device)
    model = DataParallel(local.module, config.precision, world.device)
    return assemble(task, config, world, local, _training_forward(task, model))


def build_ddp(task: Task, config: RunConfig, world: Distributed) -> EngineParts:
    """A replica on every data-parallel rank."""
    if world.dims.pp > 1:
        return _build_pipeline(task, config, world)
    if world.dims.model_ranks > 1:
        return _build_on_mesh(task, config, world)
    return build_replicas(task, config, world)


def build_zero1(task: Task, config: RunConfig, world: Distributed) -> EngineParts:
    """Replicas, with the optimizer state partitioned over the ranks."""
    wrap_optimizer: Callable[[Optimizer], Optimizer] = (
        zero1_optimizer if world.size > 1 else lambda optimizer: optimizer
    )
    return build_replicas(task, config, world, wrap_optimizer)


def build_fsdp(task: Task, config: RunConfig, world: Distributed) -> EngineParts:
    """A shard of every parameter on each data-parallel rank."""
    return _build_pipeline(task, config, world) if world.dims.pp > 1 else _build_on_mesh(task, config, world)


def build_replicas(
    task: Task,
    config: RunConfig,
    world: Distributed,
    wrap_optimizer: Callable[[Optimizer], Optimizer] = lambda optimizer: optimizer,
) -> EngineParts:
    """A full model on every rank, with torch's DistributedDataParallel if there are several."""
    local = build_whole(task, config, world, world.device)
    training_forward = _training_forward(task, local.module)
    if world.size > 1:
        model = replicate(local.module, partial(task_loss, task, None), config.parallel.reduce_dtype)
        training_forward = TrainingForward(model, model, partial(gradient_sync, model))
    return assemble(task, config, world, local, training_forward, wrap_optimizer)


def _training_forward(task: Task, model: nn.Module) -> TrainingForward:
    return TrainingForward(model, partial(task_loss, task, None, model))


def _build_on_mesh(task: Task, config: RunConfig, world: Distributed) -> EngineParts:
    """A model on a device mesh: its parameters (FSDP, tensor parallelism) or its sequences are sharded over ranks."""
    if world.dims.cp > 1:
        check_context(world.device, task.label_placement)
    world.ensure_process_group()
    mesh = mesh_of(world)
    local = build_shards(task, config, world, mesh)
    module = local.module
    context = ContextParallel(module, mesh["cp"], IGNORED_LABEL) if world.dims.cp > 1 else None
    synchronizing: Callable[[bool], AbstractContextManager[None]] = partial(gradient_sync, module)
    if config.parallel.features.shards_parameters:
        prepare_sharded_generate(module)
        gathers_once = config.parallel.reshard is False
        if gathers_once:
            prepare_unused_units(module)
        synchronizing = _UsageCheck(
            module, world, partial(gradient_sync, module, gathers_once=gathers_once)
        ).synchronizing
    training_forward = TrainingForward(module, partial(task_loss, task, context, module), synchronizing)
    return assemble(task, config, world, local, training_forward, context=context)


def assemble(
    task: Task,
    config: RunConfig,
    world: Distributed,
    local: LocalModel,
    training_forward: TrainingForward,
    wrap_optimizer: Callable[[Optimizer], Optimizer] = lambda optimizer: optimizer,
    context: ContextParallel | None = None,
) -> EngineParts:
    """Assemble an engine without pipeline stages: each rank has a replica of the model, or shards of it."""
    executor = ModelExecutor(
        task,
        local.module,
        training_forward,
        world,
        config.precision,
        context,
        shards_logits=_shards_logits(task, world),
        loss_in_head=local.loss_in_head,
    )
    optimizers = [
        # the average of all weights is on every rank: whoever evaluates needs it
        optimizer if isinstance(optimizer, WeightAverage) else wrap_optimizer(optimizer)
        for optimizer in build_optimizers(local.module, config.optim)
    ]
    return _with_optimizers(config, world, local, executor, optimizers, model_squared_norm, world.is_rank0)


def _with_optimizers(
    config: RunConfig,
    world: Distributed,
    local: LocalModel,
    executor: Executor,
    optimizers: list[Optimizer],
    norm: SquaredNorm,
    keeps: bool,
) -> EngineParts:
    scaler = LossScaler(config.precision)
    updater = TorchUpdater(local.module, optimizers, scaler, world.device, config.train.gradient_clip, norm)
    state = TorchState(local, optimizers, scaler, config, world, keeps)
    average = next((optimizer for optimizer in optimizers if isinstance(optimizer, WeightAverage)), None)
    return EngineParts(local, executor, updater, state, average)


def _shards_logits(task: Task, world: Distributed) -> bool:
    return world.dims.tp > 1 and task.vocabulary_parallel


def _build_pipeline(task: Task, config: RunConfig, world: Distributed) -> EngineParts:
    """Stages on different ranks, which pass hidden states to one another."""
    stages = build_stages(task, config, world)
    parallel, precision = config.parallel, config.precision
    pipeline = Pipeline(
        stages.stage_modules,
        parallel.schedule,
        stages.group,
        another_group(world, "pp"),
        world.device,
        stages.hidden_size,
        precision,
        parallel.reshard is True,
    )
    pipeline_inference = stages.pipeline_inference(world)
    if parallel.features.shards_parameters:
        synchronize_generate(pipeline_inference.model)
    fused: dict[str, FusedLayout] = {}
    cross_entropy = choose_cross_entropy(task, config, stages.meta_model, stages.stage_modules)
    for part in stages.stage_modules:
        prepare_attention(part, task, config)
        apply_dtypes(part, task, config)
        parallelize(part, stages.plan, parallel, world.dims, stages.mesh, precision)
        fused |= fused_layouts(part)
        materialize(part, torch.device("cpu") if parallel.offload else world.device, world.device)
    local, tied = stages.load(fused, cross_entropy, world)
    executor = PipelineExecutor(
        task,
        local.module,
        local.module,
        pipeline,
        pipeline_inference,
        world,
        precision,
        shards_logits=_shards_logits(task, world),
        loss_in_head=local.loss_in_head,
    )
    optimizers = build_optimizers(local.module, config.optim, local.meta_model)
    norm = StagesSquaredNorm(stages.group, tied)
    parts = _with_optimizers(config, world, local, executor, optimizers, norm, world.dims.is_stage_leader(world.rank))
    state = StagesState(parts.state, local, config, world, stages.tied_name)
    return EngineParts(local, executor, parts.updater, state, parts.average)


class _UsageCheck:
    """Checks in each step that all ranks ran the same submodules of a sharded model; otherwise gradients are wrong.

    The ranks exchange digests of what they ran. A rank waits for the others' digests only if its own differs from that
    of its previous step (with the same number of micro-batches). So ranks that were equal stay equal, or one that has
    changed raises. The others may have updated their weights by then, but save nothing without it.
    """

    def __init__(
        self, module: nn.Module, world: Distributed, synchronizing: Callable[[bool], AbstractContextManager[None]]
    ) -> None:
        self._module = module
        self._world = world
        self._synchronizing = synchronizing
        self._digest = 0
        self._micro_batches = 0
        self._checked: dict[int, int] = {}
        """The last digest on which all ranks agreed, by number of micro-batches."""

    @contextmanager
    def synchronizing(self, last: bool) -> Iterator[None]:
        """See ``TrainingForward``.

        Raises:
            UserError: after the last micro-batch, if ranks used different parts, and this rank used other parts than
                before or is at its first step.
        """
        with self._synchronizing(last):
            yield
        self._digest = digest_of_used_units(self._module, self._digest)
        self._micro_batches += 1
        if last:
            self._check(self._digest, self._micro_batches)
            self._digest = self._micro_batches = 0

    def _check(self, digest: int, micro_batches: int) -> None:
        short = digest >> 8  # 24 bits: no sum overflows
        sums = self._world.begin_sum_counts([short, short**2])
        if self._checked.get(micro_batches) == digest:
            return
        total, squares = sums()
        if total**2 != squares * self._world.size:  # equal only if all digests are (Cauchy–Schwarz)
            raise UserError(
                "in this step the ranks used different parts of the model; with fsdp, gradients are then wrong",
                where="parallel.strategy=fsdp",
                remedy="set parallel.strategy=zero1 or ddp, or let the model use the same parts for every batch",
                exit_code=ExitCode.FAILED,
            )
        self._checked[micro_batches] = digest
