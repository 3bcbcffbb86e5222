"""AdamW with moments stored in 8 bits: 2 bytes per parameter instead of 8 (Dettmers et al. 2022, arXiv:2110.02861).

Each block of 256 numbers has a scale, and codes for shares of it, dense near zero ("dynamic quantization"). Updates are
those of torchao's ``AdamW8bit``, which needs a compiler and keeps its state in tensors that safetensors cannot hold.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from drawbar.optim.bf16_moments import MOMENTS, AdamWOwnMoments, elements_at_a_time

BLOCK = 256
SCALE = "_scale"
"""Ends the names of the scales of moments: ``exp_avg_scale``, fp32, one for each block of the parameter in one row."""


def dynamic_map(signed: bool) -> list[float]:
    """The 256 shares of a scale, in order (section 2.2 of the paper): for each power of ten from 1e-6 to 1, twice as
    many as for the one before, evenly spaced from a tenth of it; 0 and 1; and, signed, the negative ones."""
    shares = [0.0, 1.0]
    for power in range(7):
        edges = torch.linspace(0.1, 1, 2 ** (power if signed else power + 1) + 1)
        positive = (10 ** (power - 6) * ((edges[:-1] + edges[1:]) / 2)).tolist()
        shares += [*positive, *(-share for share in positive)] if signed else positive
    return sorted(shares)


class _Codes(NamedTuple):
    """What codes of one moment mean."""

    shares: Tensor
    borders: Tensor
    """Between the shares: from here on it is the upper one."""

    @classmethod
    def on(cls, device: torch.device, signed: bool) -> "_Codes":
        shares = torch.tensor(dynamic_map(signed))
        return cls(shares.to(device), ((shares[1:] + shares[:-1]) / 2).to(device))

    def read(self, codes: Tensor, scales: Tensor) -> Tensor:
        return (self.shares[codes.view(-1, BLOCK).int()] * scales.unsqueeze(1)).view(-1)

    def write(self, values: Tensor, codes: Tensor, scales: Tensor) -> None:
        blocks = values.view(-1, BLOCK)
        scales.copy_(blocks.abs().amax(1).clamp(min=1e-12))
        found = torch.bucketize(blocks / scales.unsqueeze(1), self.borders, right=True, out_int32=True)
        codes.copy_(found.view_as(codes))


class AdamWInt8Moments(AdamWOwnMoments):
    """AdamW, computed in fp32, with moments in 8 bits between steps. For parameters that :func:`fits`."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        state, codes = self.state[parameter], self._codes(parameter.device)
        if not state:
            state["step"] = torch.zeros((), device=parameter.device if group["fused"] else None)
            for name in MOMENTS:
                state |= _stored(name, torch.zeros_like(parameter), codes[name])
        state["step"] += 1
        (beta1, beta2), decay = group["betas"], group["lr"] * group["weight_decay"]
        corrections = 1 - beta1 ** state["step"], (1 - beta2 ** state["step"]).sqrt()
        weights, gradients = parameter.detach().view(-1), parameter.grad.reshape(-1)
        for rows in _parts(len(weights), elements_at_a_time(parameter.device)):
            stored = [
                (state[name].view(-1)[rows], state[name + SCALE][rows.start // BLOCK : rows.stop // BLOCK])
                for name in MOMENTS
            ]
            weight, gradient = weights[rows], gradients[rows]
            first, second = (codes[name].read(*one) for name, one in zip(MOMENTS, stored, strict=True))
            first.lerp_(gradient, 1 - beta1)
            second.lerp_(gradient.square(), 1 - beta2)
            for name, value, one in zip(MOMENTS, (first, second), stored, strict=True):
                codes[name].write(value, *one)
            weight.mul_(1 - decay)
            weight.sub_(
                group["lr"] * first.div_(corrections[0]).div_(second.sqrt_().div_(corrections[1]).add_(group["eps"]))
            )

    def stored(self, parameter: nn.Parameter, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        codes, found = self._codes(parameter.device), dict[str, Tensor]()
        for name in MOMENTS:
            if name + SCALE in values:
                found |= {key: values[key].to(parameter.device) for key in (name, name + SCALE)}
            else:
                found |= _stored(name, values[name].to(parameter.device).float(), codes[name])
        return found

    def _codes(self, device: torch.device) -> dict[str, _Codes]:
        if device not in self.__dict__.setdefault("_maps", {}):
            self._maps[device] = {name: _Codes.on(device, signed=name == "exp_avg") for name in MOMENTS}
        return self._maps[device]


def _stored(name: str, values: Tensor, codes: _Codes) -> dict[str, Tensor]:
    stored = torch.empty_like(values, dtype=torch.uint8), values.new_empty(values.numel() // BLOCK)
    codes.write(values.reshape(-1), *stored)
    return {name: stored[0], name + SCALE: stored[1]}


def _parts(count: int, most: int) -> Iterator[slice]:
    return (slice(start, min(start + most, count)) for start in range(0, count, most))


def fits(parameter: nn.Parameter) -> bool:
    """Whether its moments can be stored so: it consists of whole blocks."""
    return parameter.numel() % BLOCK == 0


def in_fp32(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state of a parameter as other optimizers take it: moments that have scales, as numbers."""
    found = {name: tensor for name, tensor in values.items() if not name.endswith(SCALE)}
    for name in MOMENTS:
        if name + SCALE in values:
            codes, scales = values[name], values[name + SCALE]
            found[name] = _Codes.on(codes.device, name == "exp_avg").read(codes, scales.to(codes.device)).view_as(codes)
    return found
