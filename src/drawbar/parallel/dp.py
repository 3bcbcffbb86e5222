"""Replicas on all GPUs of one process, by torch's DataParallel."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from drawbar.parallel.precision import autocast


class DataParallel(nn.DataParallel):
    """torch's own, which computes in ``precision``.

    Replicas compute in threads, each with its own autocast state. torch passes on whether autocast is on, but not its
    dtype: without this class, bf16 would become fp16 in the threads, without a loss scaler.
    """

    def __init__(self, module: nn.Module, precision: str, device: torch.device) -> None:
        super().__init__(module)
        self._autocast = partial(autocast, precision, device)

    def parallel_apply(self, replicas: Sequence[Callable[..., Any]], inputs: Sequence[Any], kwargs: Any) -> list[Any]:
        return super().parallel_apply([self._in_precision(replica) for replica in replicas], inputs, kwargs)

    def _in_precision(self, replica: Callable[..., Any]) -> Callable[..., Any]:
        def compute(*args: Any, **kwargs: Any) -> Any:
            with self._autocast():
                return replica(*args, **kwargs)

        return compute
