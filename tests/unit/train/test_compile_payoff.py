"""With ``parallel.compile`` the log says what compilation costs and saves, and training is as without that."""

import logging
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from drawbar.config.schema.run_config import ParallelSection
from drawbar.engines.engine import Engine
from drawbar.engines.trial_step import trial_step
from drawbar.parallel.compile import CompileClock, uncompiled_blocks
from drawbar.runtime.seed import seed_everything
from drawbar.tracking.meters import Throughput
from drawbar.train.compile_payoff import LAST_COMPARED, describe_payoff, logging_compile_payoff
from tiny import random_step, tiny_config, tiny_engine, vector

SAVED = [0.3, 0.2, 0.25, 0.25, 0.3, 0.2]
DROPOUT = {"resid_pdrop": 0.2, "embd_pdrop": 0.2, "attn_pdrop": 0.2}


@pytest.fixture
def quick_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile that takes the program apart, and leaves out the minute for kernels."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))


def compiled_engine(total_steps: int = 10) -> Engine:
    config = tiny_config("gpt2", DROPOUT, parallel=ParallelSection(compile=True))
    return tiny_engine(config, total_steps=total_steps)


@pytest.mark.exhaustive
def test_uncompiled_blocks_compile_nothing(quick_compiler: None) -> None:
    engine, clock = compiled_engine(), CompileClock()
    counters.clear()
    with uncompiled_blocks(), trial_step(engine, engine.updater, random_step(engine, seed=1)):
        assert not counters["frames"]
    assert clock.seconds == 0
    engine.train_step(random_step(engine, seed=1))
    assert counters["frames"]["ok"]
    assert clock.seconds > 0


def steps(engine: Engine, count: int) -> Iterator[tuple[int, Any]]:
    return ((step, random_step(engine, seed=step % 3)) for step in range(1, count + 1))


def train(engine: Engine, made: Iterator[tuple[int, Any]]) -> list[float]:
    seed_everything(3)
    return [float(engine.train_step(micro_batches).loss) for _, micro_batches in made]


@pytest.mark.exhaustive
def test_what_it_saves_is_measured_beside_training(quick_compiler: None, caplog: pytest.LogCaptureFixture) -> None:
    count = LAST_COMPARED + 1
    plain, watched = compiled_engine(count), compiled_engine(count)
    expected = train(plain, steps(plain, count))
    with caplog.at_level(logging.INFO, logger="drawbar"):
        found = train(
            watched, logging_compile_payoff(steps(watched, count), watched, Throughput(), uncompiled_step_fits=False)
        )
    assert found == expected
    assert torch.equal(vector(watched), vector(plain))
    (said,) = {record.getMessage() for record in caplog.records if record.name == "drawbar"}
    assert said.startswith("parallel.compile: it has taken ")
    assert "step" in said
    assert "not measured" not in said


def test_a_run_without_compilation_is_left_alone() -> None:
    engine = tiny_engine(tiny_config())
    given = steps(engine, 20)
    assert logging_compile_payoff(given, engine, Throughput(), uncompiled_step_fits=True) is given


def test_a_short_run_is_not_measured(caplog: pytest.LogCaptureFixture) -> None:
    engine = compiled_engine(total_steps=LAST_COMPARED - 1)
    given = steps(engine, 3)
    with caplog.at_level(logging.INFO, logger="drawbar"):
        assert logging_compile_payoff(given, engine, Throughput(), uncompiled_step_fits=True) is given
    assert f"{LAST_COMPARED - 1} remaining steps are too few" in caplog.text


@pytest.mark.parametrize(
    ("cost", "saved", "left", "said"),
    [
        (41.4, SAVED, 1000, "41.4 s and saves 0.25 s a step (0.2 to 0.3 in the middle half of 6 trials)"),
        (41.4, SAVED, 1000, ": it pays after 166 of 1,000 steps"),
        (41.4, SAVED, 150, ": whether that pays in 150 steps is not clear"),
        (41.4, SAVED, 100, ": that does not pay in 100 steps; set parallel.compile=false"),
        (41.4, [-saved for saved in SAVED], 1000, ": that does not pay in 1,000 steps; set parallel.compile=false"),
        (41.4, [], 1000, "it has taken 41.4 s; its savings are not measured here"),
    ],
)
def test_the_step_from_which_it_pays(cost: float, saved: list[float], left: int, said: str) -> None:
    assert said in describe_payoff(cost, saved, left)
