"""Measures the effect of rounding on a step in low precision, on the machine at hand, as it depends on the model, its
weights and the processor's kernels.

One process makes the step several times in that precision, and every module rounds its outputs once more, each time by
other random numbers (Monte Carlo arithmetic: Parker 1997; for training: TTrace, Jiang et al. 2025, arXiv:2506.09280).
Autograd multiplies the gradients that flow back by the same random factors. So whatever a strategy rounds otherwise
(sums in another order, parts of sums, states between blocks) is covered. The largest difference of these steps from
fp32, times ``MARGIN``, is the tolerance for a strategy.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from drawbar.parity.comparison import FP32_TOLERANCES, Differences, Distances, Limits, Tolerances
from drawbar.runtime.torch_internals import tree_map
from drawbar.util.dtypes import DTYPES

DRAWS = 8
"""How often the step is made and measured, each time with other noise."""
MARGIN = 5.0
"""Tolerance, as a multiple of the largest difference that was measured."""
LARGEST = 0.9
"""Upper bound of every limit: a tensor that is missing, or counted twice, differs by 1 and must always fail."""


@dataclass(frozen=True)
class Noise:
    """Rounds what flows through a model once more."""

    precision: str
    seed: int

    def add_to(self, model: nn.Module) -> None:
        """Round the outputs of all modules once more, in every forward from now on."""
        unit = torch.finfo(DTYPES[self.precision]).eps / 2
        generators: dict[torch.device, torch.Generator] = {}  # not torch's own, from which the model draws

        def rounded(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
                return leaf
            if leaf.device not in generators:
                generators[leaf.device] = torch.Generator(leaf.device).manual_seed(self.seed)
            change = torch.empty(leaf.shape, device=leaf.device)
            change.uniform_(-unit, unit, generator=generators[leaf.device])
            return (leaf * (1 + change)).to(leaf.dtype)

        def after(module: nn.Module, args: Any, output: Any) -> Any:
            return tree_map(rounded, output)

        for module in model.modules():
            module.register_forward_hook(after)


def noises(precision: str) -> Sequence[Noise]:
    """The noises to measure with, one for each seed; none for fp32."""
    return [Noise(precision, seed) for seed in range(DRAWS)] if precision != "fp32" else []


def allowed_gradient_error(precision: str) -> float:
    """``Tolerances.max_gradient_error``: a gradient counts as known if all but its last three bits are right."""
    return 8 * torch.finfo(DTYPES[precision]).eps if precision != "fp32" else FP32_TOLERANCES.max_gradient_error


def tolerances(precision: str, tried: Sequence[Distances]) -> Tolerances:
    """The tolerances for a precision, from the distances of a step that was made with each of its ``noises``."""
    anywhere = {
        kind: max(
            [
                getattr(FP32_TOLERANCES, kind).base,
                *(limit_for(value) for one in tried for value in getattr(one, kind).values()),
            ]
        )
        for kind in ("loss", "grad_norm")
    }
    return Tolerances(
        loss=Limits(anywhere["loss"]),
        grad_norm=Limits(anywhere["grad_norm"]),
        gradients=limits(FP32_TOLERANCES.gradients, [one.gradients for one in tried]),
        weights=limits(FP32_TOLERANCES.weights, [one.weights for one in tried]),
        max_gradient_error=allowed_gradient_error(precision),
    )


def limits(fp32: Limits, tried: Sequence[Differences]) -> Limits:
    """The limit for each place (parameter, module or step) where a difference was measured; elsewhere that of fp32."""
    at: dict[str, float] = {}
    for differences in tried:
        for where, value in differences.items():
            at[where] = max(at.get(where, 0.0), limit_for(value))
    return Limits(fp32.base, at)


def limit_for(value: float) -> float:
    """The limit for a difference that rounding alone was measured to cause."""
    return min(MARGIN * value, LARGEST)
