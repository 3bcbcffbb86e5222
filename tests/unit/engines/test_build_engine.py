"""The strategy that a configuration gets."""

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from drawbar.config.parallel_dims import ParallelDims
from drawbar.config.schema.run_config import CausalLMConfig, LoraSection, ParallelSection
from drawbar.config.strategies import Strategy
from drawbar.distributed.process_group import Distributed
from drawbar.distributed.rank_info import RankInfo
from drawbar.engines.build import build_engine, bytes_of_state, choose_strategy
from drawbar.errors import UserError
from drawbar.plan.fake_world import FakeWorld
from drawbar.runtime.seed import rng_bytes
from tiny import CPU, tiny_config, tiny_task


@pytest.mark.parametrize("strategy", ["auto", "single", "ddp", "zero1"])
def test_one_process_trains_the_bare_model(strategy: str) -> None:
    config = tiny_config(parallel=ParallelSection(strategy=strategy))
    engine = build_engine(tiny_task(config), config, Distributed(RankInfo(), CPU, timeout=60), total_steps=1)
    assert not isinstance(engine.executor.training_forward.module, DistributedDataParallel)


@pytest.mark.parametrize(
    ("strategy", "said"), [("auto", "single (one process)"), ("zero1", "zero1 (as set; one process)")]
)
def test_the_strategy_of_a_training_is_said_once(strategy: str, said: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    config = tiny_config(parallel=ParallelSection(strategy=strategy))
    build_engine(tiny_task(config), config, Distributed(RankInfo(), CPU, timeout=60), total_steps=1)
    assert [line for line in caplog.messages if line.startswith("strategy: ")] == [f"strategy: {said}"]


def test_single_refuses_two_processes() -> None:
    config = tiny_config(parallel=ParallelSection(strategy="single"))
    world = Distributed(
        RankInfo(rank=0, world_size=2, local_rank=0, local_world_size=2), torch.device("cpu"), timeout=60
    )
    with pytest.raises(UserError, match=r"2 processes[\s\S]*parallel.strategy=ddp"):
        build_engine(tiny_task(config), config, world, total_steps=1)


def test_what_cannot_run_here_is_refused() -> None:
    config = tiny_config(parallel=ParallelSection(strategy="dp"))
    with pytest.raises(UserError, match=r"dp[\s\S]*several CUDA devices"):
        build_engine(tiny_task(config), config, Distributed(RankInfo(), CPU, timeout=60), total_steps=1)


def test_one_process_can_be_sharded() -> None:
    """Of use on one GPU with offload."""
    config = tiny_config(parallel=ParallelSection(strategy="fsdp"))
    dims = ParallelDims.of(config.parallel, 1)
    with Distributed(RankInfo(), CPU, 60, dims) as world:
        engine = build_engine(tiny_task(config), config, world, total_steps=1)
        assert isinstance(engine.executor.training_forward.module, FSDPModule)
    assert not torch.distributed.is_initialized()


def _fail(*_: Any) -> None:
    raise KeyError("boom")


@pytest.mark.parametrize(
    ("builder", "what"),
    [
        (_fail, r"builder of the strategy fails: KeyError: 'boom' \(.*test_build_engine.py:\d+\)"),
        (lambda *_: None, "returned NoneType, not EngineParts"),
        ("own_builders:absent", "has no attribute 'absent'"),
        ("no_such_module:build", r"pip install no_such_module"),
    ],
)
def test_a_faulty_builder_of_a_user_is_named(builder: Any, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType("own_builders")
    module.mine = Strategy("mine", builder)
    monkeypatch.setitem(sys.modules, "own_builders", module)
    config = tiny_config(parallel=ParallelSection(strategy="own_builders:mine"))
    with pytest.raises(UserError, match=what) as caught:
        build_engine(tiny_task(config), config, Distributed(RankInfo(), CPU, timeout=60), total_steps=1)
    assert caught.value.where == "parallel.strategy=own_builders:mine"


LLAMA_8B = {
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}


@pytest.mark.parametrize(
    ("sections", "low", "high", "strategy"),
    [
        ({"precision": "bf16", "lora": LoraSection()}, 17e9, 19e9, "ddp"),  # the embedding stays fp32
        ({"precision": "fp32", "lora": LoraSection()}, 32e9, 34e9, "ddp"),
        ({"precision": "bf16"}, 128e9, 129e9, "fsdp"),
    ],
)
def test_frozen_weights_take_what_they_are_stored_in(
    sections: dict[str, Any], low: float, high: float, strategy: str
) -> None:
    task = CausalLMConfig(model="llama", from_scratch=LLAMA_8B)
    config = tiny_config(**sections).model_copy(update={"task": task})
    before = rng_bytes()
    assert low < bytes_of_state(tiny_task(config), config) < high
    world = FakeWorld(0, ParallelDims.of(config.parallel, 8), 8)
    assert choose_strategy(tiny_task(config), config, world, 80 * 2**30)[0] == strategy
    assert rng_bytes() == before, "a run with strategy auto would begin with other adapters"
