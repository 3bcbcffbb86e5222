"""How far two trainings of the same steps are apart, in numbers that rounding does not inflate.

Everything is relative, and what it is relative to is chosen so that rounding passes and faults do not:

- *loss and gradient norm*: |a - b| / |b|, the worst step; where b is less than a thousandth of its largest value,
  relative to that thousandth.
- *gradients*: ‖a - b‖ / max(‖b‖, floor) for each parameter. Some gradients are zero on paper (those of the biases of
  keys, which softmax does not see), so that all that is computed is rounding. The floor is a hundredth of the norm that
  the gradient would have if all entries of the model's gradient had the same size. With a tolerance of 1e-4, a gradient
  a millionth of the usual size is still seen to be missing, or doubled.
- *weights*: ‖a - b‖ / ‖b‖ for each parameter, of the entries whose gradient in the first trained step is well known
  (``Tolerances.max_gradient_error``). In a lower precision, one process repeats the strategy's last step from the state
  before it: for the weights, that is the first trained step.
  Adam's step has full size whatever the size of the gradient, even of one that is all rounding: there the updates
  of two correct trainings are unrelated. The error of a gradient's entry is taken to be the root mean square of
  the difference between the gradients of the two trainings, of all entries of the parameter (``known_entries``).

For fp32, the tolerances are fixed. In a lower precision they are measured (``noises``), on the machine at hand, as the
effect of rounding depends on the model, its weights and the processor's kernels. One process makes the step several
times in that precision, and every module rounds its outputs once more, each time by
other random numbers (Monte Carlo arithmetic: Parker 1997; for training: TTrace, Jiang et al. 2025, arXiv:2506.09280).
Autograd multiplies the gradients that flow back by the same random factors. So whatever a strategy rounds otherwise
(sums in another order, parts of sums, states between blocks) is covered. The largest difference of these steps from
fp32, times ``MARGIN``, is the tolerance for a strategy.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from drawbar.engines.results import EngineState
from drawbar.runtime.safetensors_reader import DTYPES
from drawbar.runtime.torch_internals import tree_map

Tensors = Mapping[str, Tensor]
Differences = dict[str, float]
"""Relative differences: by step, by parameter, by parameter and step (``at_step(name, step)``), or by module."""
KINDS = ("loss", "grad_norm", "gradients", "weights")
"""What is compared."""

GRADIENT_FLOOR = 1e-2
"""Share of the usual size of a gradient below which differences are relative to that share, not to the gradient."""
SCALAR_FLOOR = 1e-3
"""The same for losses and gradient norms, as a share of the largest."""


@dataclass(frozen=True)
class Limits:
    """Largest differences of one kind that are not faults."""

    base: float
    """The limit everywhere; ``at`` can only raise it."""
    at: Mapping[str, float] = field(default_factory=dict)
    """Limits, by the keys of the differences; ``base`` for those that are not in it."""

    def of(self, where: str) -> float:
        return max(self.base, self.at.get(where, 0.0))


@dataclass(frozen=True)
class Tolerances:
    """Largest relative differences that are not faults."""

    loss: Limits
    grad_norm: Limits
    gradients: Limits
    weights: Limits
    max_gradient_error: float
    """A weight entry is compared only if the relative rounding error of its gradient is at most this."""


FP32_TOLERANCES = Tolerances(Limits(1e-5), Limits(1e-4), Limits(1e-4), Limits(1e-4), max_gradient_error=1e-4)
"""For fp32 against fp32."""


@dataclass(frozen=True)
class Fault:
    """What is wrong, in words: a tensor is missing, replicas are not equal, a gradient is zero."""

    name: str
    """The parameter that it concerns; empty for none."""
    text: str


@dataclass(frozen=True)
class StepStart:
    """The state from which a training continues."""

    step: int
    engine: EngineState
    data: dict[str, Any]
    """The loader's state."""


@dataclass
class Trace:
    """The record of a training. Complete on rank 0; elsewhere without tensors."""

    losses: dict[int, float] = field(default_factory=dict)
    """By step."""
    grad_norms: dict[int, float] = field(default_factory=dict)
    skipped: list[int] = field(default_factory=list)
    """Steps that fp16 skipped."""
    gradients: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    """By step, only of the first and the last one: the whole gradients, before clipping."""
    weights: dict[str, Tensor] = field(default_factory=dict)
    """After the last step."""
    first_trained_step: int = 1
    """The first step of this training: 1, or the one after the ``StepStart`` that it continues from."""
    ties: list[list[str]] = field(default_factory=list)
    """Names of one and the same weight."""
    unequal: list[Fault] = field(default_factory=list)
    """Where ranks should hold the same, and do not."""
    before_last: StepStart | None = None
    """Only in a lower precision: the state before the last step (None if there is one step)."""


