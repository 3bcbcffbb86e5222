"""Diagnoses a strategy that differs from the reference: names the module to look at first."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from drawbar.parity.comparison import (
    Comparison,
    Fault,
    Limits,
    Reference,
    Trace,
    Worst,
    at_step,
    by_every_name,
    gradient_differences,
    norm,
)
from drawbar.parity.divergence import ModuleDifference, Probe, Tensors


@dataclass(frozen=True)
class Diagnosis:
    """The diagnosis of a strategy that differs, for the report."""

    module: str
    """The first module that differs; empty where no single one does."""
    text: str


def diagnose(probe: Probe, comparison: Comparison, trace: Trace, reference: Reference) -> Diagnosis:
    """Name the module to look at first, from all measurements."""
    for kind in ("output", "gradient"):
        mismatch = _first_mismatch(probe, kind)
        if mismatch is not None:
            by = f"by {mismatch.value:.1e}, on rank {mismatch.rank}"
            if kind == "output":
                return Diagnosis(
                    mismatch.module,
                    f"outputs diverge first at {_display_name(mismatch.module)} ({by})"
                    + _describe_shards(probe, mismatch),
                )
            text = "all outputs are equal; going backward, gradients diverge first at the output of"
            return Diagnosis(mismatch.module, f"{text} {_display_name(mismatch.module)} ({by})")
    uneven = _uneven_loss(probe.gradient_factors)
    if uneven is not None:
        return Diagnosis("", uneven)
    expected_trace = reference.trace
    first = min(trace.gradients.keys() & expected_trace.gradients.keys(), default=0)
    allowed = reference.tolerances.gradients
    limits = Limits(allowed.base, {name: allowed.of(at_step(name, first)) for name in expected_trace.weights})
    few_rows = (probe.found, probe.expected, probe.ties, probe.limits)
    first_gradients = trace.gradients.get(first, {}), expected_trace.gradients.get(first, {})
    for found, expected, ties, at_most in [few_rows, (*first_gradients, expected_trace.ties, limits)]:
        wrong = _wrong_parameter(found, expected, ties, at_most)
        if wrong is not None:
            text = f"outputs and their gradients are equal, but the gradient of {wrong.name} is not: {wrong.text}"
            return Diagnosis(_module(wrong.name), text)
    named = next((fault for fault in comparison.faults if fault.name), None)
    if named is not None:
        return Diagnosis(_module(named.name), named.text)
    if "weights" in comparison.exceeded():  # gradients of later steps then differ for that reason alone
        name = comparison.weights.where
        return Diagnosis(_module(name), f"the first gradients are equal, but {name} is not, after the updates")
    if "gradients" in comparison.exceeded():
        name = comparison.gradients.where
        return Diagnosis(
            _module(name.partition(",")[0]), f"the first step is equal; later, the gradient of {name}, is not"
        )
    return Diagnosis("", "a step of few rows from the first weights is equal: other rows or later steps diverge")


def _uneven_loss(factors: Mapping[int, float]) -> str | None:
    """Text that names the rank which scales its loss otherwise than the first one; None where all do alike."""
    first = next(iter(factors), 0)
    for rank, factor in factors.items():
        if not math.isclose(factor, factors[first], rel_tol=1e-3):
            return (
                f"outputs are equal, but rank {rank} scales its loss, and so its gradients, by "
                f"{factor / factors[first]:.4g} times what rank {first} does: loss or num_targets depend on the rank"
            )
    return None


def _first_mismatch(probe: Probe, kind: str) -> ModuleDifference | None:
    """The first difference in the order of the reference. A shard that equals no slice of the full output may be
    sharded in an unknown way: it counts only if the full output of its nearest enclosing module differs, too."""
    places = {module: place for place, module in enumerate(probe.order[kind])}
    mismatches = sorted(
        (e for e in probe.mismatches if e.kind == kind), key=lambda e: (places.get(e.module, -1), e.rank)
    )
    differing = {mismatch.module for mismatch in mismatches if mismatch.whole}
    for mismatch in mismatches:
        around = mismatch.module
        while around and (kind, around) not in probe.agreed and around not in differing:
            around = _module(around)
        if mismatch.whole or around in differing:
            return mismatch
    return None


def _describe_shards(probe: Probe, mismatch: ModuleDifference) -> str:
    """Text naming the shards just before ``mismatch``: each equals some slice of the reference's, maybe a wrong one."""
    order = probe.order["output"]
    before: list[str] = []
    for module in order[: order.index(mismatch.module)]:
        if ("output", module) in probe.agreed:
            before = []
        elif ("output", module) in probe.agreed_shards:
            before.append(module)
    return f"; it takes shards from {', '.join(before)}" if before else ""


def _module(name: str) -> str:
    """The module that has this module or parameter as a member; empty for the model itself."""
    return name.rpartition(".")[0]


def _display_name(module: str) -> str:
    return module or "the model itself"


def _wrong_parameter(found: Tensors, expected: Tensors, ties: list[list[str]], limits: Limits) -> Fault | None:
    """The parameter whose gradient differs most, with a hint at the reason; None if no gradient exceeds its limit."""
    known = by_every_name(expected, ties)
    complete = by_every_name(found, ties)
    worst = Worst.of(gradient_differences({name: complete[name] for name in known if name in complete}, known), limits)
    if not worst.exceeds:
        return None
    name = worst.where
    others = [other for names in ties if name in names for other in names if other != name]
    separate = [other for other in others if other in found]
    if name in found and separate:
        return Fault(name, f"in one process it is tied to {', '.join(separate)}, and here it is not")
    gradient, wanted = complete[name].double(), known[name].double()
    if gradient.shape == wanted.shape and norm(wanted) > 0:
        factor = float((gradient * wanted).sum()) / norm(wanted) ** 2
        if norm(gradient) == 0:
            return Fault(name, "it is zero")
        if norm(gradient - factor * wanted) <= 10 * worst.limit * norm(gradient):
            return Fault(name, f"it is {factor:.3g} times what it should be")
    return Fault(name, f"it differs by {worst.value:.1e}, so it is not what the rows of all ranks add up to")
