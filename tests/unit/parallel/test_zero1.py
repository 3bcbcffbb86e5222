"""ZeRO-1: an optimizer whose parameters are dealt out to the ranks is the same optimizer."""

from itertools import pairwise

import pytest
import torch
from torch import nn

from drawbar.config.schema.run_config import OptimSection
from drawbar.distributed.process_group import Distributed
from drawbar.distributed.rank_info import RankInfo
from drawbar.optim.optimizers import build_optimizers
from drawbar.parallel.zero1 import zero1_optimizer
from harness import run_ranks

FORMATS = ("fp32", "bf16")


def train(muon_precision: str, shared: bool) -> list[list[float]]:
    """The weights after two steps of Muon on matrices with gradients that every rank has."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise((6, 4, 8, 3))))
    optimizers = build_optimizers(model, OptimSection(name="muon", lr=0.1, muon_precision=muon_precision))
    if shared:
        optimizers = [zero1_optimizer(optimizer) for optimizer in optimizers]
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        for optimizer in optimizers:
            optimizer.step()
    return [parameter.flatten().tolist() for parameter in model.parameters()]


def train_on_ranks() -> list[list[list[float]]]:
    with Distributed(RankInfo.from_environment(), torch.device("cpu"), timeout=60):
        return [train(muon_precision, shared=True) for muon_precision in FORMATS]


@pytest.fixture(scope="module")
def of_ranks() -> list[list[list[list[float]]]]:
    return run_ranks(train_on_ranks, 2)


@pytest.mark.parametrize("muon_precision", FORMATS)
def test_muon_is_the_same(muon_precision: str, of_ranks: list[list[list[list[float]]]]) -> None:
    expected = train(muon_precision, shared=False)
    assert [rank[FORMATS.index(muon_precision)] for rank in of_ranks] == [expected, expected]
