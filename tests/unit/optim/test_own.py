"""Optimizers and schedules of a user's or of a library's, by ``package.module:name``."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from drawbar.config.schema.run_config import OptimSection
from drawbar.errors import UserError
from drawbar.optim.optimizers import build_optimizers
from drawbar.optim.schedules import learning_rate_scale
from runs import Fit, losses, weights

MODULE = """
import torch


class Counting(torch.optim.SGD):
    def step(self, closure=None):
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["number"] = self.state[parameter].get("number", 0) + 1


class Signs(torch.optim.Optimizer):
    # keeps one of AdamW's three keys

    def __init__(self, groups, lr, beta=0.9):
        super().__init__(groups, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                average = self.state[parameter].setdefault("exp_avg", torch.zeros_like(parameter))
                average.lerp_(parameter.grad, 1 - group["beta"])
                parameter.sub_(group["lr"] * average.sign())


def halves(step, total_steps, optim):
    return 0.5 ** (step + 1)


def negative(step, total_steps, optim):
    return -1


def wrong(step):
    return 1


def nothing(groups, lr):
    return groups
"""


@pytest.fixture(autouse=True)
def own(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / "own_optim.py").write_text(MODULE)
    monkeypatch.syspath_prepend(project)
    monkeypatch.delitem(sys.modules, "own_optim", raising=False)


def test_an_optimizer_of_torchs_gets_the_groups_the_rate_and_its_options() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))
    config = OptimSection(name="torch.optim:RAdam", lr=0.1, weight_decay=0.2, options={"betas": [0.8, 0.9]})
    (optimizer,) = build_optimizers(model, config)
    assert type(optimizer) is torch.optim.RAdam
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.2, 0.0]
    assert optimizer.defaults["betas"] == [0.8, 0.9]
    assert optimizer.defaults["lr"] == 0.1


@pytest.mark.parametrize("name", ["torch.optim:NAdam", "own_optim:Signs"])
def test_a_run_is_the_same_when_it_is_resumed(name: str, fit: Fit, project: Path) -> None:
    settings = (
        f"optim.name={name}",
        "optim.warmup=0",
        "optim.schedule=own_optim:halves",
        "checkpoint.every=2",
    )
    fit("train.steps=4", "run.name=straight", *settings)
    fit("train.steps=2", "run.name=resumed", *settings)
    fit("train.steps=4", "run.name=resumed", *settings)
    straight, resumed = (project / "runs" / name for name in ("straight", "resumed"))
    assert losses(straight) == losses(resumed)
    assert all(torch.equal(weights(resumed, 4)[name], tensor) for name, tensor in weights(straight, 4).items())


def test_a_schedule_gives_the_share_of_the_peak() -> None:
    config = OptimSection(schedule="own_optim:halves", schedule_steps=2)
    assert [learning_rate_scale(step, 10, config) for step in range(3)] == [0.5, 0.25, 0.25]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("negative", "own_optim:negative gives -1"),
        ("wrong", "own_optim:wrong fails: TypeError"),
        ("halfs", "the module has no 'halfs'; did you mean own_optim:halves"),
    ],
)
def test_a_schedule_that_gives_no_share_is_refused(name: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        learning_rate_scale(3, 10, OptimSection(schedule=f"own_optim:{name}"))
    assert caught.value.where == "optim.schedule"


def test_a_schedule_is_tried_before_there_is_a_run(fit: Fit, run: Path) -> None:
    with pytest.raises(UserError, match="own_optim:negative gives -1"):
        fit("optim.schedule=own_optim:negative", "train.steps=4", "optim.warmup=0")
    assert not run.exists()


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("torch.optim:RAdan", {}, "did you mean torch.optim:RAdam"),
        ("torch.optim:RAdam", {"beta": 1}, "cannot be created with these options"),
        ("own_optim:nothing", {}, "makes a list, which is no torch.optim.Optimizer"),
    ],
)
def test_what_is_no_optimizer_is_refused(name: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        build_optimizers(nn.Linear(2, 2), OptimSection(name=name, options=options))


def test_state_that_cannot_be_saved_is_refused_after_the_first_step(fit: Fit) -> None:
    with pytest.raises(UserError, match="number as int, and checkpoints hold tensors") as caught:
        fit("optim.name=own_optim:Counting", "train.steps=4", "checkpoint.every=4")
    assert caught.value.where == "optim.name"
