"""Replicated parameters, gradients averaged by torch's DistributedDataParallel."""

import inspect
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import ReplicateModule
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

# buffers are equal from the start, and stay so: sending them in every forward is waste. torch 2.13 renamed the setting
_NEW_NAME = "forward_sync_buffers"
_BUFFERS = _NEW_NAME if _NEW_NAME in inspect.signature(DistributedDataParallel).parameters else "broadcast_buffers"


def replicate(model: nn.Module, device: torch.device) -> DistributedDataParallel:
    """The model with its gradients averaged over all ranks in the backward pass."""
    return DistributedDataParallel(
        model,
        device_ids=[device] if device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        **{_BUFFERS: False},
    )


def accumulate(model: nn.Module, last: bool) -> AbstractContextManager[None]:
    """Around forward and backward of one micro-batch: gradients travel between replicas only in the ``last`` one of a
    step. Between shards they travel in each, since whole gradients would need the room that sharding saves."""
    if isinstance(model, ReplicateModule):
        model.set_requires_gradient_sync(last)
    elif isinstance(model, FSDPModule):
        model.set_requires_all_reduce(last)
    if isinstance(model, DistributedDataParallel) and not last:
        return model.no_sync()
    return nullcontext()
