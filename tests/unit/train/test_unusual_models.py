"""Models of users' own, with parameters and buffers that transformers' models do not have: they compute the same under
every strategy, and are resumed exactly, or are refused before the first step."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from drawbar.checkpoint.read import open_snapshot
from drawbar.errors import ExitCode, UserError
from drawbar.runtime.safetensors_reader import parameters_on_meta
from drawbar.tasks.causal_lm import CausalLM
from runs import Fit, losses

SETTINGS = ("optim.schedule=constant", "eval.every=null")
FSDP = "parallel.strategy=fsdp"


class Scale(nn.Module):
    """Multiplies by numbers of its own."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.factor = nn.Parameter(1 + torch.randn(size) * 0.1)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * self.factor


class Expanded(Scale):
    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.register_buffer("rows", torch.arange(size).float().expand(4, size))


class Teacher(Scale):
    def __init__(self, size: int, persistent: bool = True) -> None:
        super().__init__(size)
        self.register_buffer("teacher", self.factor.detach().clone(), persistent=persistent)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden) * self.teacher


class ShortIntegers(Scale):
    """A dtype that no backend broadcasts."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.register_buffer("places", torch.arange(size, dtype=torch.int16))


class EightBits(Scale):
    """A dtype that gloo does not know, of a buffer that may change: it is shared before a save."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.register_buffer("scales", torch.ones(size).to(torch.float8_e4m3fn))


class Empty(Scale):
    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.nothing = nn.Parameter(torch.zeros(0, size), requires_grad=False)


class Copied(Scale):
    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        destination[prefix + "factor"] = self.factor.detach().clone()


class Queue(Scale):
    """A queue that grows in each training forward; ``at_once``: in the first forward of any kind."""

    def __init__(self, size: int, at_once: bool = False) -> None:
        super().__init__(size)
        self.at_once = at_once
        if not at_once:
            self.register_buffer("queue", torch.zeros(0, size))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        mean = hidden.detach().mean((0, 1), keepdim=False)[None]
        if self.at_once:
            self.register_buffer("queue", mean)
        elif self.training:
            self.queue = torch.cat((self.queue, mean))
        return super().forward(hidden)


def task_of(make: Callable[[int], nn.Module]) -> type[CausalLM]:
    class Odd(CausalLM):
        def build_model(self) -> nn.Module:
            model: Any = super().build_model()
            model.model.norm = nn.Sequential(model.model.norm, make(model.config.hidden_size))
            return model

        def build_meta_model(self) -> nn.Module:
            with parameters_on_meta():
                return self.build_model()

        def stored_weights(self, meta_model: nn.Module) -> None:
            return None

    return Odd


@pytest.mark.exhaustive
@pytest.mark.parametrize("make", [Scale, Expanded, Teacher, ShortIntegers, EightBits, Empty])
def test_a_strategy_changes_nothing_and_a_resumed_run_is_the_same(
    make: Callable[[int], nn.Module], fit: Fit, run: Path
) -> None:
    task = task_of(make)
    fit(*SETTINGS, "train.steps=6", "run.name=whole", task=task)
    fit(*SETTINGS, "train.steps=6", "run.name=sharded", "checkpoint.layout=parts", FSDP, task=task)
    for strategy in ((), (FSDP,)):
        name = f"run.name=resumed{len(strategy)}"
        fit(*SETTINGS, "train.steps=3", name, *strategy, task=task)
        fit(*SETTINGS, "train.steps=6", name, task=task)
    runs = run.parent
    expected = open_snapshot(runs / "whole" / "checkpoints" / "step-00000006")
    for name in ("sharded", "resumed0", "resumed1"):
        assert losses(runs / name) == pytest.approx(losses(runs / "whole"), rel=1e-5), name
        found = open_snapshot(runs / name / "checkpoints" / "step-00000006")
        for tensor in expected.model:
            torch.testing.assert_close(
                found.model[tensor].double(), expected.model[tensor].double(), rtol=1e-4, atol=1e-6
            )


def test_a_state_dict_of_copies_is_refused(fit: Fit, run: Path) -> None:
    with pytest.raises(UserError, match=r"model.norm.1.factor in its state_dict is a copy"):
        fit(*SETTINGS, task=task_of(Copied))
    assert not run.exists()


def test_a_buffer_made_of_a_parameter_that_is_not_saved_is_refused_where_it_cannot_be_filled(fit: Fit) -> None:
    def make(size: int) -> nn.Module:
        return Teacher(size, persistent=False)

    with pytest.raises(UserError, match="the buffer teacher of Teacher is computed from a parameter, but is not saved"):
        fit(*SETTINGS, FSDP, task=task_of(make))
    assert fit(*SETTINGS, task=task_of(make)).exit_code == ExitCode.DONE


@pytest.mark.parametrize("at_once", [True, False])
def test_a_buffer_that_appears_or_grows_is_refused_before_it_is_saved(at_once: bool, fit: Fit, run: Path) -> None:
    def make(size: int) -> nn.Module:
        return Queue(size, at_once)

    before = "none" if at_once else r"\[0, \d+\]"
    with pytest.raises(UserError, match=rf"its buffer model.norm.1.queue was {before} when .*, and is \[[12], \d+\]"):
        fit(*SETTINGS, "train.steps=6", "train.micro_batch=4", task=task_of(make))
    assert not list(run.glob("checkpoints/step-*"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda scale: setattr(scale, "lazy", nn.LazyLinear(2)), r"has no shape yet: model\.norm\.1\.lazy\.weight"),
        (lambda scale: setattr(scale, "wave", nn.Parameter(torch.ones(2) * 1j)), r"norm\.1\.wave is torch\.complex64"),
    ],
)
def test_parameters_that_nothing_can_train_are_refused(change: Any, message: str, fit: Fit, run: Path) -> None:
    def make(size: int) -> nn.Module:
        scale = Scale(size)
        change(scale)
        return scale

    with pytest.raises(UserError, match=message):
        fit(*SETTINGS, task=task_of(make))
    assert not run.exists()
