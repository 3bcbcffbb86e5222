"""The differences that `drawbar parity` shows: rounding passes, and a fault does not, however small the parameter."""

import math

import pytest
import torch

from drawbar.parity.comparison import FP32_TOLERANCES, Comparison, Fault, Trace, difference, distances, known_entries

LR = 1e-2
ROUNDING = 1e-7


def trace(scale: float = 1.0, noise: float = 0.0, seed: int = 0) -> Trace:
    """One step of sign descent (Adam's first) on a matrix with gradients of size 1, and a bias with gradients of size
    ``scale``; each is off by ``noise``."""
    torch.manual_seed(7)
    exact = {"matrix": torch.randn(60, 50), "bias": scale * torch.randn(60)}
    start = {"matrix": 0.1 * torch.randn(60, 50), "bias": torch.zeros(60)}
    torch.manual_seed(seed)
    gradients = {name: gradient + noise * torch.randn_like(gradient) for name, gradient in exact.items()}
    weights = {name: start[name] - LR * gradients[name].sign() for name in start}
    return Trace(losses={1: 4.0, 2: 3.0}, grad_norms={1: 1.0, 2: 0.5}, gradients={1: gradients}, weights=weights)


def found(changed: Trace, reference: Trace | None = None) -> Comparison:
    apart = distances(changed, reference or trace(), FP32_TOLERANCES.max_gradient_error)
    return Comparison.of(apart, FP32_TOLERANCES)


def test_what_is_equal_differs_by_nothing() -> None:
    comparison = found(trace())
    assert comparison.passes
    assert comparison.gradients.value == comparison.weights.value == comparison.loss.value == comparison.left_out == 0


def test_rounding_passes() -> None:
    comparison = found(trace(noise=ROUNDING, seed=1), trace(noise=ROUNDING, seed=2))
    assert comparison.passes, comparison
    assert 0 < comparison.gradients.value < FP32_TOLERANCES.gradients.base / 10
    assert comparison.left_out < 0.01


def test_a_gradient_that_is_nothing_but_rounding_passes() -> None:
    """On paper it is zero; the optimizer makes full steps of it all the same, which are not compared."""
    one, other = (trace(scale=0.0, noise=ROUNDING, seed=seed) for seed in (1, 2))
    assert not torch.allclose(one.weights["bias"], other.weights["bias"])
    comparison = found(one, other)
    assert comparison.passes, comparison
    assert 60 / 3060 <= comparison.left_out < 0.03


@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e-5])
@pytest.mark.parametrize("factor", [0.0, 0.5, 2.0, -1.0])
def test_a_wrong_gradient_is_caught_however_small(scale: float, factor: float) -> None:
    wrong = trace(scale, noise=ROUNDING, seed=1)
    wrong.gradients[1]["bias"] *= factor
    comparison = found(wrong, trace(scale, noise=ROUNDING, seed=2))
    assert "gradients" in comparison.exceeded()
    assert comparison.gradients.where == "bias, step 1"


def test_a_wrong_update_is_caught() -> None:
    wrong = trace(1e-3, noise=ROUNDING, seed=1)
    wrong.weights["bias"] *= 1.001
    comparison = found(wrong, trace(1e-3, noise=ROUNDING, seed=2))
    assert comparison.exceeded().keys() == {"weights"}
    assert comparison.weights.where == "bias"


def test_a_weight_that_never_gets_a_gradient_is_compared() -> None:
    one, other = trace(), trace()
    for each in (one, other):
        each.gradients[1]["bias"] = torch.zeros(60)
    one.weights["bias"][3] += 0.1
    assert found(one, other).exceeded().keys() == {"weights"}


def test_entries_that_no_token_led_to_are_known() -> None:
    expected = torch.tensor([0.0, 1.0, 1e-6])
    noisy = expected + torch.tensor([0.0, 1e-7, -3e-6])
    assert known_entries(noisy, expected, 1e-4).tolist() == [True, True, False]


def test_a_zero_is_not_known_where_all_else_is_rounding() -> None:
    """As in the biases of keys, whose gradient is zero on paper: a later step of Adam's moves them all by chance."""
    assert (
        known_entries(torch.tensor([1e-9, -2e-9, 0.0]), torch.tensor([-1e-9, 1e-9, 0.0]), 1e-4).tolist() == [False] * 3
    )
    assert known_entries(torch.tensor([1.0, 0.0]), torch.tensor([1.0, 0.0]), 1e-4).tolist() == [True, True]
    assert known_entries(torch.zeros(2), torch.zeros(2), 1e-4).tolist() == [True, True]


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_what_is_no_number_is_the_worst(broken: float) -> None:
    wrong = trace()
    wrong.gradients[1]["bias"][0] = broken
    wrong.losses[2] = broken
    comparison = found(wrong)
    assert comparison.exceeded().keys() == {"loss", "gradients"}
    assert comparison.gradients.value == comparison.loss.value == math.inf


def test_losses_and_norms_are_compared_step_by_step() -> None:
    wrong = trace()
    wrong.losses[2] *= 1 + 2e-5
    wrong.grad_norms[1] *= 1 + 2e-4
    comparison = found(wrong)
    assert comparison.exceeded().keys() == {"loss", "grad_norm"}
    assert (comparison.loss.where, comparison.grad_norm.where) == ("step 2", "step 1")
    assert comparison.loss.value == pytest.approx(2e-5)


def test_another_shape_and_missing_parameters_are_named() -> None:
    wrong = trace()
    wrong.gradients[1]["bias"] = wrong.gradients[1]["bias"][:30]
    assert found(wrong).gradients.value == math.inf
    wrong = trace()
    del wrong.gradients[1]["bias"]
    wrong.gradients[1]["other"] = torch.ones(1)
    assert [fault.text for fault in found(wrong).faults] == [
        "bias is missing",
        "other is there, and is not in one process",
    ]


def tied() -> Trace:
    made = trace()
    made.weights["head"] = made.weights["matrix"]
    made.ties = [["matrix", "head"]]
    return made


def test_a_tied_weight_may_come_under_any_of_its_names() -> None:
    moved = tied()
    moved.gradients[1]["head"] = moved.gradients[1].pop("matrix")
    assert found(moved, tied()).passes
    both = tied()
    both.gradients[1]["head"] = both.gradients[1]["matrix"].clone()
    assert found(both, tied()).passes
    both.gradients[1]["head"] *= 0.5
    comparison = found(both, tied())
    assert comparison.exceeded().keys() == {"gradients"}
    assert comparison.gradients.where == "head, step 1"


def test_notes_are_failures_too() -> None:
    odd = trace()
    odd.unequal.append(Fault("bias", "ranks 0 and 1 hold different values of bias"))
    assert not found(odd).passes
    skipped = trace()
    skipped.skipped.append(2)
    assert [fault.text for fault in found(skipped).faults] == ["fp16 overflowed: no update in step 2"]


def test_a_buffer_of_whole_numbers_has_a_difference() -> None:
    assert difference(torch.tensor([3, 4]), torch.tensor([3, 4])) == 0.0
    assert difference(torch.tensor([3, 4]), torch.tensor([0, 0]), floor=1.0) == 5.0