@dataclass(frozen=True)
class Reference:
    """The training that others are compared with, and the tolerances."""

    trace: Trace
    """Of one process, in fp32."""
    tolerances: Tolerances
    """For the precision of what is compared."""


@dataclass(frozen=True)
class Worst:
    """The difference with the largest ratio to its limit, and where it is."""

    value: float
    limit: float
    where: str = ""

    @staticmethod
    def of(differences: Differences, limits: Limits) -> "Worst":
        found = [Worst(value, limits.of(where), where) for where, value in differences.items()]
        return max(found, key=lambda one: one.ratio, default=Worst(0.0, limits.base))

    @property
    def ratio(self) -> float:
        return self.value / self.limit

    def or_worse(self, other: "Worst | None") -> "Worst":
        """The one of the two with the larger ratio."""
        return other if other is not None and other.ratio > self.ratio else self

    @property
    def exceeds(self) -> bool:
        return self.value > self.limit


@dataclass
class Distances:
    """How far a training is from the reference, everywhere: by step, or by parameter."""

    loss: Differences
    grad_norm: Differences
    gradients: Differences
    """By parameter and step: see ``at_step``."""
    weights: Differences
    left_out: float
    """Share of the weights' entries that are not compared."""
    faults: list[Fault]


@dataclass(frozen=True)
class Comparison:
    """The largest distances of a training from the reference, beside what is allowed."""

    loss: Worst
    grad_norm: Worst
    gradients: Worst
    weights: Worst
    left_out: float
    faults: list[Fault]

    @staticmethod
    def of(distances: Distances, tolerances: Tolerances) -> "Comparison":
        worst = {kind: Worst.of(getattr(distances, kind), getattr(tolerances, kind)) for kind in KINDS}
        return Comparison(**worst, left_out=distances.left_out, faults=distances.faults)

    def exceeded(self) -> dict[str, Worst]:
        """Which differences are too large."""
        return {kind: worst for kind in KINDS if (worst := getattr(self, kind)).exceeds}

    @property
    def passes(self) -> bool:
        return not self.exceeded() and not self.faults


def distances(trace: Trace, reference: Trace, max_gradient_error: float) -> Distances:
    """All differences of two traces of the same steps, from the same weights, on the same data, without limits.

    Args:
        max_gradient_error: see :class:`Tolerances`.
    """
    faults = [*trace.unequal]
    if skipped := sorted(set(trace.skipped) ^ set(reference.skipped)):
        faults.append(Fault("", f"fp16 overflowed: no update in step {', '.join(map(str, skipped))}"))
    gradients: Differences = {}
    for step in sorted(trace.gradients.keys() & reference.gradients.keys()):
        expected = reference.gradients[step]
        found, missing = match(trace.gradients[step], expected, reference.ties)
        faults += [fault for fault in missing if fault not in faults]
        apart = gradient_differences(found, by_every_name(expected, reference.ties))
        gradients |= {at_step(name, step): value for name, value in apart.items()}
    weights, left_out, missing = weight_differences(trace, reference, max_gradient_error)
    return Distances(
        loss=number_differences(trace.losses, reference.losses),
        grad_norm=number_differences(trace.grad_norms, reference.grad_norms),
        gradients=gradients,
        weights=weights,
        left_out=left_out,
        faults=faults + missing,
    )


def at_step(name: str, step: int) -> str:
    """Key of a parameter's gradient at a step, in ``Distances.gradients`` and its limits; messages show it."""
    return f"{name}, step {step}"


def number_differences(found: Mapping[int, float], expected: Mapping[int, float]) -> Differences:
    """Relative differences of one number a step (loss, gradient norm), for the steps in ``expected``."""
    floor = SCALAR_FLOOR * max((abs(value) for value in expected.values()), default=0.0)
    return {
        f"step {step}": _ratio(abs(found[step] - other), max(abs(other), floor)) for step, other in expected.items()
    }


def gradient_differences(found: Tensors, expected: Tensors) -> Differences:
    """Relative differences of one step's gradients, by parameter that both have; see the top of this file."""
    usual = usual_size(expected)
    return {
        name: difference(found[name], gradient, GRADIENT_FLOOR * usual * math.sqrt(gradient.numel()))
        for name, gradient in expected.items()
        if name in found
    }


