"""Model FLOPs utilization (MFU): the share of the devices' peak FLOP/s that a run achieves."""

import torch

from drawbar.config.schema.run_config import RunConfig
from drawbar.distributed.process_group import Distributed
from drawbar.engines.engine import Engine
from drawbar.models.model_flops import peak_flops, training_flops_per_token


def mfu_of_one_token_per_second(engine: Engine, config: RunConfig, world: Distributed) -> float | None:
    """The factor that turns tokens per second into model FLOPs utilization (Chowdhery et al. 2022, arXiv:2204.02311,
    appendix B). In packed rows each token counts as attending to ``data.sequence_length`` tokens; in other rows
    attention is left out: they are short, so it is little.

    Returns:
        None where the operations of the model or the peak of the device are not known, and in fp32, for which vendors
        give peaks of several kinds.
    """
    if world.device.type != "cuda" or config.precision == "fp32":
        return None
    peak = peak_flops(torch.cuda.get_device_name(world.device))
    attended = config.data.sequence_length if config.data.batching == "packed" else 0
    flops = training_flops_per_token(engine.meta_model, attended)
    return None if peak is None or flops is None else flops / (peak * world.size)
