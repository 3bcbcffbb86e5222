"""Copies of live tensors in host memory, and which of their names share a tensor."""

from collections.abc import Callable, Hashable, Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def host_copies(
    tensors: Mapping[str, Tensor],
    keeps: bool = True,
    convert: Callable[[str, Tensor], Tensor] = lambda name, tensor: tensor.detach(),
) -> dict[str, Tensor]:
    """Copies in host memory that share no memory with the live tensors, so that training can go on while they are
    written.

    Names that share a tensor share its copy. Views that merely overlap become tensors of their own.

    Args:
        keeps: False on a rank that only takes part in the collectives of ``convert``; it gets an empty dict.
        convert: returns the full tensor (collective if sharded); called once per tensor, in one order on all ranks.
    """
    first = _first_names(tensors)
    copies: dict[str, Tensor] = {}
    for name in unique_names(tensors):
        converted = convert(name, tensors[name])
        if keeps:
            copies[name] = converted.to("cpu", copy=True, memory_format=torch.contiguous_format)
    return {name: copies[first[name]] for name in tensors} if keeps else {}


def unique_names(tensors: Mapping[str, Tensor]) -> list[str]:
    """The names of the tensors, of tied ones the first."""
    return list(dict.fromkeys(_first_names(tensors).values()))


def tied_names(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Maps each further name of a tied tensor to its first name."""
    return {name: first for name, first in _first_names(tensors).items() if name != first}


def _first_names(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Maps each name to the first name of the same tensor (itself, unless the tensor is tied)."""
    seen: dict[Hashable, str] = {}
    return {name: seen.setdefault(_identity(tensor), name) for name, tensor in tensors.items()}


def _identity(tensor: Tensor) -> Hashable:
    # Of a DTensor a rank's part may be empty, and every rank must give the same answer. Empty tensors all live at
    # address 0, which does not tie them; they may be parameters that ZeRO-3 has freed.
    if isinstance(tensor, DTensor) or tensor.numel() == 0:
        return id(tensor)
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
