"""How long a rank waits in the collectives of an engine for one that does not come."""

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from drawbar.config.parallel_dims import ParallelDims
from drawbar.config.schema.run_config import ParallelSection
from drawbar.distributed.process_group import Distributed
from drawbar.distributed.rank_info import RankInfo
from harness import run_ranks
from tiny import CPU, tiny_config, tiny_engine


def wait_alone() -> dict[str, float]:
    """How long rank 0 waits in each group that holds parts of the model; the other ranks stay away."""
    parallel = ParallelSection(strategy="fsdp", tensor=2)
    with Distributed(RankInfo.from_environment(), CPU, 60, ParallelDims.of(parallel, 4)) as world:
        world.timeout = timedelta(seconds=1)  # only now: joining may take longer on a busy machine
        engine = tiny_engine(tiny_config(parallel=parallel), world)
        mesh = next(parameter for parameter in engine.module.parameters()).device_mesh
        waited = {}
        for axis in mesh.mesh_dim_names if world.is_rank0 else ():
            begin = time.monotonic()
            try:
                dist.all_reduce(torch.ones(1), group=mesh.get_group(axis))
            except RuntimeError:
                waited[axis] = time.monotonic() - begin
        world.barrier("the test")
        return waited


@pytest.mark.exhaustive
def test_the_timeout_of_a_run_reaches_the_groups_of_a_mesh() -> None:
    """Torch's own would be 30 minutes."""
    waited, *_ = run_ranks(wait_alone, 4)
    assert list(waited) == ["dp_shard", "tp"]
    assert max(waited.values()) < 30
