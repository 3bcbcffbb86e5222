"""Synchronizes buffers that training changes, such as the running statistics of batch norm, which differ by rank."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor


@torch.no_grad()
def share_buffers(model: nn.Module, groups: Iterable[dist.ProcessGroup]) -> None:
    """Give every rank the buffers of the first, as torch's DDP does in each forward, in place. Every rank calls it.

    Args:
        groups: one for each axis of the mesh along which all ranks are to hold the same buffers.
    """
    for group in groups:
        for buffer in model.buffers():
            is_number = buffer.is_floating_point() or buffer.is_complex() or buffer.dtype == torch.int64
            if isinstance(buffer, DTensor) or not is_number:
                continue  # masks and the like do not change
            sent = buffer.contiguous()
            dist.broadcast(sent.flatten().view(torch.uint8), group=group, group_src=0)  # no backend takes every dtype
            if sent is not buffer:
                buffer.copy_(sent)


@contextmanager
def kept_buffers(model: nn.Module) -> Iterator[None]:
    """Context that restores the buffers at its end."""
    found = (buffer.to_local() if isinstance(buffer, DTensor) else buffer for buffer in model.buffers())
    buffers = [(buffer, buffer.clone()) for buffer in found]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, before in buffers:
                # an expanded tensor cannot be written to; but then it has not changed either
                if not torch.equal(buffer, before):
                    buffer.copy_(before)
