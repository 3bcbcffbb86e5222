"""AdamW with moments in bf16: half the memory, right on average, and a function of nothing but step and place."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor import metrics
from torch.optim import AdamW

from drawbar.config.schema.run_config import OptimSection
from drawbar.optim import bf16_moments
from drawbar.optim.bf16_moments import AdamWBf16Moments, compiled_rounding, random_bits, store_moments, store_rounded
from drawbar.optim.optimizers import build_optimizers
from drawbar.optim.state import load_optimizer_state, optimizer_state
from step_operators import StepOperators

BF16 = OptimSection(lr=0.01, weight_decay=0.1, betas=(0.8, 0.95), state_dtype="bf16")


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.LayerNorm(96), nn.Linear(96, 64, bias=False))


def train(model: nn.Module, optimizers: list[torch.optim.Optimizer], first: int, last: int) -> None:
    for step in range(first, last + 1):
        torch.manual_seed(step)
        (model(torch.randn(4, 64)) - torch.randn(4, 64)).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def names_of(model: nn.Module) -> dict[nn.Parameter, str]:
    return {parameter: name for name, parameter in model.named_parameters()}


def test_large_parameters_have_moments_in_bf16_and_small_ones_in_fp32() -> None:
    model = net()
    optimizers = build_optimizers(model, BF16)
    assert [type(optimizer) for optimizer in optimizers] == [AdamWBf16Moments, AdamW]
    train(model, optimizers, 1, 1)
    state = optimizer_state(names_of(model), optimizers)
    moments = {name: tensor.dtype for name, tensor in state.items() if not name.endswith("/step")}
    assert len(moments) == 2 * len(names_of(model))
    for name, dtype in moments.items():
        assert dtype == (torch.bfloat16 if name.rpartition("/")[0] in ("0.weight", "2.weight") else torch.float32)


def test_the_first_update_is_that_of_adamw_bit_by_bit() -> None:
    ours, theirs = net(), net()
    train(ours, build_optimizers(ours, BF16), 1, 1)
    train(theirs, build_optimizers(theirs, BF16.model_copy(update={"state_dtype": "fp32"})), 1, 1)
    for found, expected in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("fused", [True, None])
def test_rows_at_a_time_are_the_whole(fused: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = nn.Parameter(torch.randn(48, 4, 16))
    rows = nn.Parameter(whole.detach().clone())
    for parameter, chunk in ((whole, 2**20), (rows, 5 * 64)):
        monkeypatch.setattr(bf16_moments, "CHUNK", chunk)
        optimizer = AdamWBf16Moments([parameter], lr=0.01, fused=fused)
        for step in range(3):
            torch.manual_seed(step)
            parameter.grad = torch.randn_like(parameter)
            optimizer.step()
    assert torch.equal(rows, whole)


def test_state_survives_a_round_trip_bit_by_bit() -> None:
    straight, resumed = net(), net()
    before = build_optimizers(straight, BF16)
    train(straight, before, 1, 3)
    saved = copy.deepcopy(optimizer_state(names_of(straight), before))
    resumed.load_state_dict(straight.state_dict())
    after = build_optimizers(resumed, BF16)
    load_optimizer_state(names_of(resumed), after, saved)
    again = optimizer_state(names_of(resumed), after)
    assert {name: tensor.dtype for name, tensor in again.items()} == {name: t.dtype for name, t in saved.items()}
    assert all(torch.equal(again[name], tensor) for name, tensor in saved.items())
    train(straight, before, 4, 6)
    train(resumed, after, 4, 6)
    for found, expected in zip(resumed.parameters(), straight.parameters(), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize(("saved_as", "loaded_as"), [("fp32", "bf16"), ("bf16", "fp32")])
def test_the_state_of_one_format_loads_as_the_other(saved_as: str, loaded_as: str) -> None:
    model = net()
    optimizers = build_optimizers(model, BF16.model_copy(update={"state_dtype": saved_as}))
    train(model, optimizers, 1, 2)
    saved = copy.deepcopy(optimizer_state(names_of(model), optimizers))
    others = build_optimizers(model, BF16.model_copy(update={"state_dtype": loaded_as}))
    load_optimizer_state(names_of(model), others, saved)
    loaded = optimizer_state(names_of(model), others)
    expected = torch.bfloat16 if loaded_as == "bf16" else torch.float32
    assert loaded["0.weight/exp_avg_sq"].dtype == expected
    assert torch.equal(loaded["0.weight/exp_avg_sq"], saved["0.weight/exp_avg_sq"].to(expected))
    assert float(loaded["0.weight/step"]) == 2.0


def test_rounding_is_right_on_average() -> None:
    torch.manual_seed(0)
    exact = torch.randn(4096) * torch.logspace(-30, 30, 4096)
    exact[:2] = torch.tensor([0.0, 1.0])
    rounded = []
    for step in range(200):
        target = torch.empty(4096, dtype=torch.bfloat16)
        store_rounded(target, exact.clone(), random_bits(target, (0,), torch.tensor(float(step)))[0])
        rounded.append(target.double())
    found = torch.stack(rounded) / torch.where(exact == 0, 1, exact.double())
    assert torch.all(torch.stack(rounded)[:, :2] == exact[:2])  # what bf16 can hold is not changed
    assert (found[:, 1:] - 1).abs().max() < 2**-7  # one of the two neighbors
    assert abs(found[:, 1:].mean() - 1) < 1e-5
    assert (found.mean(0)[1:] - 1).abs().max() < 5 * 2**-8 / 200**0.5


def test_a_second_moment_follows_gradients_that_shrink() -> None:
    """Rounded to nearest, it would stay as it was: a thousandth is less than bf16 can tell from nothing."""
    parameter = nn.Parameter(torch.zeros(4096))
    optimizer = AdamWBf16Moments([parameter], lr=0.0)
    for size, steps in ((1.0, 20), (0.0, 1000)):
        for _ in range(steps):
            parameter.grad = torch.full_like(parameter, size)
            optimizer.step()
    expected = (1 - 0.999**20) * 0.999**1000
    assert optimizer.state[parameter]["exp_avg_sq"].double().mean().item() == pytest.approx(expected, rel=0.01)


def test_random_bits_are_those_of_the_place_in_the_full_tensor() -> None:
    parameter, step = torch.empty(12, 2, 5), torch.tensor(7.0)
    first, second = random_bits(parameter, (0, 0, 0), step)
    for bits in (first, second):
        assert bits.shape == parameter.shape
        assert 0 <= bits.min() < bits.max() < 2**16
        assert len(bits.unique()) > 110
    assert torch.equal(random_bits(parameter[4:9], (4, 0, 0), step)[0], first[4:9])
    assert not torch.equal(random_bits(parameter, (0, 0, 0), step + 1)[0], first)
    assert not torch.equal(first, second)


@pytest.fixture(scope="module")
def compiled() -> bf16_moments.Rounding:
    """As on CUDA; with no limit of variants used up."""
    torch.compiler.reset()
    return compiled_rounding()


@pytest.mark.exhaustive
def test_compiled_it_is_one_kernel_for_all_shapes_with_the_same_bits(compiled: bf16_moments.Rounding) -> None:
    matrices = [(rows, columns) for rows in (2, 3, 33, 64) for columns in (16, 33, 64, 301)]
    metrics.reset()
    before = counters["stats"]["unique_graphs"]
    for step, shape in enumerate([*matrices, (3, 5, 7), (16, 8, 9), (4, 4, 4)]):
        torch.manual_seed(step)
        exact = (torch.randn(shape), torch.randn(shape) ** 2)
        offset = (5 * step, *range(len(shape) - 1))
        found, expected = ([torch.zeros(shape, dtype=torch.bfloat16) for _ in range(2)] for _ in range(2))
        compiled(found, exact, torch.tensor(float(step)), offset)
        store_moments(expected, exact, torch.tensor(float(step)), offset)
        for one, other in zip(found, expected, strict=True):
            assert other.any()
            assert torch.equal(one, other)
    variants = counters["stats"]["unique_graphs"] - before
    assert variants <= 3  # one for matrices, one for three dims, and one to spare
    assert metrics.generated_kernel_count == variants


class Launches(StepOperators):
    """Leaves compiled code as it is: what that does is one launch more."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


