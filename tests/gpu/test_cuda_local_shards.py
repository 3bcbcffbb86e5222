"""What a rank writes of a checkpoint in parts is copied from a CUDA device to host memory that is never swapped out."""

import pytest
import torch

from drawbar.distributed.process_group import Distributed
from drawbar.distributed.rank_info import RankInfo
from drawbar.engines.local_shards import ShardCopier
from tiny import random_step, tiny_config, tiny_engine

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_copies_are_whole_and_share_nothing_with_the_run() -> None:
    world = Distributed(RankInfo(), torch.device("cuda", 0), timeout=60)
    engine = tiny_engine(tiny_config(), world)
    engine.train_step(random_step(engine, seed=1))
    state = engine.state()
    own = ShardCopier(engine, world).copy()
    for _ in range(3):
        engine.train_step(random_step(engine, seed=2))
    for shards, wanted in ((own.model, state.model), (own.optimizer, state.optimizer)):
        assert {shard.name for shard in shards} == wanted.keys() - own.tied.keys()
        for shard in shards:
            assert torch.equal(shard.data, wanted[shard.name]), shard.name
            assert shard.data.is_pinned() or shard.data.dim() == 0, shard.name  # a step may be counted on the host
