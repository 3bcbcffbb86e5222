"""Weights in and out of a model: what does not fit is refused, and nothing is changed then."""

import pytest
import torch
from torch import nn

from drawbar.errors import UserError
from drawbar.parallel.weights import check_weights, materialize
from drawbar.runtime.safetensors_reader import parameters_on_meta


def test_weights_that_do_not_fit_are_refused_by_name() -> None:
    here = {"a.weight": torch.ones(2, 3), "b.weight": torch.ones(4)}
    check_weights(here, dict(here))
    for tensors, problem in (
        ({"a.weight": torch.ones(2, 3)}, "b.weight is missing"),
        ({**here, "c.weight": torch.ones(1)}, "c.weight is not one of this model's saved tensors"),
        ({**here, "b.weight": torch.ones(5)}, r"b.weight has shape \[5\] instead of \[4\]"),
    ):
        with pytest.raises(UserError, match=problem):
            check_weights(here, tensors)


def test_materialized_parameters_are_still_tied_and_buffers_keep_their_values() -> None:
    with parameters_on_meta():
        model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5, bias=False))
        model[1].weight = model[0].weight
        model.register_buffer("scale", torch.full((2,), 7.0))
    materialize(model, torch.device("cpu"), torch.device("cpu"))
    assert model[1].weight is model[0].weight
    assert not model[0].weight.is_meta
    assert model.scale.tolist() == [7.0, 7.0]


def test_buffers_go_where_the_forward_is_also_when_parameters_are_offloaded() -> None:
    with parameters_on_meta():
        model = nn.BatchNorm1d(3)
    materialize(model, torch.device("cpu"), buffer_device=torch.device("meta"))
    assert [parameter.device.type for parameter in model.parameters()] == ["cpu", "cpu"]
    assert {buffer.device.type for buffer in model.buffers()} == {"meta"}
