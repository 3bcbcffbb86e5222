"""Applies a bf16 residual stream, tensor parallelism, activation checkpointing, compilation, and FSDP or replication to
a model, in this order."""

import logging
import warnings

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from drawbar.config.parallel_dims import ParallelDims
from drawbar.config.schema.run_config import ParallelSection
from drawbar.parallel.activation_checkpointing import checkpoint_activations
from drawbar.parallel.compile import compile_blocks
from drawbar.parallel.fsdp import replicate_on_mesh, shard
from drawbar.parallel.model_plan import ModelParallelPlan
from drawbar.parallel.residual_stream import keep_stream_in_bf16, stream_dtype
from drawbar.parallel.tensor import tensor_parallel


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
        parallel: with ``strategy`` resolved: not ``auto``.
        mesh: all axes of ``dims``; None where nothing is sharded or replicated here (one process, DDP, DeepSpeed).
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
