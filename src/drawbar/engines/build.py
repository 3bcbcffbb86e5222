"""From a configuration to an engine: resolves ``auto``, and calls the strategy's builder."""

import torch
from torch import nn

from drawbar.config.io.user_modules import cause
from drawbar.config.parallel_dims import ParallelDims
from drawbar.config.rules.parallel_rules import TRAINING
from drawbar.config.rules.rule_table import RULES, check_rules
from drawbar.config.schema.run_config import RunConfig
from drawbar.config.strategies import AUTO
from drawbar.distributed.process_group import Distributed
from drawbar.engines.engine import Engine
from drawbar.engines.local_model import build_weightless
from drawbar.engines.parts import EngineParts
from drawbar.errors import UserError
from drawbar.models.stored_base import shapes
from drawbar.parallel.compile import check_compiler
from drawbar.parallel.fp8 import check_fp8
from drawbar.parallel.precision import choose_dtypes, store_frozen_weights_low
from drawbar.runtime.log import logger
from drawbar.runtime.seed import note_host_generators
from drawbar.tasks.pretrained import PretrainedTask
from drawbar.tasks.task import Task
from drawbar.util.memory import usable_memory

BYTES_PER_PARAMETER = {"fp32": 16, "bf16": 12, "int8": 10}
"""Bytes per trained parameter, by ``optim.state_dtype``: weight and gradient in fp32, and AdamW's two moments."""
SHARE_FOR_STATE = 0.6
"""Fraction of a rank's memory for the model's state; the rest is for activations."""


def build_engine(task: Task, config: RunConfig, world: Distributed, total_steps: int = 0) -> Engine:
    """Build the engine for these processes. Collective.

    Args:
        total_steps: see ``Engine``; 0 if not known yet, or if nothing is trained.

    Raises:
        UserError: the strategy cannot run on these processes.
    """
    strategy: str = config.parallel.strategy
    reason = "as set; one process" if world.size == 1 else f"as set; {world.size} processes"
    if strategy == AUTO:
        config = choose_dtypes(config, world.device)  # the size of frozen weights depends on the precision
        strategy, reason = choose_strategy(task, config, world, _memory_of_a_rank(world))
        config = config.model_copy(update={"parallel": config.parallel.model_copy(update={"strategy": strategy})})
    if task.task_context.trains:
        logger.info("strategy: %s (%s)", strategy, reason)
    if config.parallel.features.one_process and world.size > 1:
        raise UserError(
            f"parallel.strategy is {strategy}, but {world.size} processes were started",
            where="parallel.strategy",
            remedy="set parallel.strategy=ddp, which has one process per device, or start one process",
        )
    config = check_machine(config, world, task.task_context.trains)
    engine = assemble_engine(task, config, world, total_steps)
    if task.task_context.trains:
        logger.info("model: %s, in %s on %s", _describe(engine.meta_model), config.precision, _name(world.device))
    return engine


def _describe(model: nn.Module) -> str:
    """``llama, 1,463,883,776 parameters, of which 3,211,264 are trained``."""
    number = sum(shape.numel() for shape in shapes(model).values())
    trained = sum(one.numel() for one in model.parameters() if one.requires_grad)
    name = getattr(getattr(model, "config", None), "model_type", None) or type(model).__name__
    return f"{name}, {number:,} parameters" + (f", of which {trained:,} are trained" if trained < number else "")


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def check_machine(config: RunConfig, world: Distributed, trains: bool = True) -> RunConfig:
    """Refuse settings that do not work on these devices and processes. Reads and builds nothing, so it can run first;
    ``build_engine`` calls it again once it has resolved the strategy ``auto``.

    Returns:
        The configuration with every ``auto`` dtype resolved.

    Raises:
        UserError: settings do not combine here, or a compiler or a library is missing.
    """
    config = choose_dtypes(config, world.device)
    check_rules(_resolved_for_rules(config, world), RULES + TRAINING if trains else RULES)
    if config.parallel.compile:
        check_compiler(world.device, world.rank_info.local_world_size)
    if config.parallel.fp8 is not None and trains:
        check_fp8(config.parallel.fp8, world.device)
    return config


