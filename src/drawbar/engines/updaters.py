"""``TorchUpdater``: updates with torch's optimizers, for plain or sharded parameters, or with partitioned state
(ZeRO-1)."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from drawbar.engines.parts import Update
from drawbar.optim.schedules import set_learning_rate
from drawbar.parallel.gradients import clip_factor, reduce_partial_grads, scale_, squared_norm
from drawbar.parallel.pipeline.schedule import add_up_tied
from drawbar.parallel.precision import LossScaler

SquaredNorm = Callable[[list[nn.Parameter], torch.device], torch.Tensor]
"""(parameters with a gradient, device) → the sum of squares of the full model's gradient (0-d). With pipeline stages,
it first sums the gradients of a tied weight, in place."""


class TorchUpdater:
    """Clips the global norm once, then steps torch's optimizers.

    Args:
        module: this rank's part of the model.
        optimizers: the optimizers of its trained parameters.
        scaler: the loss scaler.
        clip: maximum global norm; None disables clipping.
        squared_norm: computes the global sum of squares, including other ranks' shards.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizers: list[Optimizer],
        scaler: LossScaler,
        device: torch.device,
        clip: float | None,
        squared_norm: SquaredNorm,
    ) -> None:
        self.module = module
        self.optimizers = optimizers
        self.scaler = scaler
        self.device = device
        self.clip = clip
        self.squared_norm = squared_norm

    @property
    def loss_scale(self) -> float:
        return self.scaler.scale

    def step(self, lr: float, before_update: Callable[[torch.Tensor], bool]) -> Update:
        set_learning_rate(self.optimizers, lr)
        parameters = [parameter for parameter in self.module.parameters() if parameter.grad is not None]
        reduce_partial_grads(parameters)
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        grad_norm = (self.squared_norm(parameters, self.device).sqrt() / self.scaler.scale).float()
        # decided from the global norm, as either all optimizers on all ranks must skip the update, or none
        overflowed = self.scaler.enabled and not bool(torch.isfinite(grad_norm))
        rejected = not overflowed and not before_update(grad_norm)
        if not overflowed and not rejected:
            if self.clip is not None or self.scaler.enabled:
                factor = clip_factor(grad_norm, self.clip) if self.clip is not None else 1.0
                scale_(gradients, factor / self.scaler.scale)
            for optimizer in self.optimizers:
                optimizer.step()
        self.scaler.update(overflowed)
        self.zero_grad()
        return Update(grad_norm, overflowed, rejected)

    def zero_grad(self) -> None:
        """Free the gradients."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def scaler_state(self) -> dict[str, float]:
        return self.scaler.state_dict()

    def load_scaler_state(self, state: dict[str, float]) -> None:
        self.scaler.load_state_dict(state)

    def close(self) -> None:
        self.optimizers.clear()


def model_squared_norm(parameters: list[nn.Parameter], device: torch.device) -> torch.Tensor:
    """``SquaredNorm`` of a model without stages."""
    return squared_norm([p.grad for p in parameters if p.grad is not None], device)


class StagesSquaredNorm:
    """``SquaredNorm`` over all stages. It first sums the gradients of the two copies of a tied weight, in place, so
    that both receive the same update; they count once.

    Args:
        group: the ranks that hold the model's stages, in stage order.
        tied: this rank's copy of the weight that first and last stage share; None on other ranks.
    """

    def __init__(self, group: dist.ProcessGroup, tied: nn.Parameter | None) -> None:
        self.group = group
        self.tied = tied

    def __call__(self, parameters: list[nn.Parameter], device: torch.device) -> torch.Tensor:
        rank, last = self.group.rank(), self.group.size() - 1
        counted = parameters
        if self.tied is not None and self.tied.grad is not None:
            gradient = self.tied.grad
            local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            add_up_tied(local, last - rank, self.group)
            if rank == last:
                counted = [parameter for parameter in parameters if parameter is not self.tied]
        total = model_squared_norm(counted, device)
        dist.all_reduce(total, group=self.group)
        return total
