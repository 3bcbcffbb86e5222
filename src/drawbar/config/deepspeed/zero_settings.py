"""Resolves whether DeepSpeed runs a configuration, its ZeRO stage and its offloading, from presets and ``parallel``."""

from drawbar.config.schema.run_config import ParallelSection, RunConfig
from drawbar.config.strategies import AUTO

NOWHERE = "none"
"""Not offloaded."""
HOST = "cpu"


def is_deepspeed(config: RunConfig) -> bool:
    """Whether DeepSpeed runs this: the strategy is ``deepspeed``, or ``auto`` with a section ``deepspeed``."""
    parallel = config.parallel
    return parallel.features.is_deepspeed or (parallel.strategy == AUTO and config.deepspeed is not None)


def zero_stage(config: RunConfig) -> int:
    """ZeRO stage: ``parallel.zero_stage``, else the preset's, else 2, or 1 with a pipeline (more is refused there)."""
    if config.parallel.zero_stage is not None:
        return config.parallel.zero_stage
    if config.deepspeed is not None and config.deepspeed.preset is not None:
        return stage_of(config.deepspeed.preset)
    return 1 if config.parallel.pipeline > 1 else 2


def stage_of(preset: str) -> int:
    """The stage in a preset's name."""
    return int(preset.removeprefix("zero")[0])


def offload_optimizer(config: RunConfig) -> str:
    """Where optimizer state lies: ``none``, ``cpu``, or a folder."""
    if config.deepspeed is not None and config.deepspeed.offload_optimizer is not None:
        return config.deepspeed.offload_optimizer
    return HOST if offloads(config) else NOWHERE


def offload_parameters(config: RunConfig) -> str:
    """Where parameters lie: ``none``, ``cpu``, or a folder."""
    if config.deepspeed is not None and config.deepspeed.offload_parameters is not None:
        return config.deepspeed.offload_parameters
    return HOST if offloads(config) and zero_stage(config) == 3 else NOWHERE


def offloads(config: RunConfig) -> bool:
    """Whether the preset or ``parallel.offload`` asks for offloading, of whatever the stage allows."""
    preset = config.deepspeed.preset if config.deepspeed is not None else None
    return config.parallel.offload or (preset is not None and preset.endswith("_offload"))


def with_parallel(config: RunConfig, parallel: ParallelSection) -> RunConfig:
    """``config`` with another section ``parallel``. The section ``deepspeed`` is dropped, unless the new configuration
    runs on DeepSpeed, too, and has the same ``zero_stage`` and ``offload``."""
    same = all(getattr(parallel, name) == getattr(config.parallel, name) for name in ("zero_stage", "offload"))
    changed = config.model_copy(update={"parallel": parallel})
    return changed if same and is_deepspeed(changed) else changed.model_copy(update={"deepspeed": None})
