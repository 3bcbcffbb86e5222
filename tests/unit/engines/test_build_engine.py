"""The strategy that a configuration gets."""

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from drawbar.config.parallel_dims import ParallelDims
from drawbar.config.schema.run_config import ParallelSection
from drawbar.distributed.process_group import Distributed
from drawbar.distributed.rank_info import RankInfo
from drawbar.engines.build import build_engine
from drawbar.errors import UserError
from tiny import CPU, tiny_config, tiny_task


@pytest.mark.parametrize("strategy", ["auto", "single", "ddp", "zero1"])
def test_one_process_trains_the_bare_model(strategy: str) -> None:
    config = tiny_config(parallel=ParallelSection(strategy=strategy))
    engine = build_engine(tiny_task(config), config, Distributed(RankInfo(), CPU, timeout=60), total_steps=1)
    assert not isinstance(engine.executor.training_module.module, DistributedDataParallel)


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
        assert isinstance(engine.executor.training_module.module, FSDPModule)
    assert not torch.distributed.is_initialized()
