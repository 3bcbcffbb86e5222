"""Muon with a configurable dtype of its iteration: torch's version always uses bf16, which is 40 times slower than fp32
on a processor without bf16 instructions."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5
"""Number of iterations; with their coefficients as in ``torch.optim.Muon``:
https://kellerjordan.github.io/posts/muon/."""
EPS = 1e-7


class Muon(Optimizer):
    """Momentum with orthogonalized updates (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/).

    Each update is scaled by ``0.2 * sqrt(max(rows, columns))`` to match the size of AdamW's updates, so that one
    learning rate and weight decay suit both (https://arxiv.org/abs/2502.16982, section 2.2). With
    ``dtype=torch.bfloat16``, results are bitwise those of ``torch.optim.Muon(adjust_lr_fn="match_rms_adamw")``.

    Args:
        params: matrices, or groups of them.
        dtype: dtype of the iteration; momentum and weights keep theirs.
    """

    def __init__(self, params: Any, lr: float, momentum: float, dtype: torch.dtype, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "dtype": dtype, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)

    def _update(self, parameter: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(grad, memory_format=torch.preserve_format)
        average = state["momentum_buffer"].lerp_(grad, 1 - group["momentum"])
        nesterov = grad.lerp(average, group["momentum"])
        update = orthogonalize(nesterov.to(group["dtype"]))
        size = 0.2 * math.sqrt(max(parameter.shape))
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(update, alpha=-group["lr"] * size)


def orthogonalize(matrix: Tensor) -> Tensor:
    """Approximately the orthogonal matrix nearest to ``matrix`` (rows, columns): its singular values are 0.7 to 1.2.

    Five Newton–Schulz steps (source: see ``STEPS``), in the dtype of ``matrix``.
    """
    a, b, c = COEFFICIENTS
    tall = matrix.size(0) > matrix.size(1)
    x = matrix.T if tall else matrix
    x = x / x.norm().clamp(min=EPS)  # the largest singular value is now at most 1
    for _ in range(STEPS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x
