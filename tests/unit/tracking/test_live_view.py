"""The live view: every number whole, at every width."""

import re

import pytest
from rich.cells import cell_len
from rich.console import Console

from drawbar.tracking.live_view import LABELLED, LabelledValue, LiveValues, LiveView
from drawbar.util.best_score import BestScore

VALUES = LiveValues(
    step=119_004,
    total_steps=1_200_000,
    seconds_left=4320,
    loss=4.321,
    lr=3e-4,
    grad_norm=1.234,
    speed="1,118,204 tok/s",
    mfu=0.437,
    peak_memory_gib=71.25,
    skipped=3,
    evaluated_step=119_000,
    scores={"eval/validation/loss": 4.1, "eval/validation/perplexity": 60.3, "eval/validation/" + "long" * 20: 0.5},
    best=BestScore(step=118_000, metric="loss", score=4.05),
    phase=("evaluating", 45, 120),
    heading=[
        LabelledValue("training", "a-run-of-mine"),
        LabelledValue("", "on gpu7"),
        LabelledValue("3s", "written", "ago"),
    ],
    checkpoint=118_000,
)
NUMBERS = (
    "119,004/1,200,000", "1h12m left", "4.321", "3.0e-04", "1.23", "1,118,204 tok/s", "43.7%", "71.2 GiB", "skipped 3",
    "119,000", "4.100", "60.300", "0.500", "4.050", "at step 118,000", "45/120", "training", "written 3s ago", "10%",
)  # fmt: skip


def lines(width: int, values: LiveValues = VALUES) -> list[str]:
    console = Console(width=width)
    with console.capture() as capture:
        console.print(LiveView(values))
    return capture.get().splitlines()


@pytest.mark.parametrize("width", [30, 40, 50, 59, 60, 80, 100, 120, 300])
def test_no_number_is_wrapped_or_cut(width: int) -> None:
    shown = lines(width)
    assert max(map(cell_len, shown)) <= width
    for number in NUMBERS:
        assert sum(number in line for line in shown) >= 1, (number, shown)
    assert len(shown) <= (11 if width >= 100 else 20)  # in one glance


@pytest.mark.parametrize("width", [40, 100])
def test_lines_begin_with_what_they_are_about(width: int) -> None:
    labels = [match[0] for line in lines(width)[2:] if (match := re.match(r"[a-z]+", line))]
    assert labels == ["progress", "training", "evaluation", "best", "checkpoint", "evaluating"]
    assert all(line.startswith(" " * 12) for line in lines(LABELLED) if line.startswith(" "))


def test_what_is_not_known_is_not_shown() -> None:
    assert lines(80, LiveValues()) == []
    assert lines(80, LiveValues(step=3)) == ["progress    step 3"]
    assert lines(80, LiveValues(loss=float("nan"))) == ["training    loss nan"]


def test_names_do_not_move_the_cursor() -> None:
    [line] = lines(80, LiveValues(scores={"eval/validation/\x1b[2Jb\nd": 1.0}))
    assert line == "evaluation  �[2Jb�d 1.000"


def test_a_long_phase_keeps_its_numbers() -> None:
    *_, line = lines(80, LiveValues(phase=("encoding validation", 3, 10)))
    assert line == "encoding validation  3/10"
