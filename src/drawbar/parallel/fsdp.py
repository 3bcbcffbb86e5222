"""Sharded parameters, gradients and optimizer state with torch's FSDP2 (``fully_shard``), and replicas of them."""

import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from drawbar.config.schema.run_config import ParallelSection
from drawbar.errors import UserError
from drawbar.parallel.blocks import repeated_blocks
from drawbar.parallel.precision import parameters_cast_by_autocast
from drawbar.parallel.synced_generate import synchronize_generate
from drawbar.runtime.safetensors_reader import DTYPES
from drawbar.runtime.torch_internals import DefaultReduceScatter, replicate


def shard(model: nn.Module, mesh: DeviceMesh, parallel: ParallelSection, precision: str) -> None:
    """Shard the model over ``dp_shard`` and ``cp``, block by block; replicate it over ``dp_replicate``. In place.

    Trained weights stay in fp32. Gradients are averaged over shards in ``parallel.reduce_dtype``, and over replicas in
    fp32. As without shards, autocast decides what is computed in ``precision``. So only parameters that autocast casts
    anyway are gathered in ``precision``: linear layers of the blocks and of the head. The rest is gathered in fp32 with
    the root's own parameters: the norms of the blocks, and everything outside the blocks. Gathering norms separately
    would need ``fully_shard`` on each, with hooks inside the block. (Exceptions: ``_gathered_parameters``, and
    ``_lookup``, whose weight is freed after its forward and not gathered for its backward, which does not need it.)

    Args:
        mesh: two-dimensional (replicas, shards), or one-dimensional (shards).

    Raises:
        UserError: as ``check_shardable``; or gloo cannot send a parameter's dtype (fp8).
    """
    check_shardable(model, "FSDP")
    for name, parameter in model.named_parameters():
        if mesh.device_type == "cpu" and parameter.dtype.itemsize == 1 and parameter.is_floating_point():
            raise UserError(
                f"FSDP gathers {name}, and gloo cannot send its dtype, {parameter.dtype}",
                where="parallel.strategy",
                remedy="keep it in bf16, or in a buffer; or train with zero1, or on GPUs",
            )
    offload: OffloadPolicy = OffloadPolicy()
    if parallel.offload:
        offload = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    wrap = partial(fully_shard, mesh=mesh, offload_policy=offload)
    exact = MixedPrecisionPolicy(cast_forward_inputs=False)
    dtype = None if precision == "fp32" else DTYPES[precision]
    low = exact
    if dtype is not None:
        low = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)

    reshard = parallel.pipeline == 1 if parallel.reshard is None else parallel.reshard
    lookup = _lookup(model) if reshard else None
    units = [*([] if lookup is None else [lookup]), *_units(model)]
    cast = set() if dtype is None else parameters_cast_by_autocast(model)
    groups = [_gathered_parameters(own, cast) for own in _exclusive_parameters(model, units)]
    _used_units[model] = _UsedUnits(units)
    # the root first: FSDP does not collect parameters from submodules that it already wraps
    wrap(model, mp_policy=exact, ignored_params=set().union(*groups), reshard_after_forward=False)
    grouped = [(unit, group) for unit, group in zip(units, groups, strict=True) if group]
    for number, (unit, group) in enumerate(grouped, start=1):
        others = set(unit.parameters()) - group
        # the last unit is not freed: the backward pass starts with it, and would gather it again at once
        frees = reshard and number < len(grouped)
        wrap(unit, mp_policy=low if group <= cast else exact, ignored_params=others, reshard_after_forward=frees)
        if unit is lookup:
            lookup.set_unshard_in_backward(False)
            _freed_lookups.add(lookup)
    if parallel.reduce_dtype == "bf16":
        for module in _fsdp_modules(model):
            module.set_custom_reduce_scatter(_Bf16ReduceScatter())


class _Bf16ReduceScatter(DefaultReduceScatter):
    """Reduces gradients over the shards in bf16. Unlike with ``MixedPrecisionPolicy.reduce_dtype``, gradients of a
    rank's micro-batches and of replicas are summed in fp32."""

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        reduced = torch.empty_like(output_tensor, dtype=torch.bfloat16)
        work = super().__call__(reduced, input_tensor.bfloat16(), *args, **kwargs)
        output_tensor.copy_(reduced)
        return work


def check_shardable(model: nn.Module, library: str) -> None:
    """Raise UserError for a 0-d parameter or a trained one without elements: FSDP and DeepSpeed fail on these with
    less helpful errors."""
    for name, parameter in model.named_parameters():
        if parameter.dim() == 0:
            raise UserError(
                f"{library} cannot shard {name}, which has no dimension",
                where="parallel.strategy",
                remedy="make it a tensor with one element, torch.zeros(1); or train with ddp or zero1",
            )
        if parameter.requires_grad and parameter.numel() == 0:
            raise UserError(
                f"{library} cannot train {name}, which has no elements: its shape is {list(parameter.shape)}",
                where="parallel.strategy",
                remedy="leave it out of the model, or set its requires_grad to False; or train with ddp or zero1",
            )


