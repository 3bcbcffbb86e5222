"""What `drawbar parity` allows in a lower precision: what rounding does to one process on this machine, and no more."""

from contextlib import chdir
from dataclasses import replace

import pytest
import torch
from torch import nn

import drawbar
from conftest import make_project
from drawbar.distributed.process_group import Distributed
from drawbar.distributed.rank_info import RankInfo
from drawbar.parity.comparison import (
    FP32_TOLERANCES,
    LARGEST,
    MARGIN,
    Comparison,
    Noise,
    Reference,
    Trace,
    distances,
    limits,
    tolerances,
)
from drawbar.parity.recorder import train
from drawbar.parity.run import make_reference, reference_config, with_last_step
from drawbar.parity.workload import Workload
from drawbar.tasks.task_registry import task_class
from tiny import CPU


def compare(trace: Trace, reference: Reference) -> Comparison:
    allowed = reference.tolerances
    return Comparison.of(distances(trace, reference.trace, allowed.max_gradient_error), allowed)


@pytest.mark.parametrize(("precision", "unit"), [("bf16", 2**-8), ("fp16", 2**-11)])
def test_noise_is_one_rounding_in_size(precision: str, unit: float) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(8, 200)
    x = torch.randn(50, 8)
    expected = plain(x)
    state = torch.get_rng_state()
    found = []
    for seed in (0, 0, 1):
        model = nn.Linear(8, 200)
        model.load_state_dict(plain.state_dict())
        torch.set_rng_state(state)
        Noise(precision, seed).add_to(model)
        found.append(model(x))
        assert torch.equal(torch.get_rng_state(), state)  # the model's own draws stay what they were
    apart = ((found[0] - expected) / expected).abs()
    assert 0.9 * unit < apart.max() <= 1.01 * unit
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


def test_a_limit_is_a_multiple_of_the_farthest_and_less_than_the_thing_itself() -> None:
    found = limits(FP32_TOLERANCES.gradients, [{"a": 0.01, "b": 0.5}, {"a": 0.02, "b": float("inf"), "c": 0.0}])
    assert found.of("a") == MARGIN * 0.02
    assert found.of("b") == LARGEST < 1
    assert found.of("c") == found.of("d") == FP32_TOLERANCES.gradients.base


def test_fp32_is_held_to_what_is_fixed() -> None:
    assert tolerances("fp32", []).gradients.of("any") == FP32_TOLERANCES.gradients.base


STEPS = 4
FAULTY = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Trace, Reference]:
    """Steps in bf16 whose size takes any two right trainings apart, rounded in another way than what is measured."""
    with chdir(make_project(tmp_path_factory.mktemp("rounding"))):
        config = drawbar.load_config("config.yaml", ["optim.lr=3.0e-2"]).config
        workload = Workload(config, task_class(config.task.type), STEPS).with_tokenizer_and_metadata()
        noisy = replace(workload, noise=Noise("bf16", seed=1001))
        trace = train(noisy, reference_config(config, "bf16"), Distributed(RankInfo(), CPU, timeout=60))
        first = make_reference(workload, CPU, "bf16")
        return trace, with_last_step(first, workload, CPU, "bf16", trace)


@pytest.mark.exhaustive
def test_rounding_passes(trained: tuple[Trace, Reference]) -> None:
    trace, reference = trained
    comparison = compare(trace, reference)
    assert comparison.passes
    assert all(
        getattr(comparison, kind).value > getattr(FP32_TOLERANCES, kind).base for kind in ("grad_norm", "gradients")
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("step", [1, STEPS])
def test_a_gradient_that_is_a_fifth_too_large_is_caught(trained: tuple[Trace, Reference], step: int) -> None:
    trace, reference = trained
    gradients = {**trace.gradients[step], FAULTY: 1.2 * trace.gradients[step][FAULTY]}
    wrong = replace(trace, gradients={**trace.gradients, step: gradients})
    comparison = compare(wrong, reference)
    assert comparison.exceeded().keys() == {"gradients"}
    assert comparison.gradients.where == f"{FAULTY}, step {step}"


@pytest.mark.exhaustive
def test_a_weight_that_is_not_updated_is_caught(trained: tuple[Trace, Reference]) -> None:
    trace, reference = trained
    assert trace.before_last is not None
    wrong = replace(trace, weights={**trace.weights, FAULTY: trace.before_last.engine.model[FAULTY]})
    comparison = compare(wrong, reference)
    assert comparison.exceeded().keys() == {"weights"}
    assert comparison.weights.where == FAULTY
