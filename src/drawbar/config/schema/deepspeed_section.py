"""The section ``deepspeed``: what only DeepSpeed has. Everything else of a DeepSpeed run is in the other sections."""

from typing import Literal

from drawbar.config.schema.section import PathText, Section

OffloadTarget = Literal["none", "cpu"] | PathText


class DeepSpeedSection(Section):
    """Run on DeepSpeed. With `parallel.strategy: auto` this section alone chooses it."""

    config: PathText | None = None
    """A DeepSpeed JSON file of your own, which is passed on. `"auto"` in it is filled in from this configuration, and
    what contradicts it is an error: set the ZeRO stage, offloading and `precision` here, too."""
    preset: Literal["zero2", "zero2_offload", "zero3", "zero3_offload"] | None = None
    """The ZeRO stage, and whether optimizer state (and at stage 3 parameters) lie in host memory."""
    offload_optimizer: OffloadTarget | None = None
    """Where optimizer state and, from stage 2 on, gradients lie, and where the update is computed: `none` (the device),
    `cpu`, or a folder on a fast local disk (stage 3). Default: what `preset` or `parallel.offload` says."""
    offload_parameters: OffloadTarget | None = None
    """stage 3: where parameters lie: `none` (the device), `cpu`, or a folder on a fast local disk. Default: what
    `preset` or `parallel.offload` says."""