def _fsdp_modules(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def prepare_unused_units(model: nn.Module) -> None:
    """Gather and free every FSDP unit once, after the weights are loaded, so that a micro-batch may leave units unused:
    without gradient sync, torch reads the gathered parameters of all units, even if one was never gathered."""
    for module in _fsdp_modules(model):
        module.unshard()
        module.reshard()


class _UsedUnits:
    """A running digest of the FSDP units that ran a training forward, in order, since it was last read."""

    def __init__(self, units: Iterable[nn.Module]) -> None:
        self.digest = 0
        for number, unit in enumerate(units):
            unit.register_forward_pre_hook(partial(self._add, number))

    def _add(self, number: int, unit: nn.Module, _: object) -> None:
        if unit.training:
            self.digest = zlib.crc32(b"%d" % number, self.digest)


_used_units: WeakKeyDictionary[nn.Module, _UsedUnits] = WeakKeyDictionary()


def digest_of_used_units(model: nn.Module, before: int) -> int:
    """A 32-bit digest of the submodules used of a model sharded by ``shard``: it differs between ranks that used
    different ones, and is equal for two steps that used the same. If ranks differ, FSDP's collectives silently pair
    different parameters or gradients.

    Args:
        before: the digest of earlier micro-batches.
    """
    units = _used_units[model]
    used, units.digest = units.digest, 0
    received = [number for number, parameter in enumerate(model.parameters()) if parameter.grad is not None]
    return zlib.crc32(f"{before} {used} {received}".encode())


def _units(model: nn.Module) -> list[nn.Module]:
    """The modules that are gathered separately: the repeated blocks, and the head of a language model."""
    units = [block for _, block in repeated_blocks(model)]
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    return units if head is None or head in units else [*units, head]


_freed_lookups: WeakSet[nn.Module] = WeakSet()


def _lookup(model: nn.Module) -> nn.Module | None:
    """The token embedding, if its weight is used only in its forward: not by a tied head, nor by a backward, since that
    of a lookup needs only the tokens. With a large vocabulary it is the largest tensor of a model.
    """
    if getattr(getattr(model, "config", None), "tie_word_embeddings", True):  # some heads use it without being a module
        return None
    try:
        embedding = model.get_input_embeddings()
    except (AttributeError, NotImplementedError):  # an image model, or a user-defined one
        return None
    return embedding if type(embedding) is nn.Embedding else None


def _exclusive_parameters(model: nn.Module, units: Iterable[nn.Module]) -> list[set[nn.Parameter]]:
    """For each FSDP unit, the parameters that no module outside it uses."""

    def uses(module: nn.Module) -> Counter[nn.Parameter]:
        return Counter(parameter for part in module.modules() for parameter in part.parameters(recurse=False))

    everywhere = uses(model)
    return [{p for p, count in uses(unit).items() if count == everywhere[p]} for unit in units]


def _gathered_parameters(own: set[nn.Parameter], cast: set[nn.Parameter]) -> set[nn.Parameter]:
    """The parameters gathered for a unit: those that autocast casts; or all, in fp32, if autocast casts nothing in the
    model (``cast`` is empty), or if the unit has other matrices (stacked experts, an embedding), which are too large to
    keep for the whole step."""
    if not cast or any(parameter.ndim > 1 for parameter in own - cast):
        return own
    return own & cast


def prepare_sharded_generate(model: nn.Module) -> None:
    """Prepare a sharded model's ``generate``, in place: all ranks must then call ``generate`` together, and each
    continues until the texts of all ranks are finished."""
    if hasattr(model, "generate"):
        # generate calls the encoder directly, which needs the root's parameters all-gathered
        register_fsdp_forward_method(model, "generate")
        synchronize_generate(model)


def replicate_on_mesh(model: nn.Module, mesh: DeviceMesh) -> None:
    """Replicate a model under tensor, context or pipeline parallelism, in place (DDP does not support DTensors).

    Args:
        mesh: one-dimensional, over the replicas.
    """
    for _, block in repeated_blocks(model):
        replicate(block, mesh=mesh)
    replicate(model, mesh=mesh)


_in_inference: WeakSet[nn.Module] = WeakSet()


@contextmanager
def free_gathered(model: nn.Module) -> Iterator[None]:
    """Context manager for forward passes without backward: parameters outside the blocks stay gathered between them,
    and are resharded on exit. Of nested contexts for the same model, only the outermost one reshards."""
    if model in _in_inference:
        yield
        return
    _in_inference.add(model)
    lookups = [module for module in _fsdp_modules(model) if module in _freed_lookups]
    for module in lookups:
        module.set_reshard_after_forward(False, recurse=False)
    try:
        yield
    finally:
        _in_inference.remove(model)
        for module in lookups:
            module.set_reshard_after_forward(True, recurse=False)
        for module in _fsdp_modules(model):
            module.reshard()