def usual_size(gradients: Tensors) -> float:
    """Root mean square of the entries of a whole gradient; a tied weight counts once."""
    once = {id(gradient): gradient for gradient in gradients.values()}.values()
    count = sum(gradient.numel() for gradient in once)
    return math.sqrt(sum(norm(gradient) ** 2 for gradient in once) / count) if count else 0.0


def norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor.double()))  # a buffer may be of whole numbers


def difference(found: Tensor, expected: Tensor, floor: float = 0.0) -> float:
    """‖found - expected‖ / max(‖expected‖, floor); infinite for another shape."""
    if found.shape != expected.shape:
        return math.inf
    return _ratio(norm(found.float() - expected.float()), max(norm(expected), floor))


def _ratio(distance: float, size: float) -> float:
    """NaN counts as infinite, so that it exceeds every limit."""
    if distance == 0:
        return 0.0
    return distance / size if size and not math.isnan(distance / size) else math.inf


def weight_differences(
    trace: Trace, reference: Trace, max_gradient_error: float
) -> tuple[Differences, float, list[Fault]]:
    """Relative differences by parameter (left out where no entry of it is compared), the share of all entries that are
    not compared, and faults on missing ones."""
    found, faults = match(trace.weights, reference.weights, reference.ties)
    first = reference.first_trained_step
    gradients = by_every_name(reference.gradients.get(first, {}), reference.ties)
    others, _ = match(trace.gradients.get(first, {}), reference.gradients.get(first, {}), reference.ties)
    left_out = total = 0
    differences: Differences = {}
    for name, expected in reference.weights.items():
        total += expected.numel()
        if name not in found:
            continue
        one, other = found[name], expected
        if name in gradients and name in others and one.shape == other.shape == others[name].shape:
            compared = known_entries(others[name], gradients[name], max_gradient_error)
            left_out += expected.numel() - int(compared.sum())
            if one.numel() and not compared.any():
                continue
            one, other = one[compared], other[compared]
        differences[name] = difference(one, other)
    return differences, left_out / total if total else 0.0, faults


def known_entries(found: Tensor, expected: Tensor, tolerance: float) -> Tensor:
    """Mask of the entries at least 1 / ``tolerance`` times as large as the error: the RMS of the two's difference.

    An entry that is exactly zero in both is known, too: no token used it. But if the parameter has other entries, and
    none of these is known, its zeros are not either: the whole gradient is then rounding.
    """
    untouched = (found == 0) & (expected == 0)
    touched = int((~untouched).sum())
    error = norm(found.float() - expected.float()) / math.sqrt(max(1, touched))
    known = ~untouched & (expected.abs() * tolerance >= error)
    return known if touched and not known.any() else known | untouched


def by_every_name(tensors: Tensors, ties: Iterable[Sequence[str]]) -> dict[str, Tensor]:
    """The tensors with a tied one under each of its names."""
    complete = dict(tensors)
    for names in ties:
        present = [name for name in names if name in tensors]
        for name in names if present else []:
            complete.setdefault(name, tensors[present[0]])
    return complete


def match(found: Tensors, expected: Tensors, ties: Sequence[Sequence[str]]) -> tuple[dict[str, Tensor], list[Fault]]:
    """What was found, under the names of the reference, and faults on what one has and the other has not.

    A tied weight may come under any of its names, or under several, whose values must then be equal to the reference's.
    """
    known = by_every_name(expected, ties)
    complete = by_every_name(found, ties)
    faults = [Fault(name, f"{name} is missing") for name in expected if name not in complete]
    faults += [Fault(name, f"{name} is there, and is not in one process") for name in found if name not in known]
    tied = {name for names in ties for name in names}
    wanted = {name for name in known if name in expected or (name in tied and name in found)}
    return {name: complete[name] for name in wanted if name in complete}, faults


DRAWS = 8
"""How often the step is made and measured, each time with other noise."""
MARGIN = 5.0
"""Tolerance, as a multiple of the largest difference that was measured."""
LARGEST = 0.9
"""Upper bound of every limit: a tensor that is missing, or counted twice, differs by 1 and must always fail."""


@dataclass(frozen=True)
class Noise:
    """Adds a rounding to the outputs of a model's modules."""

    precision: str
    seed: int

    def add_to(self, model: nn.Module) -> None:
        """Add a rounding to the outputs of all modules, in every forward from now on."""
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
    """The limit for a difference that was measured to come from rounding alone."""
    return min(MARGIN * value, LARGEST)
