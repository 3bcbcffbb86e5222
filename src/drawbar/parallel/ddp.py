"""Replicas with torch's DistributedDataParallel; and ``gradient_sync``, which controls in which micro-batch gradients
are reduced, under DDP, FSDP and for replicas on a mesh.
"""

import inspect
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from drawbar.errors import UserError
from drawbar.parallel.precision import autocast
from drawbar.runtime.torch_internals import ReplicateModule


class DataParallel(nn.DataParallel):
    """``nn.DataParallel`` that computes in ``precision``.

    Replicas run in threads, each with its own autocast state. torch passes on whether autocast is enabled, but not its
    dtype: without this class, the threads would use fp16 instead of bf16, without a loss scaler.
    """

    def __init__(self, module: nn.Module, precision: str, device: torch.device) -> None:
        super().__init__(module)
        self._autocast = partial(autocast, precision, device)

    def parallel_apply(self, replicas: Sequence[Callable[..., Any]], inputs: Sequence[Any], kwargs: Any) -> list[Any]:
        return super().parallel_apply([self._in_precision(replica) for replica in replicas], inputs, kwargs)

    def _in_precision(self, replica: Callable[..., Any]) -> Callable[..., Any]:
        def compute(*args: Any, **kwargs: Any) -> Any:
            with self._autocast():
                return replica(*args, **kwargs)

        return compute


# buffers are synchronized before evaluation and saving (``parallel.buffers``), not in every forward. The option of
# torch 2.13, unlike the older one, does not disable the broadcast at DDP's construction
_NEW_NAME = "forward_sync_buffers"
_BUFFERS = _NEW_NAME if _NEW_NAME in inspect.signature(DistributedDataParallel).parameters else "broadcast_buffers"

_BROADCAST_DTYPES = frozenset(
    [
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool),
    ]
)
"""Dtypes that both gloo and NCCL can broadcast."""

warnings.filterwarnings("ignore", message="find_unused_parameters=True was specified")


class _LossOf(nn.Module):
    """A module whose forward returns the loss: DDP finds unused parameters by walking the graph from forward's output,
    and a model may return tensors that the loss does not depend on."""

    def __init__(self, model: nn.Module, loss: Callable[[nn.Module, Any], torch.Tensor]) -> None:
        super().__init__()
        self.model = model
        self.loss = loss

    def forward(self, batch: Any) -> torch.Tensor:
        return self.loss(self.model, batch)


def replicate(
    model: nn.Module, loss: Callable[[nn.Module, Any], torch.Tensor], reduce_dtype: str = "fp32"
) -> DistributedDataParallel:
    """A DDP module that computes ``loss(model, batch)``, and whose backward averages the gradients over all ranks.

    As in one process, a parameter gets a gradient if the loss of any rank depends on it, and none otherwise. Finding
    unused parameters costs a walk through the graph of each step's last micro-batch, and a small all-reduce. For a
    28-layer Llama the walk took 0.9 ms of host time, of 54 ms for forward and backward, while the GPU still computed
    the forward. The alternative (edges from the loss to every parameter) took no less; and without either, an expert
    not used by one rank's rows would make the others wait for that rank forever.

    Raises:
        UserError: a buffer has a dtype that DDP cannot broadcast.
    """
    for name, buffer in model.named_buffers():
        if buffer.dtype not in _BROADCAST_DTYPES:
            raise UserError(
                f"DDP broadcasts all buffers when it is built, and cannot broadcast {name}: it is {buffer.dtype}",
                where="parallel.strategy",
                remedy="make it torch.int32 or torch.float32, or train with fsdp",
            )
    replica = DistributedDataParallel(
        _LossOf(model, loss), gradient_as_bucket_view=True, find_unused_parameters=True, **{_BUFFERS: False}
    )
    if reduce_dtype == "bf16":
        replica.register_comm_hook(None, _all_reduce_in_bf16)
    return replica


def _all_reduce_in_bf16(group: dist.ProcessGroup | None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """torch's hook under another name: without NCCL, torch refuses it by name, although gloo can reduce bf16."""
    return bf16_compress_hook(group, bucket)


def gradient_sync(model: nn.Module, last: bool, gathers_once: bool = False) -> AbstractContextManager[None]:
    """Context manager for forward and backward of one micro-batch: gradients are all-reduced over replicas only in the
    ``last`` one of a step. Over shards they are reduced in each one, as unsharded gradients would take the memory that
    sharding saves.

    Args:
        gathers_once: keep weights and gradients unsharded for the whole step: gather in the first micro-batch, reduce
            in the last one.
    """
    if isinstance(model, ReplicateModule) or (isinstance(model, FSDPModule) and gathers_once):
        model.set_requires_gradient_sync(last)
        model.set_reshard_after_backward(last)
    elif isinstance(model, FSDPModule):
        model.set_requires_all_reduce(last)
    if isinstance(model, DistributedDataParallel) and not last:
        return model.no_sync()
    return nullcontext()