@pytest.mark.exhaustive
def test_a_step_is_about_one_launch_a_tensor(compiled: bf16_moments.Rounding, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def rounding(*args: object) -> None:
        calls.append(args)
        compiled(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(bf16_moments, "rounding", lambda device_type: rounding)
    parameters = [nn.Parameter(torch.ones(64, 32 + number)) for number in range(20)]
    optimizer = AdamWBf16Moments(parameters, lr=0.01, fused=True)
    for _ in range(3):
        calls.clear()
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        with Launches() as operators:
            optimizer.step()
    launches = [
        name for name in operators.launches.elements() if name.startswith("aten::") and name != "aten::empty_like"
    ]
    assert len(calls) == len(parameters)
    assert len(launches) <= 5, launches


class Widened(StepOperators):
    """Notes how many moments are in fp32 at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name == "aten::_foreach_copy_":
            self.sizes.append(sum(tensor.numel() for tensor in args[0]))
        return super().__torch_dispatch__(func, types, args, kwargs)


def test_no_more_than_a_chunk_is_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bf16_moments, "CHUNK", 5000)
    parameters = [nn.Parameter(torch.ones(shape)) for shape in ((10, 100), (1,), (200, 64), (700,), (2, 9000), (50,))]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    with Widened() as widened:
        AdamWBf16Moments(parameters, lr=0.01).step()
    # (200, 64) by 78 rows, of which the last 44 with the next; rows of 9000 by themselves
    assert widened.sizes == [2 * size for size in (1001, 4992, 4992, 44 * 64 + 700, 9000, 9000, 50)]
