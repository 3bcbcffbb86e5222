"""What a configuration says of DeepSpeed: its own section, and what follows from that and from ``parallel``: whether it
runs a configuration, the ZeRO stage, and the offloading. Without torch."""

from typing import TYPE_CHECKING, ClassVar, Literal

from drawbar.config.schema.guest_section import GuestSection
from drawbar.config.schema.section import PathText
from drawbar.config.strategies import Strategy

if TYPE_CHECKING:
    from drawbar.config.schema.run_config import RunConfig

NOWHERE = "none"
"""Not offloaded."""
HOST = "cpu"

OffloadTarget = Literal["none", "cpu"] | PathText

STRATEGY = Strategy(
    "deepspeed",
    "drawbar.deepspeed.strategy:build",
    supports_model_parallel=True,
    offloads=True,
    has_engine=True,
    zero_stages=True,
)


class DeepSpeedSection(GuestSection):
    """Run on DeepSpeed: with `parallel.strategy: auto` this section alone, such as `{preset: zero2}`, chooses it."""

    strategy: ClassVar = STRATEGY.name
    rules: ClassVar = "drawbar.deepspeed.rules:RULES"
    package_rules: ClassVar = "drawbar.deepspeed.rules:PACKAGE_RULES"
    check_start: ClassVar = "drawbar.deepspeed.config_json:check_start"

    config: PathText | None = None
    """Your own DeepSpeed JSON file, which is passed on. `"auto"` is filled in from this configuration; a value that
    contradicts it is an error: set the ZeRO stage, offloading and `precision` here, too."""
    preset: Literal["zero2", "zero2_offload", "zero3", "zero3_offload"] | None = None
    """The ZeRO stage, and whether optimizer state (at stage 3 also parameters) is offloaded to host memory."""
    offload_optimizer: OffloadTarget | None = None
    """Where to keep optimizer state and, from stage 2 on, gradients, and to compute the update: `none` (the device),
    `cpu`, or a folder on a fast local disk (stage 3). Default: as `preset` or `parallel.offload` says."""
    offload_parameters: OffloadTarget | None = None
    """At stage 3, where to keep parameters: `none` (the device), `cpu`, or a folder on a fast local disk. Default: as
    `preset` or `parallel.offload` says."""


def is_deepspeed(config: "RunConfig") -> bool:
    """Whether DeepSpeed runs this: the strategy is ``deepspeed``, or ``auto`` with a section ``deepspeed``."""
    return config.strategy == STRATEGY


def zero_stage(config: "RunConfig") -> int:
    """ZeRO stage: ``parallel.zero_stage``, else the preset's, else 2, or 1 with a pipeline (more is refused there)."""
    if config.parallel.zero_stage is not None:
        return config.parallel.zero_stage
    preset = DeepSpeedSection.of(config).preset
    if preset is not None:
        return stage_of(preset)
    return 1 if config.parallel.pipeline > 1 else 2


def stage_of(preset: str) -> int:
    """The stage in a preset's name."""
    return int(preset.removeprefix("zero")[0])


def offload_optimizer(config: "RunConfig") -> str:
    """Where optimizer state lies: ``none``, ``cpu``, or a folder."""
    return DeepSpeedSection.of(config).offload_optimizer or (HOST if offloads(config) else NOWHERE)


def offload_parameters(config: "RunConfig") -> str:
    """Where parameters lie: ``none``, ``cpu``, or a folder."""
    by_stage = HOST if offloads(config) and zero_stage(config) == 3 else NOWHERE
    return DeepSpeedSection.of(config).offload_parameters or by_stage


def offloads(config: "RunConfig") -> bool:
    """Whether the preset or ``parallel.offload`` asks for offloading, of whatever the stage allows."""
    preset = DeepSpeedSection.of(config).preset
    return config.parallel.offload or (preset is not None and preset.endswith("_offload"))
