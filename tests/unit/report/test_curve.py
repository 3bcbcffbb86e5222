"""Curves of bounded size."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drawbar.report.run_history import Curve

values = st.lists(st.floats(allow_nan=True, allow_infinity=True), min_size=1, max_size=200)


@given(values, st.integers(2, 20))
def test_extremes_and_gaps_are_kept_and_points_are_bounded(found: list[float], most: int) -> None:
    curve = Curve(max_buckets=most)
    for step, value in enumerate(found):
        curve.add(step, value)
    points = curve.points()
    finite = [value for value in found if math.isfinite(value)]
    assert len(points) <= 3 * most
    assert [step for step, _ in points] == sorted({step for step, _ in points})
    assert all(value == found[step] or (value is None and not math.isfinite(found[step])) for step, value in points)
    assert curve.count == len(found)
    assert curve.not_finite == len(found) - len(finite)
    assert (None in [value for _, value in points]) == (curve.not_finite > 0)
    if finite:
        assert curve.lowest is not None
        assert curve.highest is not None
        assert (curve.lowest[1], curve.highest[1]) == (min(finite), max(finite))
        assert {min(finite), max(finite)} <= {value for _, value in points}
    else:
        assert curve.lowest is curve.highest is None


def test_a_short_curve_is_whole() -> None:
    curve = Curve()
    for step in range(500):
        curve.add(step, math.sin(step))
    assert not curve.is_thinned
    assert curve.points() == [(step, math.sin(step)) for step in range(500)]
    curve.add(500, 0.0)
    assert curve.is_thinned


@pytest.mark.parametrize("scale", [1, 1000])
def test_steps_that_are_far_apart(scale: int) -> None:
    curve = Curve(max_buckets=10)
    for number in range(10):
        curve.add(number * scale, float(number))
    assert curve.points() == [(number * scale, float(number)) for number in range(10)]
