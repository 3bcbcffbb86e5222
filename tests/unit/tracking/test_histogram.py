"""Histograms: every value in one bin, whatever the values; and lines that people can read."""

import io
import sys
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drawbar.tracking.table import BAR_WIDTH, MOST_BINS, bins_of, fold, plain_histogram, print_histogram


@given(st.lists(st.integers(0, 10**6), min_size=1) | st.lists(st.integers(0, 40), min_size=1))
def test_every_value_is_in_one_bin(values: list[int]) -> None:
    bins = bins_of(values)
    assert 1 <= len(bins) <= MOST_BINS
    assert [one.count for one in bins] == [sum(one.first <= value <= one.last for value in values) for one in bins]
    assert sum(one.count for one in bins) == len(values)
    assert bins[0].count
    assert bins[-1].count
    widths = {one.last + 1 - one.first for one in bins}
    assert len(widths) == 1
    assert str(widths.pop()).rstrip("0") in ("1", "2", "5")
    assert all(after.first == one.last + 1 for one, after in pairwise(bins))


def test_the_lines() -> None:
    values = [1] * 8 + [2] * 4 + [4]
    text = plain_histogram("lengths", bins_of(values), {"limit": 4, "more": 1000})
    full, half, little = "#" * BAR_WIDTH, "#" * (BAR_WIDTH // 2), "#" * (BAR_WIDTH // 8)
    assert text.splitlines() == [
        "lengths",
        "",
        f"1  {full}  8",
        f"2  {half:<{BAR_WIDTH}}  4",
        f"3  {'':<{BAR_WIDTH}}  0",
        f"4  {little:<{BAR_WIDTH}}  1  <- limit = 4",
        "more = 1,000, beyond the largest",
    ]


def test_empty_bins_in_a_row_are_one_line() -> None:
    def spans(values: list[int]) -> list[tuple[int, int, int]]:
        return [(one.first, one.last, one.count) for one in fold(bins_of(values))]

    assert spans([3, 3, 12, 13]) == [(3, 3, 2), (4, 11, 0), (12, 12, 1), (13, 13, 1)]
    assert spans([1, 4]) == [(1, 1, 1), (2, 2, 0), (3, 3, 0), (4, 4, 1)]
    assert spans([7]) == [(7, 7, 1)]


def test_a_bin_with_little_in_it_has_a_bar() -> None:
    assert "1  #" in plain_histogram("", bins_of([1] + [2] * 10_000), {})


def test_ranges_and_counts_stand_below_one_another() -> None:
    values = np.repeat([5, 95, 1300], [1, 20, 3000])
    lines = plain_histogram("", bins_of(values), {}).splitlines()[2:]
    assert lines[0].startswith("0-99  ".rjust(13))
    assert lines[-1].startswith("1,300-1,399  ")
    assert {len(line) for line in lines} == {len(lines[0])}


@pytest.mark.parametrize("is_terminal", [False, True])
def test_bars_in_a_file_are_ascii_and_on_a_terminal_blocks(is_terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    class Screen(io.StringIO):
        def isatty(self) -> bool:
            return is_terminal

    screen = Screen()
    monkeypatch.setattr(sys, "stdout", screen)
    print_histogram("lengths of samples", [1, 2, 2], {"limit": 2, "more": 9})
    shown = screen.getvalue()
    assert ("█" in shown) == is_terminal
    assert ("#" in shown) != is_terminal
    for words in ("lengths of samples", "<- limit = 2", "more = 9, beyond"):
        assert words in shown
