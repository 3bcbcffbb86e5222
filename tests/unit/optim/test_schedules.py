"""Every curve against transformers' own, step by step."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import optimization

from drawbar.config.schema.run_config import OptimSection
from drawbar.optim.schedules import learning_rate_scale, set_learning_rate, warmup_steps

PEAK = 0.5
SCHEDULES = ["linear", "cosine", "constant", "polynomial", "inverse_sqrt", "wsd"]


def theirs(config: OptimSection, total: int) -> list[float]:
    """What transformers' scheduler gives each of ``total`` updates, as a share of the peak."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    warmup = warmup_steps(total, config)
    match config.schedule:
        case "linear" if config.min_lr_ratio == 0:
            scheduler = optimization.get_linear_schedule_with_warmup(optimizer, warmup, total)
        case "linear":  # transformers' own ends at 0; its polynomial of power 1 is the line that does not
            scheduler = optimization.get_polynomial_decay_schedule_with_warmup(
                optimizer, warmup, total, lr_end=config.min_lr_ratio * PEAK
            )
        case "cosine":
            scheduler = optimization.get_cosine_with_min_lr_schedule_with_warmup(
                optimizer, warmup, total, min_lr_rate=config.min_lr_ratio
            )
        case "constant":
            scheduler = optimization.get_constant_schedule_with_warmup(optimizer, warmup)
        case "polynomial":
            scheduler = optimization.get_polynomial_decay_schedule_with_warmup(
                optimizer, warmup, total, lr_end=config.min_lr_ratio * PEAK, power=config.power
            )
        case "inverse_sqrt":
            scheduler = optimization.get_inverse_sqrt_schedule(optimizer, warmup)
        case "wsd":
            decay = math.ceil(config.decay * total)
            scheduler = optimization.get_wsd_schedule(optimizer, warmup, decay, total, min_lr_ratio=config.min_lr_ratio)
    rates = []
    for _ in range(total):
        rates.append(optimizer.param_groups[0]["lr"] / PEAK)
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("warmup", [0, 1, 7, 0.25])
@pytest.mark.parametrize(("floor", "power"), [(0.0, 1.0), (0.1, 2.0)])
def test_the_curve_is_transformers_own(schedule: str, warmup: float, floor: float, power: float) -> None:
    config = OptimSection(schedule=schedule, warmup=warmup, min_lr_ratio=floor, power=power, decay=0.3)
    ours = [learning_rate_scale(step, 37, config) for step in range(37)]
    assert ours == pytest.approx(theirs(config, 37), rel=1e-12, abs=1e-15)


def test_linear_ends_at_its_floor() -> None:
    config = OptimSection(schedule="linear", min_lr_ratio=0.2)
    assert [learning_rate_scale(step, 4, config) for step in range(5)] == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_schedule_of_its_own_length_stays_at_its_last_rate(schedule: str) -> None:
    config = OptimSection(schedule=schedule, warmup=0.2, min_lr_ratio=0.1)
    of_ten = config.model_copy(update={"schedule_steps": 10})
    rates = [learning_rate_scale(step, 10, config) for step in range(10)]
    assert [learning_rate_scale(step, 25, of_ten) for step in range(25)] == [*rates, *[rates[-1]] * 15]
    assert [learning_rate_scale(step, 5, of_ten) for step in range(5)] == rates[:5]


def test_wsd_by_hand() -> None:
    config = OptimSection(schedule="wsd", warmup=2, decay=0.4, min_lr_ratio=0.5)
    scales = [learning_rate_scale(step, 10, config) for step in range(11)]
    drop = [0.75 + 0.25 * math.cos(math.pi * q) for q in (0, 0.25, 0.5, 0.75, 1.0)]
    assert scales == pytest.approx([0.5, 0.75, 1, 1, 1, 1, *drop])


def test_a_fraction_of_warmup_rounds_up() -> None:
    assert warmup_steps(101, OptimSection(warmup=0.05)) == 6
    assert warmup_steps(101, OptimSection(warmup=5)) == 5


@given(
    schedule=st.sampled_from(SCHEDULES),
    warmup=st.integers(0, 60) | st.floats(0, 0.99),
    floor=st.floats(0, 1),
    decay=st.floats(0.01, 1),
    power=st.floats(0.1, 4),
    total=st.integers(1, 50),
)
def test_rises_then_never_rises_again(
    schedule: str, warmup: float, floor: float, decay: float, power: float, total: int
) -> None:
    config = OptimSection(schedule=schedule, warmup=warmup, min_lr_ratio=floor, decay=decay, power=power)
    scales = [learning_rate_scale(step, total, config) for step in range(total + 3)]
    rising, falling = scales[: warmup_steps(total, config)], scales[warmup_steps(total, config) :]
    assert rising == sorted(rising)
    assert all(later <= earlier + 1e-12 for earlier, later in pairwise(falling))
    assert all(0.0 <= scale <= 1.0 for scale in scales)


def test_each_group_has_its_share_of_the_learning_rate() -> None:
    def optimizer() -> torch.optim.Optimizer:
        groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr_scale": scale} for scale in (1.0, 0.5)]
        return torch.optim.SGD(groups)

    optimizers = [optimizer(), optimizer()]
    set_learning_rate(optimizers, 0.03)
    assert [group["lr"] for o in optimizers for group in o.param_groups] == [0.03, 0.015] * 2
