"""The section ``deepspeed``: what only DeepSpeed has. Everything else of a DeepSpeed run is in the other sections."""

from typing import Annotated, Literal

from pydantic import Field

from drawbar.config.schema.section import Count, PathText, Section

OffloadTarget = Literal["none", "cpu"] | PathText
Elements = Annotated[int, Field(ge=0)]


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
    pin_memory: bool | None = None
    """offloading: page-locked host memory, which the device copies from faster. Like all settings below, `null` is
    DeepSpeed's default."""
    reduce_bucket_size: Count | None = None
    """Gradient elements that are reduced at a time; smaller needs less memory."""
    allgather_bucket_size: Count | None = None
    """stages 1 and 2: elements of updated parameters that are gathered at a time; smaller needs less memory."""
    reduce_scatter: bool | None = None
    """Send each rank its piece of the gradients alone, instead of all of them to all."""
    overlap_comm: bool | None = None
    """Reduce gradients while the backward pass goes on; needs more memory."""
    contiguous_gradients: bool | None = None
    """Copy gradients into one buffer as they come, so that memory does not fragment."""
    sub_group_size: Count | None = None
    """stage 3: parameter elements that the optimizer updates at a time; smaller needs less memory when offloading."""
    prefetch_bucket_size: Elements | None = None
    """stage 3: parameter elements that are gathered ahead of their use."""
    param_persistence_threshold: Elements | None = None
    """stage 3: parameters of fewer elements than this are not cut."""
    max_live_parameters: Elements | None = None
    """stage 3: most gathered parameter elements on a device."""
    max_reuse_distance: Elements | None = None
    """stage 3: keep a gathered parameter that is needed again within so many parameter elements."""
