"""Casts of weights under autocast: once a step where they are trained, none where they are frozen, the same bits."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from drawbar.config.schema.run_config import LoraSection, ParallelSection
from drawbar.data.loader import MicroBatch
from drawbar.distributed.process_group import Distributed
from drawbar.distributed.rank_info import RankInfo
from drawbar.engines import executors, local_model
from drawbar.engines.engine import Engine
from drawbar.parallel.precision import keep_trained_weights_in_fp32
from tiny import CPU, Numbers, random_batch, tiny_config, tiny_engine, unchecked_engine

WEIGHT = "model.layers.1.mlp.down_proj.weight"


class CountCasts(TorchDispatchMode):
    """Counts the casts of tensors of one shape, by the format that they are cast to."""

    def __init__(self, shape: torch.Size) -> None:
        super().__init__()
        self.shape = shape
        self.count = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = op(*args, **(kwargs or {}))
        if op is torch.ops.aten._to_copy.default and args[0].shape == self.shape and made.dtype == torch.bfloat16:
            self.count += 1
        return made


def train(engine: Engine, steps: int = 2) -> list[torch.Tensor]:
    """Loss and gradient norm of steps of three micro-batches each, and the weights after them."""
    batches = [MicroBatch(random_batch(engine.task, rows=2, seed=seed)) for seed in range(3)]  # type: ignore[arg-type]
    results = [engine.train_step(batches) for _ in range(steps)]
    return [
        *(value for result in results for value in (result.loss, result.grad_norm)),
        *(parameter.detach().float() for parameter in engine.module.parameters()),
    ]


def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_trained_weight_is_cast_once_a_step(monkeypatch: pytest.MonkeyPatch, recompute: Any) -> None:
    config = tiny_config(precision="bf16", parallel=ParallelSection(activation_checkpointing=recompute))
    engine = tiny_engine(config)
    shape = engine.module.get_parameter(WEIGHT).shape
    with CountCasts(shape) as mode:
        once = train(engine)
    assert mode.count == 2 * 2  # steps, layers
    monkeypatch.setattr(executors, "cast_weights_once", lambda *_: nullcontext())
    with CountCasts(shape) as mode:
        each = train(tiny_engine(config))
    assert mode.count >= 3 * 2 * 2
    assert same(once, each)


def test_frozen_weights_are_stored_low_where_autocast_would_cast_them(monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config(precision="bf16", lora=LoraSection())
    engine = tiny_engine(config)
    formats = {name: p.dtype for name, p in engine.module.named_parameters()}
    low = {name for name, dtype in formats.items() if dtype == torch.bfloat16}
    assert low == {name for name in formats if "proj" in name and "lora" not in name} | {"lm_head.weight"}
    stored_low = train(engine)
    monkeypatch.setattr(local_model, "store_frozen_weights_low", lambda *_: None)
    fp32 = tiny_engine(config)
    assert {p.dtype for p in fp32.module.parameters()} == {torch.float32}
    rounded = train(fp32)
    for index, (name, dtype) in enumerate(formats.items(), start=4):
        rounded[index] = rounded[index].to(dtype).float() if name in low else rounded[index]
    assert same(stored_low, rounded)


class HalfFrozen(Numbers):
    def build_model(self) -> nn.Module:
        model = super().build_model()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("layers.0" not in name)
        return model


def saved_weights(precision: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    config = tiny_config(precision=precision)
    return unchecked_engine(HalfFrozen(config), config, Distributed(RankInfo(), CPU, timeout=60), 10).state().model


def test_frozen_weights_that_are_saved_keep_their_bits() -> None:
    fp32, bf16 = saved_weights("fp32"), saved_weights("bf16")
    assert all(torch.equal(tensor, bf16[name]) for name, tensor in fp32.items())


def test_nothing_changes_in_fp32() -> None:
    module: nn.Module = tiny_engine(tiny_config(lora=LoraSection())).module
    assert {parameter.dtype for parameter in module.parameters()} == {torch.float32}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_trained_weights_become_fp32_and_frozen_ones_stay(dtype: torch.dtype) -> None:
    model = nn.ModuleDict({"frozen": nn.BatchNorm1d(3), "trained": nn.BatchNorm1d(3), "tied": nn.Linear(3, 3)}).to(
        dtype
    )
    model["frozen"].requires_grad_(False)
    model["tied"].register_parameter("bias", model["trained"].bias)
    assert keep_trained_weights_in_fp32(model) == {dtype}
    assert {model["frozen"].weight.dtype, model["frozen"].running_mean.dtype} == {dtype}
    assert {model["trained"].weight.dtype, model["trained"].running_mean.dtype} == {torch.float32}
    assert model["tied"].bias is model["trained"].bias
    assert keep_trained_weights_in_fp32(model) == set(), "nothing is left to convert"
