"""Loads weights into a sharded model, and gathers them from it, under full-model names.

Files and callers have full tensors in the single-process layout; a rank holds shards. Such a model is built with its
parameters on the meta device, sharded there, and only then filled, shard by shard: no rank needs memory for more than
its shards and one full tensor, except rank 0 if it builds the full model and sends it.
"""

from collections.abc import Callable, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from drawbar.distributed.device_mesh import local_shape_and_offset
from drawbar.errors import UserError
from drawbar.parallel.local_boxes import boxes_of_shard
from drawbar.parallel.tensor import FusedLayout
from drawbar.runtime.safetensors_reader import dtype_of, read_slice, shape_of


def materialize(
    model: nn.Module,
    device: torch.device,
    buffer_device: torch.device,
    allocate: Callable[..., Tensor] = torch.empty_like,
) -> None:
    """Replace every parameter on the meta device by an uninitialized one on ``device``. Tied ones stay tied.

    Args:
        buffer_device: device for the buffers; they are never offloaded, as the forward uses them in place.
        allocate: ``allocate(parameter, device=device)`` creates the new tensor.
    """
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                if id(parameter) not in made:
                    empty = allocate(parameter, device=device)
                    made[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                module._parameters[name] = made[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = _empty_buffer(module, name, buffer, buffer_device)
            elif buffer is not None:
                module._buffers[name] = buffer.to(buffer_device)


def _empty_buffer(module: nn.Module, name: str, buffer: Tensor, device: torch.device) -> Tensor:
    """An uninitialized buffer in place of one that was computed from a parameter on the meta device. Raises UserError
    if no checkpoint could fill it."""
    if name in module._non_persistent_buffers_set:
        raise UserError(
            f"the buffer {name} of {type(module).__name__} is computed from a parameter, but is not saved",
            where="the task's build_model",
            remedy="register it with persistent=True, or compute it from numbers that are not parameters",
        )
    return torch.empty_like(buffer, device=device)


def expanded_empty(parameter: Tensor, device: torch.device) -> Tensor:
    """For ``materialize``: a read-only placeholder of the parameter's shape that takes no memory."""
    return torch.empty((), dtype=parameter.dtype, device=device).expand(parameter.shape)


def full_tensor(tensor: Tensor, fused: FusedLayout | None = None) -> Tensor:
    """The full tensor, in the single-process layout. Every rank that holds a shard must call this."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    full = tensor.detach().full_tensor()
    return full if fused is None else fused.to_logical(full)


@torch.no_grad()
def load_shard(tensor: Tensor, tensors: Mapping[str, Tensor], name: str, fused: FusedLayout | None = None) -> None:
    """Set a parameter, a buffer or an optimizer tensor to its shard of ``tensors[name]``; only that shard is read."""
    if not isinstance(tensor, DTensor):
        tensor.copy_(tensors[name])
        return
    local = tensor.to_local()
    sizes, offset = local_shape_and_offset(tensor)
    for part, at in boxes_of_shard(sizes, offset, tensor.shape, fused):
        piece = local[part]
        index = tuple(slice(start, start + size) for start, size in zip(at, piece.shape, strict=True))
        piece.copy_(read_slice(tensors, name, index))


def shard_like(
    parameter: nn.Parameter, tensors: Mapping[str, Tensor], name: str, fused: FusedLayout | None = None
) -> Tensor:
    """``tensors[name]`` sharded like ``parameter``, in its stored dtype; unsharded if its shape differs from the
    parameter's."""
    if not isinstance(parameter, DTensor) or shape_of(tensors, name) != parameter.shape:
        return tensors[name]
    part = torch.empty_like(parameter, dtype=dtype_of(tensors, name))
    load_shard(part, tensors, name, fused)
    return part


def check_weights(here: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """Check that the weights match this model.

    Raises:
        UserError: they do not; the message names the first tensors that are missing, unexpected, or of another shape.
    """
    shapes = {name: shape_of(tensors, name) for name in tensors}
    problems = [
        *(f"{name} is missing" for name in here if name not in shapes),
        *(f"{name} is not one of this model's saved tensors" for name in shapes if name not in here),
        *(
            f"{name} has shape {list(shapes[name])} instead of {list(tensor.shape)}"
            for name, tensor in here.items()
            if name in shapes and shapes[name] != tensor.shape
        ),
    ]
    if problems:
        rest = [f"and {len(problems) - 3} more"] if len(problems) > 3 else []
        raise UserError(
            "\n  ".join(["the checkpoint does not fit this model:", *problems[:3], *rest]),
            remedy="use the task, model and lora settings that it was written with",
        )


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """All parameters and buffers by name, with tied ones listed once."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def tensors_from_rank0(source: nn.Module | None, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """Broadcast a full model from rank 0: yields (name, tensor) on every rank. Every rank must iterate to the end.

    Args:
        source: the full model on rank 0; None on other ranks.
        device: device of the broadcast tensors.
    """
    tensors = named_tensors(source) if source is not None else {}
    listed = [[(name, tensor.shape, tensor.dtype) for name, tensor in tensors.items()]]
    dist.broadcast_object_list(listed, src=0)
    for name, shape, dtype in listed[0]:
        full = (
            tensors[name].detach().to(device).contiguous()
            if tensors
            else torch.empty(shape, dtype=dtype, device=device)
        )
        dist.broadcast(full.flatten().view(torch.uint8), src=0)  # no backend takes every dtype
        yield name, full


@torch.no_grad()
def broadcast_shards(
    targets: Mapping[str, Tensor], source: nn.Module | None, fused: Mapping[str, FusedLayout], device: torch.device
) -> None:
    """Fill the shards of a model from the full model on rank 0. Collective.

    Args:
        targets: this rank's parameters and buffers, by full-model name.
        source: the full model on rank 0; None on other ranks.
        fused: see ``parallel.tensor``.
        device: device of the broadcast tensors.
    """
    for name, full in tensors_from_rank0(source, device):
        if name in targets:
            load_shard(targets[name], {name: full}, name, fused.get(name))
