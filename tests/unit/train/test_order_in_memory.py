"""Parameters whose elements lie in memory in another order than that of their indices, as channels_last leaves them."""

from pathlib import Path

import pytest
import torch
from torch import nn

from points import Points, write_points
from runs import fit_in, losses


class Transposed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.mix = nn.Parameter(torch.arange(4.0).view(2, 2).t() / 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x + x @ self.mix)


class TransposedPoints(Points):
    def build_model(self) -> nn.Module:
        model = Transposed(super().build_model())
        assert not model.mix.is_contiguous()
        return model


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return write_points(tmp_path)


@pytest.mark.exhaustive
def test_a_resumed_run_is_the_same_run(project: Path) -> None:
    settings = ("optim.schedule=constant", "optim.lr=0.1", "tracking.log_every=1")
    fit_in(project, "run.name=whole", "train.steps=8", *settings, task=TransposedPoints)
    for steps in (4, 8):
        fit_in(project, "run.name=parts", f"train.steps={steps}", *settings, task=TransposedPoints)
    assert losses(project / "runs" / "parts") == losses(project / "runs" / "whole")
