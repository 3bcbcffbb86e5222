"""How far two trainings of the same steps are apart, in numbers that rounding does not inflate.

Everything is relative, and what it is relative to is chosen so that rounding passes and faults do not:

- *loss and gradient norm*: |a - b| / |b|, the worst step; where b is less than a thousandth of its largest value,
  relative to that thousandth.
- *gradients*: ‖a - b‖ / max(‖b‖, floor) for each parameter. Some gradients are zero on paper (those of the biases of
  keys, which softmax does not see), so that all that is computed is rounding. The floor is a hundredth of the norm that
  the parameter would have if all entries of the model's gradient were of one size. With a tolerance of 1e-4, a gradient
  a millionth of the usual size is still seen to be missing, or doubled.
- *weights*: ‖a - b‖ / ‖b‖ for each parameter, over the entries whose first gradient is known to within the tolerance.
  Adam makes a step of full size of a gradient of any size, of one that is nothing but rounding too: there the weights
  of two right trainings are two draws of a lottery. How well an entry's gradient is known is seen from the gradients
  of the two trainings: the root mean square of their difference, over the parameter.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

Tensors = Mapping[str, Tensor]

GRADIENT_FLOOR = 1e-2
"""Share of the usual size of a gradient below which differences are relative to this, and not to the gradient."""
SCALAR_FLOOR = 1e-3
"""The same for losses and gradient norms, as a share of the largest."""


@dataclass(frozen=True)
class Tolerances:
    """Largest relative differences that are no fault."""

    loss: float
    grad_norm: float
    gradients: float
    weights: float


TOLERANCES = {
    "fp32": Tolerances(loss=1e-5, grad_norm=1e-4, gradients=1e-4, weights=1e-4),
    "bf16": Tolerances(loss=5e-3, grad_norm=2e-2, gradients=0.2, weights=5e-2),
    "fp16": Tolerances(loss=5e-4, grad_norm=5e-3, gradients=5e-2, weights=1e-2),
}
"""By the precision of what is compared with fp32. Those of bf16 and fp16 are four times, or more, what models of two
layers show, under ddp as in one process."""


@dataclass(frozen=True)
class Note:
    """Something wrong that is no number."""

    name: str
    """The parameter that it concerns; empty for none."""
    text: str


@dataclass
class Trace:
    """What a training did. On rank 0; elsewhere the tensors are missing."""

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)
    """Steps that fp16 left out."""
    gradients: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    """By step: the whole gradients, before clipping."""
    weights: dict[str, Tensor] = field(default_factory=dict)
    """After the last step."""
    ties: list[list[str]] = field(default_factory=list)
    """Names of one and the same weight."""
    unequal: list[Note] = field(default_factory=list)
    """Where ranks should hold the same, and do not."""


@dataclass(frozen=True)
class Worst:
    """The largest difference, and where it is."""

    value: float = 0.0
    where: str = ""

    @staticmethod
    def of(differences: Iterable[tuple[float, str]]) -> "Worst":
        """The largest of ``(difference, where)``; what is no number is larger than all."""
        found = [(math.inf if math.isnan(value) else value, where) for value, where in differences]
        return Worst(*max(found, key=lambda item: item[0])) if found else Worst()


@dataclass(frozen=True)
class Comparison:
    """A training beside the reference."""

    loss: Worst
    grad_norm: Worst
    gradients: Worst
    weights: Worst
    left_out: float
    """Share of the weights' entries that are not compared."""
    notes: list[Note]

    def exceeded(self, tolerances: Tolerances) -> list[str]:
        """Which differences are too large."""
        limits = asdict(tolerances)
        return [name for name, limit in limits.items() if not getattr(self, name).value <= limit]

    def passes(self, tolerances: Tolerances) -> bool:
        return not self.exceeded(tolerances) and not self.notes

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def compare(trace: Trace, reference: Trace, tolerances: Tolerances) -> Comparison:
    """Both traces are of the same steps, from the same weights, on the same data."""
    notes = [*trace.unequal]
    if skipped := sorted(set(trace.skipped) ^ set(reference.skipped)):
        notes.append(Note("", f"fp16 overflowed: no update in step {', '.join(map(str, skipped))}"))
    worst = []
    for step in sorted(trace.gradients.keys() & reference.gradients.keys()):
        found, missing = match(trace.gradients[step], reference.gradients[step], reference.ties)
        notes += [note for note in missing if note not in notes]
        worst.append(compare_gradients(found, by_every_name(reference.gradients[step], reference.ties), f"step {step}"))
    weights, left_out, missing = compare_weights(trace, reference, tolerances.weights)
    return Comparison(
        loss=compare_numbers(trace.losses, reference.losses),
        grad_norm=compare_numbers(trace.grad_norms, reference.grad_norms),
        gradients=max(worst, key=lambda one: one.value, default=Worst()),
        weights=weights,
        left_out=left_out,
        notes=notes + missing,
    )


