"""Noise on the embeddings of training texts (NEFTune, Jain et al. 2023, arXiv:2310.05914).

A token's noise is a pure function of a key of its own, by a counter-based generator. So neither what shares its batch
nor the number of processes nor a restart changes it.

B: rows, L: tokens in a row, H: hidden size.
"""

from typing import Any

import torch
from torch import Tensor, nn

KEYS, SCALES = "noise_keys", "noise_scales"
"""Fields of a batch, (B, L): a random integer for each token, and the largest size of its noise times the root of H."""
_GOLDEN, _FIRST, _SECOND = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15
"""The constants of SplitMix64 (Steele et al. 2014), as signed integers."""


def noise(keys_BL: Tensor, scales_BL: Tensor, hidden: int) -> Tensor:
    """Uniform noise, (B, L, H) in fp32, of at most ``scales_BL / sqrt(hidden)``."""
    counters_H = torch.arange(1, hidden + 1, device=keys_BL.device)
    mixed = keys_BL[..., None] + counters_H * _GOLDEN
    mixed = (mixed ^ _shifted(mixed, 30)) * _FIRST
    mixed = (mixed ^ _shifted(mixed, 27)) * _SECOND
    shares = _shifted(mixed ^ _shifted(mixed, 31), 40).float() * 2.0**-23 - 1.0
    return shares * (scales_BL[..., None] / hidden**0.5)


def _shifted(values: Tensor, bits: int) -> Tensor:
    """Shifted right as unsigned integers."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def add_noise_to_embeddings(model: Any) -> None:
    """Let a transformers model, called with ``noise_keys`` and ``noise_scales`` while it trains, add their noise to
    what its input embeddings give."""
    given: list[tuple[Tensor, Tensor]] = []

    def take(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        given.clear()
        kept = {name: value for name, value in kwargs.items() if name not in (KEYS, SCALES)}
        if module.training and KEYS in kwargs:
            given.append((kwargs[KEYS], kwargs[SCALES]))
        return args, kept

    def add(module: nn.Module, args: Any, embedded_BLH: Tensor) -> Tensor:
        if not given:
            return embedded_BLH
        return embedded_BLH + noise(*given[0], embedded_BLH.shape[-1]).to(embedded_BLH.dtype)

    def forget(module: nn.Module, args: Any, outputs: Any) -> None:
        given.clear()

    model.register_forward_pre_hook(take, with_kwargs=True)
    model.get_input_embeddings().register_forward_hook(add)
    model.register_forward_hook(forget, always_call=True)
