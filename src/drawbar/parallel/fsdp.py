"""Sharded parameters, gradients and optimizer state, by torch's FSDP2 (``fully_shard``), and replicas of them."""

import torch
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from drawbar.config.schema import ParallelSection
from drawbar.parallel.blocks import repeated_blocks

DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def shard(model: nn.Module, mesh: DeviceMesh, parallel: ParallelSection, precision: str) -> None:
    """Shard the model over ``dp_shard``, block by block, and replicate that over ``dp_replicate``, in place.

    Parameters stay fp32 and are gathered in ``precision``; gradients are reduced in fp32.

    Args:
        mesh: two-dimensional (replicas, shards), or that of the shards alone.
    """
    dtype = DTYPES[precision]
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=None if dtype is None else torch.float32)
    offload: OffloadPolicy = OffloadPolicy()
    if parallel.offload:
        offload = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    reshard = parallel.reshard is not False
    for _, block in repeated_blocks(model):
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy, offload_policy=offload)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy, offload_policy=offload)


def replicate_parts(model: nn.Module, mesh: DeviceMesh) -> None:
    """Replicate what other ranks hold other parts of, in place: DDP itself knows no tensors that are cut.

    Args:
        mesh: that of the replicas alone.
    """
    for _, block in repeated_blocks(model):
        replicate(block, mesh=mesh)
    replicate(model, mesh=mesh)


def free_gathered(model: nn.Module) -> None:
    """After a forward without backward: give back what was gathered for it."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
