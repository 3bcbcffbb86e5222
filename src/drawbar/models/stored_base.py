"""Frozen weights of linear layers that are stored in fewer bits than they are computed with: the base of adapters, as
in QLoRA (Dettmers et al. 2023, arXiv:2305.14314).

A layer holds its weight packed, in frozen parameters of small dtypes, and unpacks it in each forward and again in each
backward pass, so that no unpacked weight outlives a layer's own computation. Values are those of torchao's formats.
"""

from collections.abc import Callable, Iterator, Mapping
from math import gcd
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers.pytorch_utils import Conv1D

NF4 = (-1.0, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0.0,
       0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626, 0.7230, 1.0)  # fmt: skip
"""The values of a 4-bit NormalFloat, as torchao rounds them: quantiles of a normal distribution, and 0."""
BLOCK, GROUP = 64, 256
"""Weights that share a scale, and scales that share a factor, at most: section 3 of the paper."""


def pack_nf4(weight: Tensor) -> tuple[Tensor, ...]:
    """Two 4-bit codes a byte, and a scale in 8 bits for each block (double quantization): 0.52 bytes a weight.

    Args:
        weight: fp32; its number of elements is a multiple of ``BLOCK``.

    Returns:
        Codes (uint8), scales of blocks less their mean (int8), what these are divided by in each group, the mean; and
        the values of the codes, as a GPU would wait for a copy from the host.
    """
    blocks = weight.reshape(-1, BLOCK)
    scales = blocks.abs().amax(1)
    table = torch.tensor(NF4, device=weight.device)
    # where all is 0, so is the code; elsewhere the nearest value, the lower of two
    shares = blocks / scales.clamp(min=torch.finfo(scales.dtype).tiny).unsqueeze(1)
    codes = torch.bucketize(shares, (table[1:] + table[:-1]) / 2, out_int32=True).byte().view(-1)
    mean = scales.mean()
    groups = (scales - mean).view(-1, gcd(len(scales), GROUP))
    factors = (128 / groups.abs().amax(1)).clamp(max=torch.finfo(scales.dtype).max)
    rounded = (groups * factors.unsqueeze(1)).round().clamp(-128, 127).to(torch.int8)
    return codes[::2] << 4 | codes[1::2], rounded.view(-1), factors, mean, table


def unpack_nf4(codes: Tensor, scales: Tensor, factors: Tensor, mean: Tensor, table: Tensor) -> Tensor:
    pairs = torch.stack([table.repeat_interleave(16), table.repeat(16)], 1)  # of the two codes of each byte
    exact = (scales.view(len(factors), -1) / factors.unsqueeze(1)).view(-1, 1) + mean
    return pairs[codes.int()].view(-1, BLOCK) * exact


def pack_int8(weight: Tensor) -> tuple[Tensor, ...]:
    """8 bits a weight, and for each row (of one output) a scale in fp32, symmetric around 0."""
    scales = (weight.abs().amax(1, keepdim=True) / 127.5).clamp(min=torch.finfo(weight.dtype).eps)
    return (weight * (1.0 / scales)).round().clamp(-128, 127).to(torch.int8), scales


class Form(NamedTuple):
    """A way to store a weight of (outputs, inputs)."""

    pack: Callable[[Tensor], tuple[Tensor, ...]]
    unpack: Callable[..., Tensor]
    """From what ``pack`` returned to the weight; the shape need not be right."""
    multiple: int = 1
    """Weights whose number of elements is not a multiple of this cannot be stored so."""


FORMS = {
    "bf16": Form(lambda weight: (weight.bfloat16(),), lambda stored: stored),
    "int8": Form(pack_int8, lambda codes, scales: codes * scales),
    "nf4": Form(pack_nf4, unpack_nf4, BLOCK),
}
"""By the value of ``lora.base``."""
_PARTS = ("codes", "scales", "factors", "mean", "values")


