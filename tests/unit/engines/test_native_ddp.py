"""The native engine on two ranks: when gradients travel, and what is the same everywhere."""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from drawbar.distributed.process_group import Distributed
from drawbar.distributed.rank_info import RankInfo
from harness import run_ranks
from tiny import CPU, random_step, tiny_config, tiny_engine, vector


def count_reductions() -> dict[str, Any]:
    with Distributed(RankInfo.from_environment(), CPU, timeout=60) as world:
        engine = tiny_engine(tiny_config(), world, seed=world.rank)
        model = engine.executor.training_forward.module
        assert isinstance(model, DistributedDataParallel)
        found: dict[str, Any] = {"buckets": [], "results": [], "start": vector(engine).numpy()}
        sizes: list[int] = []

        def counted(group: dist.ProcessGroup | None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
            sizes.append(bucket.buffer().numel())
            return allreduce_hook(group, bucket)

        model.register_comm_hook(None, counted)
        for micro_batches in (1, 4, 3):
            sizes.clear()
            result = engine.train_step(random_step(engine, seed=10 * world.rank, micro_batches=micro_batches))
            found["buckets"].append(list(sizes))
            found["results"].append((float(result.loss), float(result.grad_norm), result.num_targets, result.lr))
        return {**found, "end": vector(engine).numpy()}


def test_gradients_travel_once_a_step() -> None:
    """All of them in one bucket, after the last micro-batch; ranks agree on the step before it and after it."""
    first, second = run_ranks(count_reductions, 2)
    parameters = len(first["start"])
    assert first["buckets"] == second["buckets"] == [[parameters], [parameters], [parameters]]
    assert first["results"] == second["results"]
    assert (first["start"] == second["start"]).all()
    assert (first["end"] == second["end"]).all()
    assert (first["end"] != first["start"]).any()
