"""AdamW with moments in 8 bits: torchao's AdamW8bit, in plain tensors, which checkpoints hold."""

import copy

import pytest
import torch
from torch import nn
from torch.optim import AdamW
from torchao.optim import AdamW8bit
from torchao.optim.quant_utils import create_dynamic_map

from drawbar.config.schema.run_config import OptimSection, ParameterGroup
from drawbar.optim import bf16_moments
from drawbar.optim.average import WeightAverage
from drawbar.optim.int8_moments import AdamWInt8Moments, dynamic_map
from drawbar.optim.optimizers import build_optimizers
from drawbar.optim.state import load_optimizer_state, missing_adam_key, optimizer_state

INT8 = OptimSection(lr=0.01, weight_decay=0.1, betas=(0.8, 0.95), state_dtype="int8")


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.LayerNorm(96), nn.Linear(96, 64, bias=False), nn.Linear(64, 100))


def train(model: nn.Module, optimizers: list[torch.optim.Optimizer], first: int, last: int) -> None:
    for step in range(first, last + 1):
        torch.manual_seed(step)
        (model(torch.randn(4, 64)) - torch.randn(4, 100)).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def names_of(model: nn.Module) -> dict[nn.Parameter, str]:
    return {parameter: name for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("signed", [True, False])
def test_codes_are_those_of_torchao(signed: bool) -> None:
    assert dynamic_map(signed) == create_dynamic_map(signed)


def test_ten_steps_are_those_of_torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = net(), net()
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)  # it computes the same, and takes a minute
    matrices, others = ([p for p in theirs.parameters() if (p.ndim > 1) == wanted] for wanted in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    mine, reference = build_optimizers(ours, INT8), AdamW8bit(groups, lr=0.01, betas=(0.8, 0.95))
    assert [type(optimizer) for optimizer in mine] == [AdamWInt8Moments, AdamW]
    for step in range(10):
        torch.manual_seed(
            step
        )  # the same gradients: those of a loss would follow from weights and enlarge their rounding
        for found, expected in zip(ours.parameters(), theirs.parameters(), strict=True):
            found.grad = torch.randn_like(found) * 10.0 ** -(step % 4)
            expected.grad = found.grad.clone()
        for optimizer in (*mine, reference):
            optimizer.step()
    state = optimizer_state(names_of(ours), mine)
    for (name, found), expected in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)
        for moment in ("exp_avg", "exp_avg_sq"):
            kept, mine_kept = reference.state[expected][moment], state[f"{name}/{moment}"]
            assert (mine_kept.dtype == torch.uint8) == hasattr(kept, "codes") == (found.numel() >= 4096), name
            if found.numel() >= 4096:
                assert torch.equal(state[f"{name}/{moment}_scale"], kept.scale)
                assert torch.equal(mine_kept, kept.codes), name


def test_it_takes_a_quarter() -> None:
    model = nn.Linear(512, 512, bias=False)
    optimizers = build_optimizers(model, INT8)
    model(torch.randn(2, 512)).sum().backward()
    optimizers[0].step()
    taken = sum(tensor.nbytes for tensor in optimizer_state(names_of(model), optimizers).values())
    assert taken == 2 * 512**2 + 2 * 4 * 512**2 // 256 + 4


def test_parts_at_a_time_are_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = nn.Parameter(torch.randn(48, 4, 64))
    parts = nn.Parameter(whole.detach().clone())
    for parameter, chunk in ((whole, 2**20), (parts, 5 * 256)):
        monkeypatch.setattr(bf16_moments, "CHUNK", chunk)
        optimizer = AdamWInt8Moments([parameter], lr=0.01, fused=True)
        for step in range(3):
            torch.manual_seed(step)
            parameter.grad = torch.randn_like(parameter)
            optimizer.step()
    assert torch.equal(parts, whole)


def test_state_survives_a_round_trip_bit_by_bit() -> None:
    """Also beside an average of the weights, and with groups."""
    config = INT8.model_copy(update={"ema": 0.5, "groups": [ParameterGroup(match="^2", lr=0.001, weight_decay=0.0)]})
    straight, resumed = net(), net()
    before = build_optimizers(straight, config)
    assert isinstance(before[-1], WeightAverage)
    train(straight, before, 1, 3)
    saved = copy.deepcopy(optimizer_state(names_of(straight), before))
    resumed.load_state_dict(straight.state_dict())
    after = build_optimizers(resumed, config)
    load_optimizer_state(names_of(resumed), after, saved)
    again = optimizer_state(names_of(resumed), after)
    assert {name: tensor.dtype for name, tensor in again.items()} == {name: t.dtype for name, t in saved.items()}
    assert all(torch.equal(again[name], tensor) for name, tensor in saved.items())
    train(straight, before, 4, 6)
    train(resumed, after, 4, 6)
    for found, expected in zip(resumed.parameters(), straight.parameters(), strict=True):
        assert torch.equal(found, expected)
    matrices = next(optimizer for optimizer in before if isinstance(optimizer, AdamWInt8Moments))
    assert {group["weight_decay"] for group in matrices.param_groups} == {0.0, 0.1}


@pytest.mark.parametrize(
    ("saved_as", "loaded_as"), [("fp32", "int8"), ("bf16", "int8"), ("int8", "fp32"), ("int8", "bf16")]
)
def test_the_state_of_one_format_loads_as_the_other(saved_as: str, loaded_as: str) -> None:
    model = net()
    optimizers = build_optimizers(model, INT8.model_copy(update={"state_dtype": saved_as}))
    train(model, optimizers, 1, 2)
    saved = copy.deepcopy(optimizer_state(names_of(model), optimizers))
    others = build_optimizers(model, INT8.model_copy(update={"state_dtype": loaded_as}))
    load_optimizer_state(names_of(model), others, saved)
    loaded = optimizer_state(names_of(model), others)
    assert loaded.keys() >= {"0.weight/exp_avg_sq", "0.weight/step"}
    assert (loaded["0.weight/exp_avg"].dtype == torch.uint8) == (loaded_as == "int8")
    back = build_optimizers(model, INT8.model_copy(update={"state_dtype": "fp32"}))
    load_optimizer_state(names_of(model), back, loaded)
    floats = build_optimizers(model, INT8.model_copy(update={"state_dtype": "fp32"}))
    load_optimizer_state(names_of(model), floats, saved)
    for name, expected in optimizer_state(names_of(model), floats).items():
        found = optimizer_state(names_of(model), back)[name]
        assert torch.linalg.norm(found - expected) <= 0.02 * torch.linalg.norm(expected), name


def test_what_is_missing_is_noticed() -> None:
    model = net()
    optimizers = build_optimizers(model, INT8)
    train(model, optimizers, 1, 1)
    names = list(optimizer_state(names_of(model), optimizers))
    assert missing_adam_key(names) is None
    for key in ("exp_avg", "exp_avg_scale", "exp_avg_sq_scale", "step"):
        assert missing_adam_key([name for name in names if name != f"0.weight/{key}"]) == f"0.weight/{key}"
