"""Numbers and lines as people read them."""

import pytest

from drawbar.tracking.lines import duration, evaluation_line, log_line, number, phase_line, time_left


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (45.4, "45s"),
        (59.6, "1m00s"),
        (72, "1m12s"),
        (3599.7, "1h00m"),
        (3720, "1h02m"),
        (183_600, "2d03h"),
    ],
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0.000"),
        (4.32149, "4.321"),
        (-4.3, "-4.300"),
        (18_204.4, "18,204"),
        (1.234e-5, "1.2e-05"),
        (10.0**300, "1.0e+300"),
        (float("nan"), "nan"),
        (float("inf"), "inf"),
        (float("-inf"), "-inf"),
    ],
)
def test_number(value: float, text: str) -> None:
    assert number(value) == text


TRAIN = {
    "train/loss": 4.3214,
    "train/lr": 3e-4,
    "train/grad_norm": 1.234,
    "train/tokens_per_second": 18_204.4,
    "train/weight": 2048,
    "train/skipped": 0,
}


def test_log_line() -> None:
    assert log_line(20, 500, TRAIN) == "step 20/500  loss 4.321  lr 3.0e-04  grad_norm 1.23  18,204 tok/s"
    assert "  skipped 3  " in log_line(20, 500, {**TRAIN, "train/skipped": 3})
    assert log_line(20, 500, {**TRAIN, "train/mfu": 0.437}).endswith("18,204 tok/s  mfu 43.7%")
    assert log_line(1000, None, {}) == "step 1,000"


def test_a_long_run_fits_80_columns() -> None:
    assert len(log_line(119_000, 120_000, TRAIN)) <= 80


def test_evaluation_line_names_each_split_once() -> None:
    values = {"eval/validation/loss": 3.912, "eval/validation/perplexity": 50.0, "eval/test/loss": 4.0}
    assert (
        evaluation_line(200, 500, values) == "step 200/500  validation  loss 3.912  perplexity 50.000  test  loss 4.000"
    )


def test_phase_line() -> None:
    assert phase_line("encoding", 1200, 4800) == "encoding 1,200/4,800 (25%)"
    assert phase_line("encoding", 0, 0) == "encoding 0/0 (100%)"


def test_time_left_is_said_only_where_there_is_some() -> None:
    assert time_left(72) == "1m12s left"
    assert time_left(None) is None
    assert time_left(0.0) is None


def test_samples_without_tokens_are_counted_as_samples() -> None:
    assert "412 samples/s" in log_line(20, 500, {"train/loss": 1.0, "train/samples_per_second": 412.2})
