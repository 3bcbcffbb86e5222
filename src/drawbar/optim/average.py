"""``WeightAverage``: an exponential moving average of the trained weights, to evaluate and to use in their place.

It is an optimizer whose state is the average: so checkpoints, resharding, resuming and the forecast of memory treat it
as they treat moments.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from drawbar.checkpoint.format import EMA


class WeightAverage(Optimizer):
    """``average = decay * average + (1 - decay) * weight`` in each step, after the weights are updated; it begins with
    the weights after the first step (Polyak and Juditsky 1992; with a decay as in Tarvainen and Valpola 2017,
    arXiv:1703.01780).

    Args:
        groups: as for any optimizer of torch.
    """

    def __init__(self, groups: list[dict[str, Any]], decay: float) -> None:
        super().__init__(groups, {"decay": decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if state:
                    _local(state[EMA]).lerp_(_local(parameter), 1.0 - group["decay"])
                else:
                    state[EMA] = parameter.detach().clone()

    @contextmanager
    def in_place_of_weights(self) -> Iterator[None]:
        """Context manager in which the weights are the averages, on this rank."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for parameter, state in self.state.items():
            weight, average = _local(parameter), _local(state[EMA])
            kept = weight.clone()
            weight.copy_(average)
            average.copy_(kept)


def _local(tensor: Tensor | nn.Parameter) -> Tensor:
    """This rank's shard."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
