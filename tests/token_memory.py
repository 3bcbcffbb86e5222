"""A device's memory that holds a number of tokens: what a CPU stands in for a GPU with."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from drawbar.train.memory_probe import USABLE_SHARE

MIB = 2**20
"""Of a token: more than all else that a tiny model needs."""


class TokenMemory:
    """``DeviceMemory`` in which the forward of a model takes ``MIB`` for each of its tokens.

    Args:
        tokens: how many fit.
    """

    def __init__(self, tokens: int, name: str = "a device") -> None:
        self.name = name
        self.trials: list[int] = []
        """Tokens of the largest forward in each trial."""
        self._tokens = tokens
        self._peak = 0

    def reset(self) -> None:
        self._peak = 0

    def allocated(self) -> int:
        self.trials.append(self._peak)
        return 0

    def peak(self) -> int:
        return self._peak * MIB

    def limit(self) -> int:
        return int((self._tokens + 1) * MIB / USABLE_SHARE)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count the tokens of all models."""
        handle = register_module_forward_pre_hook(self._count)
        try:
            yield
        finally:
            handle.remove()

    def _count(self, module: nn.Module, inputs: Any) -> None:
        if isinstance(module, nn.Embedding) and isinstance(inputs[0], torch.Tensor):
            self._peak = max(self._peak, inputs[0].numel())
