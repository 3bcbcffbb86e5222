"""Replicated parameters, gradients averaged by torch's DistributedDataParallel."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def replicate(model: nn.Module, device: torch.device) -> DistributedDataParallel:
    """The model with its gradients averaged over all ranks in the backward pass."""
    return DistributedDataParallel(
        model,
        device_ids=[device] if device.type == "cuda" else None,
        broadcast_buffers=False,
        gradient_as_bucket_view=True,
    )


def accumulate(model: nn.Module, last: bool) -> AbstractContextManager[None]:
    """Around forward and backward of one micro-batch: gradients travel only in the ``last`` one of a step."""
    if isinstance(model, DistributedDataParallel) and not last:
        return model.no_sync()
    return nullcontext()
