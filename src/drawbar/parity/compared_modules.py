"""How far each module of a strategy that was found to differ is from the reference's."""

from dataclasses import dataclass

from drawbar.parity.comparison import (
    Differences,
    Distances,
    Limits,
    Reference,
    Worst,
    by_every_name,
    gradient_differences,
)
from drawbar.parity.divergence import Probe


@dataclass(frozen=True)
class ComparedModule:
    """The differences of one module. One is None where the module has no such value, or it could not be compared."""

    name: str
    """Empty for the model itself."""
    output: Worst | None = None
    """The difference of its output. This, ``gradient`` and ``parameter_gradients`` are from the step of few rows (see
    ``divergence``)."""
    gradient: Worst | None = None
    """That of the gradient of its output."""
    parameter_gradients: Worst | None = None
    """The worst difference of the gradients of its own parameters."""
    weights: Worst | None = None
    """The worst difference of its own parameters after the last step of the training."""


def compare_modules(probe: Probe, found: Distances, reference: Reference) -> list[ComparedModule]:
    """All modules, in the order in which the reference computes them.

    Args:
        found: how far the training of all steps is from the reference's.
    """
    known = by_every_name(probe.expected, probe.ties)
    complete = by_every_name(probe.found, probe.ties)
    gradients = gradient_differences({name: complete[name] for name in known if name in complete}, known)
    parameters = _by_module(gradients, probe.limits)
    weights = _by_module(found.weights, reference.tolerances.weights)
    names = [*probe.order["output"], *parameters, *weights]
    return [
        ComparedModule(
            name,
            probe.worst.get(("output", name)),
            probe.worst.get(("gradient", name)),
            parameters.get(name),
            weights.get(name),
        )
        for name in dict.fromkeys(names)
    ]


def _by_module(differences: Differences, limits: Limits) -> dict[str, Worst]:
    """The worst difference of each module's own parameters."""
    worst: dict[str, Worst] = {}
    for name, value in differences.items():
        module = name.rpartition(".")[0]
        worst[module] = Worst(value, limits.of(name), name).or_worse(worst.get(module))
    return worst
