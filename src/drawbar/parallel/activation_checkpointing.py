"""Activation checkpointing (Chen et al. 2016, arXiv:1604.06174): blocks are computed again in the backward pass."""

from functools import partial
from typing import Any, Literal

import torch
import torch.nn.attention.varlen  # registers its operation
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers.cache_utils import Cache

from drawbar.config.schema.run_config import EveryKthBlock
from drawbar.parallel.blocks import Forward, blocks_for, replace_forward

_ATEN = torch.ops.aten
KEPT = {
    _ATEN.mm.default,
    _ATEN.addmm.default,
    _ATEN.bmm.default,
    _ATEN.baddbmm.default,
    _ATEN._scaled_dot_product_flash_attention.default,
    _ATEN._scaled_dot_product_efficient_attention.default,
    _ATEN._scaled_dot_product_cudnn_attention.default,
    _ATEN._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.torch_attn._varlen_attn.default,
    torch.ops.higher_order.flex_attention,
}
"""What ``selective`` keeps: the results that cost most to compute."""


def checkpoint_activations(model: nn.Module, setting: Literal["none", "full", "selective"] | EveryKthBlock) -> None:
    """Let the repeated blocks be computed again in the backward pass, in place; nothing is renamed or wrapped.

    Random numbers are drawn again as they were, so dropout drops the same. Blocks compute as before where no backward
    pass will follow: in evaluation, and without gradients.

    Raises:
        UserError: the model has no repeated blocks.
    """
    if setting == "none":
        return
    step = setting.every if isinstance(setting, EveryKthBlock) else 1
    replace = partial(_recomputed, selective=setting == "selective")
    made: dict[type, type] = {}
    for block in blocks_for(model, "parallel.activation_checkpointing")[::step]:
        replace_forward(block, replace, made)


def _recomputed(forward: Forward, selective: bool) -> Forward:
    contexts = {"context_fn": partial(create_selective_checkpoint_contexts, _policy)} if selective else {}

    def recomputed(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not (self.training and torch.is_grad_enabled()):
            return forward(self, *args, **kwargs)
        # a block that is computed twice would append to the cache twice
        args = tuple(_without_cache(value) for value in args)
        kwargs = {name: _without_cache(value) for name, value in kwargs.items()}
        return checkpoint(forward, self, *args, use_reentrant=False, **contexts, **kwargs)

    return recomputed


def _without_cache(value: Any) -> Any:
    return None if isinstance(value, Cache) else value


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in KEPT else CheckpointPolicy.PREFER_RECOMPUTE