def compare_numbers(found: Sequence[float], expected: Sequence[float]) -> Worst:
    """One number a step."""
    floor = SCALAR_FLOOR * max((abs(value) for value in expected), default=0.0)
    pairs = zip(found, expected, strict=True)
    return Worst.of(
        (_ratio(abs(one - other), max(abs(other), floor)), f"step {step}") for step, (one, other) in enumerate(pairs, 1)
    )


def compare_gradients(found: Tensors, expected: Tensors, where: str) -> Worst:
    """Gradients of the same parameters: those of one step; see the top of this file."""
    worst = Worst.of(gradient_differences(found, expected).items_by_size())
    return Worst(worst.value, f"{worst.where}, {where}") if worst.where else worst


class Differences(dict[str, float]):
    """Relative difference by parameter."""

    def items_by_size(self) -> list[tuple[float, str]]:
        """``(difference, name)``, the largest first."""
        items = [(math.inf if math.isnan(value) else value, name) for name, value in self.items()]
        return sorted(items, key=lambda item: -item[0])


def gradient_differences(found: Tensors, expected: Tensors) -> Differences:
    """Of the parameters that both have."""
    usual = usual_size(expected)
    return Differences(
        (name, difference(found[name], gradient, GRADIENT_FLOOR * usual * math.sqrt(gradient.numel())))
        for name, gradient in expected.items()
        if name in found
    )


def usual_size(gradients: Tensors) -> float:
    """Root mean square of the entries of a whole gradient; a tied weight counts once."""
    once = {id(gradient): gradient for gradient in gradients.values()}.values()
    count = sum(gradient.numel() for gradient in once)
    return math.sqrt(sum(norm(gradient) ** 2 for gradient in once) / count) if count else 0.0


def norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64))


def difference(found: Tensor, expected: Tensor, floor: float = 0.0) -> float:
    """‖found - expected‖ / max(‖expected‖, floor); infinite for another shape."""
    if found.shape != expected.shape:
        return math.inf
    return _ratio(norm(found.float() - expected.float()), max(norm(expected), floor))


def _ratio(distance: float, size: float) -> float:
    if distance == 0:
        return 0.0
    return distance / size if size else math.inf


def compare_weights(trace: Trace, reference: Trace, tolerance: float) -> tuple[Worst, float, list[Note]]:
    """The worst parameter, the share of all entries that rounding keeps from being compared, and what is missing."""
    found, notes = match(trace.weights, reference.weights, reference.ties)
    first = min(reference.gradients, default=0)
    gradients = by_every_name(reference.gradients.get(first, {}), reference.ties)
    others, _ = match(trace.gradients.get(first, {}), reference.gradients.get(first, {}), reference.ties)
    left_out = total = 0
    differences = []
    for name, expected in reference.weights.items():
        total += expected.numel()
        if name not in found:
            continue
        one, other = found[name], expected
        if name in gradients and name in others and one.shape == other.shape == others[name].shape:
            known = known_entries(others[name], gradients[name], tolerance)
            left_out += expected.numel() - int(known.sum())
            one, other = one[known], other[known]
        differences.append((difference(one, other), name))
    return Worst.of(differences), left_out / total if total else 0.0, notes


def known_entries(found: Tensor, expected: Tensor, tolerance: float) -> Tensor:
    """Where a gradient is known to within the tolerance: the size of the difference is that share of it, or less.

    An entry that is exactly zero in both is known, too: no token led there.
    """
    untouched = (found == 0) & (expected == 0)
    touched = max(1, int((~untouched).sum()))
    error = norm(found.float() - expected.float()) / math.sqrt(touched)
    return untouched | (expected.abs() * tolerance >= error)


def by_every_name(tensors: Tensors, ties: Iterable[Sequence[str]]) -> dict[str, Tensor]:
    """The tensors with a tied one under each of its names."""
    complete = dict(tensors)
    for names in ties:
        present = [name for name in names if name in tensors]
        for name in names if present else []:
            complete.setdefault(name, tensors[present[0]])
    return complete


def match(found: Tensors, expected: Tensors, ties: Sequence[Sequence[str]]) -> tuple[dict[str, Tensor], list[Note]]:
    """What was found, under the names of the reference, and notes on what one has and the other has not.

    A tied weight may come under any of its names, or under several, whose values must then be equal to the reference's.
    """
    known = by_every_name(expected, ties)
    complete = by_every_name(found, ties)
    notes = [Note(name, f"{name} is missing") for name in expected if name not in complete]
    notes += [Note(name, f"{name} is there, and is not in one process") for name in found if name not in known]
    tied = {name for names in ties for name in names}
    wanted = {name for name in known if name in expected or (name in tied and name in found)}
    return {name: complete[name] for name in wanted if name in complete}, notes
