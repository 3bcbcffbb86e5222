"""Replication: gradients are averaged over ranks after the last micro-batch, and only then."""

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn

from drawbar.distributed.process_group import Distributed
from drawbar.distributed.rank_info import RankInfo
from drawbar.errors import UserError
from drawbar.parallel.ddp import gradient_sync, replicate
from harness import run_ranks

CPU = torch.device("cpu")


def total(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).sum()


def gradients_after_each_backward(reduce_dtype: str) -> list[float]:
    """Of a weight whose gradient is 1 on rank 0 and 3 on rank 1, for three micro-batches."""
    with Distributed(RankInfo.from_environment(), CPU, timeout=60) as world:
        model = nn.Linear(1, 1, bias=False)
        replica = replicate(model, total, reduce_dtype)
        found = []
        for number in range(3):
            with gradient_sync(replica, last=number == 2):
                replica(torch.tensor([[1.0 + 2.0 * world.rank]])).backward()
            assert model.weight.grad is not None
            found.append(model.weight.grad.item())
        return found


@pytest.mark.parametrize("reduce_dtype", ["fp32", "bf16"])
def test_gradients_are_averaged_after_the_last_micro_batch(reduce_dtype: str) -> None:
    assert run_ranks(gradients_after_each_backward, 2, reduce_dtype) == [[1.0, 2.0, 6.0], [3.0, 6.0, 6.0]]


def test_a_buffer_that_cannot_be_broadcast_is_refused() -> None:
    model = nn.Linear(1, 1)
    model.register_buffer("places", torch.zeros(2, dtype=torch.int16), persistent=False)
    with pytest.raises(UserError, match=r"cannot broadcast places: it is torch\.int16"):
        replicate(model, total)


def outlived() -> bool:
    """Whether the process group is still there when the last replica is gone, which must not be the one to free it."""
    with Distributed(RankInfo.from_environment(), CPU, timeout=60) as world:
        replica = replicate(nn.Linear(1, 1), total)
        replica(torch.ones(1, 1)).backward()
        group = weakref.ref(dist.group.WORLD)
        assert world.size == 2
    del replica
    gc.collect()
    return group() is not None


def test_a_replica_is_not_the_last_to_hold_the_process_group() -> None:
    assert run_ranks(outlived, 2) == [True, True]


def test_one_process_has_nothing_to_wait_for() -> None:
    model = nn.Linear(1, 1, bias=False)
    for last in (False, True):
        with gradient_sync(model, last=last):
            model(torch.ones(1, 1)).sum().backward()
    assert model.weight.grad is not None
    assert model.weight.grad.item() == 2.0