def assemble_engine(task: Task, config: RunConfig, world: Distributed, total_steps: int = 0) -> Engine:
    """Build the engine of a fully resolved and checked configuration: see :func:`build_engine`."""
    world.set_dims(ParallelDims.of(config.parallel, world.size))
    return Engine(task, config, world, _build_parts(task, config, world), total_steps)


def _build_parts(task: Task, config: RunConfig, world: Distributed) -> EngineParts:
    """Call the strategy's builder. An error in a user's builder is raised with strategy and line."""
    strategy = config.parallel.features
    parts: object
    try:
        parts = strategy.build(task, config, world)
    except (UserError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if str(strategy.builder).startswith("drawbar."):
            raise
        raise _builder_error(config, f"fails: {cause(error)}") from error
    if not isinstance(parts, EngineParts):
        raise _builder_error(config, f"returned {type(parts).__name__}, not EngineParts")
    return parts


def _builder_error(config: RunConfig, what: str) -> UserError:
    return UserError(
        f"the builder of the strategy {what}",
        where=f"parallel.strategy={config.parallel.strategy}",
        remedy="fix it: it is called with (task, config, world), and must return a drawbar.engines.parts.EngineParts",
    )


def _resolved_for_rules(config: RunConfig, world: Distributed) -> RunConfig:
    """The configuration with device and number of processes filled in, so that the rules check what ``auto`` chose."""
    launch = config.launch.model_copy(update={"nproc": world.size})
    return config.model_copy(update={"device": world.device.type, "launch": launch})


def choose_strategy(task: Task, config: RunConfig, world: Distributed, room: float) -> tuple[str, str]:
    """Resolve the strategy ``auto``; also return the reason.

    Args:
        config: with dtypes resolved.
        room: memory of this rank, in bytes.
    """
    if config.strategy.name != AUTO:
        return config.strategy.name, "the configuration has a section for it"
    if world.size == 1:
        return "single", "one process"
    if config.lora is not None and config.lora.packs:
        return "ddp", f"every process stores the whole base in {config.lora.base}"
    if world.dp_ranks.size == 1:
        return "ddp", "all ranks together hold one replica of the model"
    if type(task).build_model is not PretrainedTask.build_model:
        return "ddp", f"{world.size} processes"  # the size of a user-defined model is unknown before it is built
    ranks_per_copy = world.dims.tp * world.dims.pp  # context-parallel ranks replicate the parameters
    with world.working("finding the size of the model"):
        needed = bytes_of_state(task, config) / ranks_per_copy
    fits = world.dp_ranks.sum_of_leaders(needed <= SHARE_FOR_STATE * room) == world.dp_ranks.size
    amounts = f"the model's state takes {needed / 2**30:.1f} GiB, and a rank has {room / 2**30:.1f} GiB"
    return ("ddp", f"{world.size} processes; {amounts}") if fits else ("fsdp", amounts)


def bytes_of_state(task: Task, config: RunConfig) -> int:
    """Bytes of one replica of the model with its gradients and optimizer state. Frozen weights, such as those under
    LoRA, count only with their stored size.

    Args:
        config: with dtypes resolved.
    """
    put_generators_back = note_host_generators()  # adapters draw random numbers, which must not affect the run's
    model, _ = build_weightless(task, config)
    put_generators_back()
    store_frozen_weights_low(model, config)
    trained = BYTES_PER_PARAMETER[config.optim.state_dtype] + (0 if config.optim.ema is None else 4)
    return sum(p.numel() * (trained if p.requires_grad else p.itemsize) for p in model.parameters())


def _memory_of_a_rank(world: Distributed) -> float:
    """Memory available to each rank, in bytes."""
    if world.device.type == "cuda":
        return torch.cuda.get_device_properties(world.device).total_memory
    return usable_memory() / world.rank_info.local_world_size
