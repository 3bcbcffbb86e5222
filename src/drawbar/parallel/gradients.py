"""Global gradient norm and clipping for plain gradients and DTensors with any sharding."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from drawbar.runtime.torch_internals import _foreach_mul_, _foreach_norm


def reduce_partial_grads(parameters: Iterable[nn.Parameter]) -> None:
    """All-reduce gradients that are still partial sums on tensor-parallel ranks."""
    for parameter in parameters:
        gradient = parameter.grad
        if isinstance(gradient, DTensor) and any(placement.is_partial() for placement in gradient.placements):
            whole = [Replicate() if placement.is_partial() else placement for placement in gradient.placements]
            parameter.grad = gradient.redistribute(placements=whole)


def squared_norm(gradients: Iterable[Tensor], device: torch.device) -> Tensor:
    """The sum of squares of all gradients, including shards on other ranks: 0-d, in ``sum_dtype``, equal on all ranks
    that hold these shards.

    Tensors sharded along the same mesh axes are summed together, with one small all-reduce per axis.
    """
    kinds: dict[tuple[object, ...], list[Tensor]] = {}
    groups: dict[tuple[object, ...], list[dist.ProcessGroup]] = {}
    for gradient in gradients:
        kind: tuple[object, ...] = ()
        local = gradient
        if isinstance(gradient, DTensor):
            mesh, placements = gradient.device_mesh, gradient.placements
            cut = [not placement.is_replicate() for placement in placements]  # is_shard() leaves out strided shards
            kind = (mesh, *cut)
            groups[kind] = [mesh.get_group(axis) for axis, is_sharded in enumerate(cut) if is_sharded]
            local = gradient.to_local()
        kinds.setdefault(kind, []).append(local)
    dtype = sum_dtype(device)
    total = torch.zeros((), dtype=dtype, device=device)
    for kind, locals_ in kinds.items():
        norms = torch.stack([norm.to(device) for norm in _foreach_norm(locals_)])
        part = norms.to(dtype).square().sum()
        for group in groups.get(kind, []):
            dist.all_reduce(part, group=group)
        total += part
    return total


def sum_dtype(device: torch.device) -> torch.dtype:
    """The dtype for sums of many numbers, in which their order hardly matters; MPS has no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def scale_(gradients: Iterable[Tensor], factor: Tensor | float) -> None:
    """Multiply all gradients in place."""
    locals_ = [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]
    by_device: dict[torch.device, list[Tensor]] = {}
    for local in locals_:
        by_device.setdefault(local.device, []).append(local)
    for device, tensors in by_device.items():
        _foreach_mul_(tensors, factor.to(device) if isinstance(factor, Tensor) else factor)


def clip_factor(norm: Tensor, limit: float) -> Tensor:
    """The factor by which clipping scales gradients with this norm, as in ``torch.nn.utils.clip_grad_norm_``."""
    return torch.clamp(limit / (norm + 1e-6), max=1.0)
