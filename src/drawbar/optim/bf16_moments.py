"""AdamW with moments stored in bf16: 4 bytes per parameter instead of 8.

An average with ``beta2 = 0.999`` changes by about a thousandth per step, and bf16 has 8 significant bits: rounding to
nearest would lose such changes at every step (https://arxiv.org/abs/2603.16731). So moments are rounded stochastically
(https://arxiv.org/abs/2010.06192): to one of the two neighbors, with probabilities that preserve the expected value.

The random bits are a hash of the step and of the element's position in the full tensor. Checkpoints need not store
them, and they are the same on every rank and under every strategy: replicas stay equal, as do a pipeline's two copies
of a tied weight. (Under tensor parallelism, fused projections are stored in another order, and get other bits.)
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW
from torch.optim.adamw import adamw

from drawbar.distributed.device_mesh import local_shape_and_offset
from drawbar.runtime.log import logger
from drawbar.runtime.torch_internals import _foreach_add_, _foreach_copy_, _foreach_sub_

MOMENTS = ("exp_avg", "exp_avg_sq")

CHUNK, CUDA_CHUNK = 2**20, 2**26
"""Elements that are updated at a time, on the CPU (whose caches hold them) and on CUDA (where each launch costs time).
Only their moments are in fp32 meanwhile: a step takes 8 bytes for each of them, 8 MiB or 512 MiB, besides its state. On
the CPU it takes as much again for the random bits; on CUDA, too, where torch cannot compile."""

GOLDEN, FACTOR_A, FACTOR_B = 0x9E3779B9 - 2**32, 0x7FEB352D, 0x846CA68B - 2**32
"""As int32, whose products wrap around: 2³² over the golden ratio, and the factors of the hash lowbias32
(https://nullprogram.com/blog/2018/07/31/)."""


@dataclass
class _Part:
    """Some rows of a rank's shard of a parameter."""

    weight: Tensor
    grad: Tensor
    moments: list[Tensor]
    step: Tensor
    offset: tuple[int, ...]
    """Offset of the rows in the full tensor."""


class AdamWOwnMoments(AdamW):
    """torch's AdamW, computed in fp32, with moments stored in another form between steps. For parameters in fp32."""

    def stored(self, parameter: nn.Parameter, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The moments of a parameter in this form, from a saved state in this or any other floating-point form."""
        raise NotImplementedError

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, but the moments keep their form: torch would give them the parameters' dtype, fp32."""
        saved = state_dict["state"]
        super().load_state_dict({**state_dict, "state": {index: {"step": saved[index]["step"]} for index in saved}})
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for index, values in saved.items():
            self.state[parameters[index]] |= self.stored(parameters[index], values)


class AdamWBf16Moments(AdamWOwnMoments):
    """With moments in bf16."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            for parts in _together(part for parameter in parameters for part in self._parts(parameter, group)):
                _update(parts, group)
            if parameters:
                _foreach_add_([self.state[parameter]["step"] for parameter in parameters], 1)

    def stored(self, parameter: nn.Parameter, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: values[name].to(device=parameter.device, dtype=torch.bfloat16) for name in MOMENTS}

    def _parts(self, parameter: nn.Parameter, group: dict[str, Any]) -> Iterator[_Part]:
        """The rank's shard, in parts of about as many elements as are updated at a time. Its state is there then."""
        state = self.state[parameter]
        if not state:
            # the fused kernel needs the step count on the parameter's device, the others on the host
            state["step"] = torch.zeros((), device=parameter.device if group["fused"] else None)
            state |= {name: torch.zeros_like(parameter, dtype=torch.bfloat16) for name in MOMENTS}
        tensors = (parameter, parameter.grad, *(state[name] for name in MOMENTS))
        weight, grad, *moments = (_local(tensor, parameter) for tensor in tensors)
        _, (first, *others) = local_shape_and_offset(parameter)
        for rows in _chunks(weight):
            offset = (first + rows.start, *others)
            yield _Part(weight[rows], grad[rows], [moment[rows] for moment in moments], state["step"], offset)


def _local(tensor: Tensor, parameter: nn.Parameter) -> Tensor:
    """This rank's part of ``tensor``, sharded like ``parameter``: a gradient may be sharded differently."""
    if isinstance(tensor, DTensor):
        return tensor.redistribute(placements=parameter.placements).to_local()
    return tensor.detach()


def elements_at_a_time(device: torch.device) -> int:
    return CUDA_CHUNK if device.type == "cuda" else CHUNK


def _chunks(weight: Tensor) -> Iterator[slice]:
    """Slices of rows with at most ``elements_at_a_time``, at least one row; one slice of all rows if the weight is not
    contiguous."""
    count, most = len(weight), elements_at_a_time(weight.device)
    size = max(1, most * count // max(1, weight.numel())) if weight.is_contiguous() else max(1, count)
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


def _together(parts: Iterable[_Part]) -> Iterator[list[_Part]]:
    """Lists of parts with at most ``elements_at_a_time``, or of one part; no two of them of one parameter."""
    batch: list[_Part] = []
    elements = 0
    for part in parts:
        elements += part.weight.numel()
        if batch and (elements > elements_at_a_time(part.weight.device) or part.step is batch[-1].step):
            yield batch
            batch, elements = [], part.weight.numel()
        batch.append(part)
    if batch:
        yield batch


def _update(parts: list[_Part], group: dict[str, Any]) -> None:
    """A step of AdamW by torch's kernels for many tensors, then one kernel for each part, where torch compiles it."""
    stored = [moment for part in parts for moment in part.moments]
    exact = [torch.empty_like(moment, dtype=torch.float32) for moment in stored]
    _foreach_copy_(exact, stored)
    steps = [part.step for part in parts]
    adamw(
        [part.weight for part in parts],
        [part.grad for part in parts],
        exact[0::2],
        exact[1::2],
        [],
        steps,
        foreach=group["foreach"],
        fused=group["fused"],
        amsgrad=False,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )
    _foreach_sub_(steps, 1)  # adamw counts its steps; other parts of the parameters have yet to make this one
    for part, moments in zip(parts, zip(exact[0::2], exact[1::2], strict=True), strict=True):
        rounding(part.weight.device.type)(part.moments, moments, part.step, part.offset)


Rounding = Callable[[list[Tensor], tuple[Tensor, Tensor], Tensor, tuple[int, ...]], None]
"""``store_moments``, compiled or not."""


def store_moments(moments: list[Tensor], exact: tuple[Tensor, Tensor], step: Tensor, offset: tuple[int, ...]) -> None:
    """Round both moments of some part of a parameter, from fp32 to the bf16 tensors that it is kept in.

    Args:
        step: number of previous steps, 0-d.
        offset: offset of the part in the full tensor.
    """
    for target, values, bits in zip(moments, exact, random_bits(moments[0], offset, step), strict=True):
        store_rounded(target, values, bits)


@cache
def rounding(device_type: str) -> Rounding:
    """What stores moments on a device: on CUDA ``store_moments`` compiled to one kernel, where torch can compile, under
    every setting, as it gives the same bits; that takes seconds, once. Elsewhere ``store_moments``."""
    if device_type != "cuda":
        return store_moments
    example = torch.ones(16, 24, device=device_type)
    try:
        compiled = compiled_rounding()
        compiled([example.bfloat16() for _ in MOMENTS], (example, example.clone()), example.sum(), (0, 0))
    except (RuntimeError, ImportError, OSError) as error:  # errors of torch itself are RuntimeErrors
        logger.warning("torch cannot compile (%s): each step rounds AdamW's moments by many small kernels", error)
        return store_moments
    return compiled


def compiled_rounding() -> Rounding:
    """``store_moments`` as one kernel. It is compiled for each number of dims, not for each shape: after eight variants
    (those with dims of one element among them) torch runs others uncompiled."""
    # by default torch makes several: both moments have only 4 bytes in common, the step, and the hash is long
    options = {"score_fusion_memory_threshold": 1, "realize_opcount_threshold": 1000}
    return torch.compile(store_moments, dynamic=True, options=options)


def random_bits(part: Tensor, offset: tuple[int, ...], step: Tensor) -> tuple[Tensor, Tensor]:
    """Two random numbers from 0 to 2¹⁶ − 1 (int32) for each element of a part that begins at ``offset`` in the full
    tensor."""

    def hashed_places(start: int, size: int) -> Tensor:
        return _hashed(torch.arange(start, start + size, dtype=torch.int32, device=part.device))

    bits = _hashed(hashed_places(offset[0], len(part)) + _hashed(step.int() * GOLDEN))
    for start, size in zip(offset[1:], part.shape[1:], strict=True):
        bits = _mixed(bits.unsqueeze(-1) + hashed_places(start, size), FACTOR_A)
    return (bits >> 16).bitwise_and_(0xFFFF), bits.bitwise_and_(0xFFFF)


def _hashed(numbers: Tensor) -> Tensor:
    """In place."""
    return _mixed(_mixed(numbers, FACTOR_A), FACTOR_B)


def _mixed(bits: Tensor, factor: int) -> Tensor:
    """A round like those of lowbias32, in place; but its shift is always by 16 bits."""
    return bits.bitwise_xor_((bits >> 16).bitwise_and_(0xFFFF)).mul_(factor)


def store_rounded(target: Tensor, exact: Tensor, bits: Tensor) -> None:
    """Write fp32 numbers to a bf16 tensor, rounded up or down at random, such that the expected value is preserved.

    Args:
        bits: random numbers from 0 to 2¹⁶ − 1 (int32), which it overwrites.
    """
    # bf16 is the upper half of fp32; the lower half, over 2¹⁶, is the probability that the addition carries into it.
    # (This may turn a NaN into a zero, but the weight is NaN by then.)
    target.view(torch.int16).copy_(bits.add_(exact.view(torch.int32)).bitwise_right_shift_(16))
