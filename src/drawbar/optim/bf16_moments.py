"""AdamW whose moments are kept in bf16: 4 bytes for each parameter instead of 8.

An average with ``beta2 = 0.999`` changes by about a thousandth of itself in a step, and bf16 has 8 significant bits: by
rounding to nearest, such changes are lost, step after step (https://arxiv.org/abs/2603.16731). So moments are rounded
stochastically (https://arxiv.org/abs/2010.06192): to one of the two neighbors, with the odds that make the mean right.

The random bits are a hash of the step and of the element's place in the full tensor. No checkpoint needs them, and they
are the same on every rank and under every strategy: replicas stay equal, and so do the two copies that a pipeline has
of a tied weight. (Under tensor parallelism, fused projections are stored in another order, and get other bits.)
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW
from torch.optim.adamw import adamw

from drawbar.distributed.device_mesh import local_shape_and_offset

MOMENTS = ("exp_avg", "exp_avg_sq")

CHUNK = 2**20
"""Elements that are updated at a time: only their moments are in fp32 meanwhile."""

GOLDEN, FACTOR_A, FACTOR_B = 0x9E3779B9 - 2**32, 0x7FEB352D, 0x846CA68B - 2**32
"""As int32, whose products wrap around: 2³² over the golden ratio, and the factors of the hash lowbias32
(https://nullprogram.com/blog/2018/07/31/)."""


class AdamWBf16Moments(AdamW):
    """torch's AdamW, computed in fp32, with moments that are bf16 between steps. For parameters in fp32."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, but the moments stay bf16: torch would give them the parameters' dtype, fp32."""
        saved = state_dict["state"]
        super().load_state_dict({**state_dict, "state": {index: {"step": saved[index]["step"]} for index in saved}})
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for index, values in saved.items():
            parameter = parameters[index]
            for name in MOMENTS:
                self.state[parameter][name] = values[name].to(device=parameter.device, dtype=torch.bfloat16)

    def _update(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            # the fused kernel wants the count of steps beside the parameter, the others on the host
            state["step"] = torch.zeros((), device=parameter.device if group["fused"] else None)
            state |= {name: torch.zeros_like(parameter, dtype=torch.bfloat16) for name in MOMENTS}
        tensors = (parameter, parameter.grad, *(state[name] for name in MOMENTS))
        weight, grad, *moments = (_local(tensor, parameter) for tensor in tensors)
        for rows in _chunks(weight):
            first, second = (moment[rows].float() for moment in moments)
            adamw(
                [weight[rows]],
                [grad[rows]],
                [first],
                [second],
                [],
                [state["step"].clone()],
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
            for_first, for_second = random_bits(parameter, rows, state["step"])
            store_rounded(moments[0][rows], first, for_first)
            store_rounded(moments[1][rows], second, for_second)
        state["step"] += 1


def _local(tensor: Tensor, parameter: nn.Parameter) -> Tensor:
    """This rank's part of ``tensor``, sharded as ``parameter`` is: a gradient may be sharded in another way."""
    if isinstance(tensor, DTensor):
        return tensor.redistribute(placements=parameter.placements).to_local()
    return tensor.detach()


def _chunks(weight: Tensor) -> Iterator[slice]:
    """Slices of rows with about ``CHUNK`` elements; one slice of all rows if the weight is not contiguous."""
    count = len(weight)
    size = max(1, CHUNK * count // max(1, weight.numel())) if weight.is_contiguous() else max(1, count)
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


def random_bits(parameter: Tensor, rows: slice, step: Tensor) -> tuple[Tensor, Tensor]:
    """Two random numbers from 0 to 2¹⁶ − 1 (int32) for each element in these rows of this rank's shard."""
    shape, offset = local_shape_and_offset(parameter)

    def hashed_places(start: int, end: int) -> Tensor:
        return _hashed(torch.arange(start, end, dtype=torch.int32, device=parameter.device))

    bits = _hashed(hashed_places(offset[0] + rows.start, offset[0] + rows.stop) + _hashed(step.int() * GOLDEN))
    for start, size in zip(offset[1:], shape[1:], strict=True):
        bits = _mixed(bits.unsqueeze(-1) + hashed_places(start, start + size), FACTOR_A)
    return (bits >> 16).bitwise_and_(0xFFFF), bits.bitwise_and_(0xFFFF)


def _hashed(numbers: Tensor) -> Tensor:
    """In place."""
    return _mixed(_mixed(numbers, FACTOR_A), FACTOR_B)


def _mixed(bits: Tensor, factor: int) -> Tensor:
    """A round like those of lowbias32, in place; but its shift is always by 16 bits."""
    return bits.bitwise_xor_((bits >> 16).bitwise_and_(0xFFFF)).mul_(factor)


def store_rounded(target: Tensor, exact: Tensor, bits: Tensor) -> None:
    """Write fp32 numbers, which it overwrites, to a bf16 tensor; up or down by chance, so that the mean is right.

    Args:
        bits: random numbers from 0 to 2¹⁶ − 1 (int32).
    """
    # bf16 is the upper half of fp32; the lower half, over 2¹⁶, is the probability that the addition carries into it.
    # (This may turn a NaN into a zero, but the weight is NaN by then.)
    target.view(torch.int16).copy_(exact.view(torch.int32).add_(bits).bitwise_right_shift_(16))
