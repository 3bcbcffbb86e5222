"""The residual stream: what the repeated blocks hand to each other, and their norms to what follows.

Autocast alone leaves it in fp32, as the embeddings are: a product in bf16 added to a sum in fp32 is fp32, and so is a
norm times its weight. Then each block keeps twice the bytes of its input for the backward pass, and each of its linear
layers a copy in bf16 of its own.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from drawbar.parallel.blocks import repeated_blocks


def stream_dtype(precision: str) -> torch.dtype:
    """bf16 for the precision ``bf16``; else fp32: sums of many blocks may not fit into fp16."""
    return torch.bfloat16 if precision == "bf16" else torch.float32


def keep_stream_in_bf16(model: nn.Module) -> None:
    """Let the repeated blocks take hidden states in bf16, and the norms inside of them give it, in place: those of
    transformers, whose first argument is the hidden states, unless the model wants them in fp32. What the blocks of
    another model take may be anything, such as times.

    Norms, softmax and the loss are still computed in fp32, and weights and their gradients are fp32. Loss curves are
    those of autocast alone, as far as other seeds differ (docs/strategies.md).
    """
    if getattr(getattr(model, "config", None), "residual_in_fp32", False):
        return
    for _, block in repeated_blocks(model):
        if not isinstance(block, GradientCheckpointingLayer):
            continue
        block.register_forward_pre_hook(_cast_first)
        for module in block.modules():
            if type(module).__name__.endswith("Norm"):
                module.register_forward_hook(_cast_output)


def _cast_first(block: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    return (_in_bf16(args[0]), *args[1:]) if args else None


def _cast_output(norm: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    return _in_bf16(output)


def _in_bf16(value: Any) -> Any:
    if not isinstance(value, Tensor) or value.dtype != torch.float32:
        return value
    # without autocast, as for whoever loads a run and calls its model, linear layers take no other dtype than theirs
    return value.bfloat16() if torch.is_autocast_enabled(value.device.type) else value
