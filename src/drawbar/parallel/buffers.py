"""Synchronizes buffers that training changes and that differ between ranks, such as batch norm's running statistics."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor


@torch.no_grad()
def share_buffers(model: nn.Module, groups: Iterable[dist.ProcessGroup]) -> None:
    """Broadcast the buffers of the first rank to all others, in place, as torch's DDP does in each forward. Collective.

    Args:
        groups: one group per mesh axis along which all ranks must hold the same buffers.
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
    """Context manager that restores the buffers on exit."""
    restore = copy_buffers(model)
    try:
        yield
    finally:
        restore()


def copy_buffers(model: nn.Module) -> Callable[[], None]:
    """A function that restores the buffers as they are now."""
    found = (buffer.to_local() if isinstance(buffer, DTensor) else buffer for buffer in model.buffers())
    buffers = [(buffer, buffer.clone()) for buffer in found]

    def restore() -> None:
        with torch.no_grad():
            for buffer, before in buffers:
                # an expanded tensor cannot be written to, so it has not changed either
                if not torch.equal(buffer, before):
                    buffer.copy_(before)

    return restore
