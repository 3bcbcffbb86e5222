"""Muon, with the dtype of its iteration as an argument: torch's always computes it in bf16, which a processor
without bf16 instructions does at a fortieth of its speed in fp32."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5
"""Of the iteration, with its coefficients: https://kellerjordan.github.io/posts/muon/, as in ``torch.optim.Muon``."""
EPS = 1e-7


class Muon(Optimizer):
    """Momentum, whose every update is made orthogonal (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/).

    Each update is scaled by ``0.2 * sqrt(max(rows, columns))``, so that it has the size of AdamW's: then one learning
    rate and one weight decay suit both (https://arxiv.org/abs/2502.16982, section 2.2). With ``dtype=torch.bfloat16``
    it computes what ``torch.optim.Muon(adjust_lr_fn="match_rms_adamw")`` computes, bit by bit.

    Args:
        params: matrices, or groups of them.
        dtype: of the iteration; momentum and weights keep theirs.
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
    """The orthogonal matrix nearest to ``matrix`` (rows, columns), roughly: its singular values come to 0.7 to 1.2.

    Five Newton–Schulz steps (source: see ``STEPS``), in the dtype of ``matrix``.
    """
    a, b, c = COEFFICIENTS
    tall = matrix.size(0) > matrix.size(1)
    x = matrix.T if tall else matrix
    x = x / x.norm().clamp(min=EPS)  # the largest singular value is now 1 at most
    for _ in range(STEPS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x
