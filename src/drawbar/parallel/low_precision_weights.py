"""The weights that autocast casts to the low precision: once a step where they are trained, for good where frozen."""

from contextlib import AbstractContextManager, nullcontext
from inspect import unwrap

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers.pytorch_utils import Conv1D

from drawbar.util.dtypes import DTYPES

_LOW = (torch.bfloat16, torch.float16)
_CAST_BY_AUTOCAST = {kind.forward for kind in (nn.Linear, Conv1D, nn.Conv1d, nn.Conv2d, nn.Conv3d)}
"""Forwards that use their parameters only in operators whose inputs autocast casts to the low precision."""


def cast_weights_once(module: nn.Module, precision: str, device: torch.device) -> AbstractContextManager[None]:
    """Around the micro-batches of a step: autocast casts each trained weight in the first forward, and in no other.

    Autocast drops its casts where its outermost context ends. This is that context, with autocast disabled: a backward
    in it runs without autocast, as it should. Update the weights after it. Nothing is done for a model that is
    sharded by FSDP, which frees weights after each forward (their casts would stay in memory), or replicated on a mesh
    (``replicate_on_mesh``), which torch does with an ``FSDPModule``, too.
    """
    if precision == "fp32" or any(isinstance(part, FSDPModule) for part in module.modules()):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def parameters_cast_by_autocast(model: nn.Module) -> set[nn.Parameter]:
    """The parameters that autocast casts to the low precision wherever the model uses them."""
    cast: set[nn.Parameter] = set()
    others: set[nn.Parameter] = set()
    for module in model.modules():
        is_cast = unwrap(type(module).forward) in _CAST_BY_AUTOCAST
        (cast if is_cast else others).update(module.parameters(recurse=False))
    return cast - others


def keep_trained_weights_in_fp32(model: nn.Module) -> set[torch.dtype]:
    """Convert the trained parameters that are in bf16 or fp16 to fp32, in place, and the buffers of their modules
    (batch norm's statistics) with them; frozen ones stay as they are.

    Returns:
        The dtypes that were found; none for a model whose trained parameters are in fp32 already.
    """
    found: set[torch.dtype] = set()
    for module in model.modules():
        low = [p for p in module.parameters(recurse=False) if p.requires_grad and p.dtype in _LOW]
        if low:
            low_buffers = [buffer for buffer in module.buffers(recurse=False) if buffer.dtype in _LOW]
            found.update(parameter.dtype for parameter in low)
            for tensor in (*low, *low_buffers):
                tensor.data = tensor.data.float()
    return found


def weights_to_store_low(model: nn.Module, precision: str) -> set[nn.Parameter]:
    """The frozen fp32 weights (those under LoRA) that autocast would cast in each forward: stored in the low precision,
    they take half the memory, and what is computed stays the same, bit by bit."""
    if precision == "fp32":
        return set()
    cast = parameters_cast_by_autocast(model)
    return {parameter for parameter in cast if not parameter.requires_grad and parameter.dtype == torch.float32}


def store_frozen_weights_low(model: nn.Module, precision: str) -> None:
    """Store the frozen weights of :func:`weights_to_store_low` in the low precision, in place."""
    for parameter in weights_to_store_low(model, precision):
        parameter.data = parameter.data.to(DTYPES[precision])
