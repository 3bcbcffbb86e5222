"""A step on Apple's GPU, which has no float64, as far as it shows on machines that have none of these GPUs."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from drawbar.config.schema.run_config import OptimSection, TrainSection
from drawbar.parallel.gradients import sum_dtype
from drawbar.tasks.batch import Batch
from tiny import random_step, tiny_config, tiny_engine

MPS = torch.device("mps")


class NoFloat64(TorchDispatchMode):
    """Raises where an operator makes a float64 tensor, as MPS does."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            assert not isinstance(tensor, torch.Tensor) or tensor.dtype != torch.float64, f"{function} makes float64"
        return made


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "adafactor"])
def test_nothing_but_sums_of_many_numbers_is_float64(optimizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config(train=TrainSection(steps=10, gradient_clip=1.0), optim=OptimSection(name=optimizer, lr=1e-2))
    engine = tiny_engine(config)
    micro_batches = random_step(engine, seed=1)
    for module in ("drawbar.parallel.gradients", "drawbar.engines.executors"):
        monkeypatch.setattr(f"{module}.sum_dtype", lambda _: sum_dtype(MPS))
    with NoFloat64():
        assert engine.train_step(micro_batches).grad_norm > 0
        assert engine.eval_step(micro_batches[0].batch).loss > 0


def test_a_batch_of_float64_becomes_float32_on_mps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The move itself is left out: it needs such a GPU."""
    moved = torch.Tensor.to
    monkeypatch.setattr(torch.Tensor, "to", lambda t, *args, **kwargs: t if MPS in args else moved(t, *args, **kwargs))
    batch = Batch({"values": torch.ones(2, dtype=torch.float64), "input_ids": torch.ones(2, dtype=torch.int64)}, [0, 1])
    assert {name: tensor.dtype for name, tensor in batch.to(MPS).items()} == {
        "values": torch.float32,
        "input_ids": torch.int64,
    }
