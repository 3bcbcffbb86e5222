"""Applies a bf16 residual stream, tensor parallelism, activation checkpointing, compilation, and FSDP or replication to
a model, in this order.
"""

import logging
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.attention.varlen  # registers its operator
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers.cache_utils import Cache

from drawbar.config.parallel_dims import ParallelDims
from drawbar.config.schema.run_config import EveryKthBlock, ParallelSection
from drawbar.parallel.blocks import Forward, blocks_for, replace_forward
from drawbar.parallel.compile import compile_blocks
from drawbar.parallel.fsdp import replicate_on_mesh, shard
from drawbar.parallel.model_plan import ModelParallelPlan
from drawbar.parallel.precision import keep_stream_in_bf16, stream_dtype
from drawbar.parallel.tensor import tensor_parallel

_ATEN = torch.ops.aten
ATTENTION = {
    _ATEN._scaled_dot_product_flash_attention.default,
    _ATEN._scaled_dot_product_efficient_attention.default,
    _ATEN._scaled_dot_product_cudnn_attention.default,
    _ATEN._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.torch_attn._varlen_attn.default,
    torch.ops.higher_order.flex_attention,
}
PRODUCTS = {_ATEN.mm.default, _ATEN.addmm.default, _ATEN.bmm.default, _ATEN.baddbmm.default}
KEPT_NAMESPACES = ("_c10d_functional", "torch_attn", "flash_attn", "flash_attn_3")
"""Namespaces of operators whose outputs are kept: tensor parallelism's collectives, attention over packed rows."""


def checkpoint_activations(
    model: nn.Module, setting: Literal["none", "full", "selective", "attention"] | EveryKthBlock
) -> None:
    """Make the backward pass recompute the repeated blocks. Changes the model in place; no module is renamed.

    The RNG state is restored for the recomputation, so dropout masks are the same. Forwards that no backward pass will
    follow (in evaluation, or without gradients) are unchanged.

    Args:
        setting: which outputs of a block's forward are kept. ``full``: none; ``attention``: those of attention and of
            collectives; ``selective``: these, and those of matrix products. ``EveryKthBlock`` is ``full`` for every
            k-th block; the other blocks keep everything.

    Raises:
        UserError: the model has no repeated blocks.
    """
    if setting == "none":
        return
    step = setting.every if isinstance(setting, EveryKthBlock) else 1
    replace = partial(_recomputed, policy=None if isinstance(setting, EveryKthBlock) else _POLICIES.get(setting))
    made: dict[type, type] = {}
    for block in blocks_for(model, "parallel.activation_checkpointing")[::step]:
        replace_forward(block, replace, made)


def _recomputed(forward: Forward, policy: Callable[..., CheckpointPolicy] | None) -> Forward:
    contexts = {} if policy is None else {"context_fn": partial(create_selective_checkpoint_contexts, policy)}

    def recomputed(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not (self.training and torch.is_grad_enabled()):
            return forward(self, *args, **kwargs)
        # a recomputed block would append to the cache twice
        args = tuple(_without_cache(value) for value in args)
        kwargs = {name: _without_cache(value) for name, value in kwargs.items()}
        return checkpoint(forward, self, *args, use_reentrant=False, **contexts, **kwargs)

    return recomputed


def _without_cache(value: Any) -> Any:
    return None if isinstance(value, Cache) else value


def _keep_attention(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    keeps = operator in ATTENTION or operator.namespace in KEPT_NAMESPACES
    return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE


def _keep_products_too(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in PRODUCTS else _keep_attention(context, operator)


_POLICIES = {"attention": _keep_attention, "selective": _keep_products_too}


def _quiet() -> None:
    """Silence two torch warnings about FSDP that users cannot act on: that a tensor sharded twice is all-gathered twice
    (over tensor parallelism), and that outputs are views (of a pipeline stage, say; a problem only if a task changes
    them in place)."""
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")


def parallelize(
    model: nn.Module,
    plan: ModelParallelPlan,
    parallel: ParallelSection,
    dims: ParallelDims,
    mesh: DeviceMesh | None,
    precision: str,
) -> None:
    """Parallelize a model (or one pipeline stage) in place: bf16 stream → tensor → activation checkpointing →
    compile → shard or replicate.

    Tensor parallelism comes first, so that everything else sees one rank's shards. Activation checkpointing wraps the
    tensor-parallel block, compilation wraps the checkpointed block, and FSDP all-gathers outside of both.
    (``ddp`` without model parallelism is not applied here: DDP wraps the model after its weights are loaded.)

    Args:
        parallel: settings with ``strategy`` resolved (not ``auto``).
        mesh: all axes of ``dims``; None if nothing is sharded or replicated here (one process, DDP, DeepSpeed).
    """
    if stream_dtype(precision) == torch.bfloat16:
        keep_stream_in_bf16(model)
    if mesh is not None:
        _quiet()
        if dims.tp > 1:
            tensor_parallel(model, plan, mesh["tp"], parallel.sequence)
    checkpoint_activations(model, parallel.activation_checkpointing)
    if parallel.compile:
        compile_blocks(model)
    if mesh is None:
        return
    # context-parallel ranks see different tokens, so parameters are sharded or replicated over them as over
    # data-parallel ranks
    if parallel.features.shards_parameters:
        shards = mesh["dp_shard", "cp"]._flatten("dp_shard_cp") if dims.cp > 1 else mesh["dp_shard"]
        axes = mesh["dp_replicate", shards.mesh_dim_names[0]] if dims.dp_replicate > 1 else shards
        shard(model, axes, parallel, precision)
    elif dims.dp_size * dims.cp > 1 and dims.tp * dims.cp * dims.pp > 1:
        replicas = mesh["dp_replicate", "cp"]._flatten("dp_replicate_cp") if dims.cp > 1 else mesh["dp_replicate"]
        replicate_on_mesh(model, replicas)