class _Product(torch.autograd.Function):
    """``linear(inputs, weight, bias)`` that keeps the packed weight for its backward pass."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, form: str, shape: torch.Size, bias: Tensor | None, *parts: Tensor) -> Tensor:
        ctx.form, ctx.shape, ctx.dtype = form, shape, inputs.dtype
        ctx.save_for_backward(*parts)
        return linear(inputs, _unpacked(form, shape, parts, inputs.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,) = gradients
        parts = ctx.saved_tensors  # once: recomputed activations can be read only once
        weight = _unpacked(ctx.form, ctx.shape, parts, gradient.dtype)
        return (gradient @ weight).to(ctx.dtype), None, None, None, *(None for _ in parts)


def _unpacked(form: str, shape: torch.Size, parts: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
    return FORMS[form].unpack(*parts).view(shape).to(dtype)


class PackedLinear(nn.Linear):
    """A frozen linear layer with a packed weight; ``weight`` unpacks it, to fp32."""

    form: str

    @property
    def parts(self) -> tuple[Tensor, ...]:
        return tuple(self._parameters[name] for name in _PARTS if name in self._parameters)

    @property
    def weight(self) -> Tensor:
        return _unpacked(self.form, self.weight_shape, self.parts, torch.float32)

    @property
    def weight_shape(self) -> torch.Size:
        """(outputs, inputs)"""
        return torch.Size((self.out_features, self.in_features))

    def forward(self, inputs: Tensor) -> Tensor:
        return _Product.apply(inputs, self.form, self.weight_shape, self.bias, *self.parts)


class PackedConv1D(Conv1D):
    """As ``PackedLinear``, of a layer that has its weight as (inputs, outputs)."""

    form: str
    parts = PackedLinear.parts
    forward = PackedLinear.forward

    @property
    def weight(self) -> Tensor:
        return _unpacked(self.form, self.weight_shape, self.parts, torch.float32).t()

    @property
    def weight_shape(self) -> torch.Size:
        return torch.Size((self.nf, self.nx))


_PACKED: dict[type[nn.Module], type[nn.Module]] = {nn.Linear: PackedLinear, Conv1D: PackedConv1D}


def can_pack(layer: nn.Module, form: str) -> bool:
    """Whether it is a frozen linear layer whose weight can be stored so. Subclasses are left alone: what they compute
    with their weights is not known."""
    if type(layer) not in _PACKED or any(parameter.requires_grad for parameter in layer.parameters(recurse=False)):
        return False
    return layer.weight.numel() % FORMS[form].multiple == 0


def pack(layer: nn.Module, form: str, weight: Tensor) -> None:
    """Let a layer that ``can_pack`` hold this weight, in place of its own."""
    parts = FORMS[form].pack(_outputs_first(layer, weight).float())
    del layer.weight
    layer.__class__ = _PACKED[type(layer)]
    layer.form = form
    for name, part in zip(_PARTS, parts, strict=False):
        layer.register_parameter(name, nn.Parameter(part, requires_grad=False))


def unpack_all(model: nn.Module) -> None:
    """Give every layer that was packed a weight in fp32 again, in place."""
    for layer in _packed_layers(model).values():
        weight = nn.Parameter(layer.weight.contiguous(), requires_grad=False)
        for name in _PARTS:
            layer._parameters.pop(name, None)
        layer.__class__ = next(plain for plain, packed in _PACKED.items() if type(layer) is packed)
        layer.register_parameter("weight", weight)


def _packed_layers(model: nn.Module) -> dict[str, nn.Module]:
    return {name: module for name, module in model.named_modules() if type(module) in _PACKED.values()}


def shapes(model: nn.Module) -> dict[str, torch.Size]:
    """The shapes of a model's parameters by name; a packed weight is one, with the shape that it has unpacked."""
    packed = _packed_layers(model)
    parts = {f"{name}.{part}" for name in packed for part in _PARTS}
    found = {name: parameter.shape for name, parameter in model.named_parameters() if name not in parts}
    return found | {f"{name}.weight": layer.weight_shape for name, layer in packed.items()}


def _outputs_first(layer: nn.Module, weight: Tensor) -> Tensor:
    return weight.t().contiguous() if isinstance(layer, Conv1D) else weight


class AsPacked(Mapping[str, Tensor]):
    """Weights by name, with those of some layers as they are after packing and unpacking.

    Args:
        layers: by the name of their weight; layers that ``can_pack``.
    """

    def __init__(self, weights: Mapping[str, Tensor], layers: Mapping[str, nn.Module], form: str) -> None:
        self._weights, self._layers, self._form = weights, layers, form

    def __getitem__(self, name: str) -> Tensor:
        weight = self._weights[name]
        if name not in self._layers:
            return weight
        layer = self._layers[name]
        given = _outputs_first(layer, weight).float()
        kept = _unpacked(self._form, given.shape, FORMS[self._form].pack(given), torch.float32)
        return _outputs_first(layer, kept)

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)
