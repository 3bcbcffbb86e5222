"""The parts of a drawbar run without the run, for what is measured below the training loop."""

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

import drawbar
from benchmarks.peers.recorder import default_device
from drawbar.config.parallel_dims import ParallelDims
from drawbar.distributed.process_group import Distributed
from drawbar.distributed.rank_info import RankInfo
from drawbar.engines.build import build_engine
from drawbar.engines.engine import Engine
from drawbar.parallel.precision import choose_dtypes
from drawbar.runtime.seed import seed_everything
from drawbar.tasks.padding import choose_padding_free
from drawbar.tasks.task_registry import task_class
from drawbar.tracking.console import make_console
from drawbar.train.setup import build_task


@dataclass(frozen=True)
class Opened:
    """One process's configuration and task."""

    config: Any
    world: Distributed
    task: Any
    console: Any

    def engine(self, total_steps: int = 1000) -> Engine:
        return build_engine(self.task, self.config, self.world, total_steps)


def open_task(overrides: list[str], stack: ExitStack | None = None, device: torch.device | None = None) -> Opened:
    """Build the task, seeded as a run is.

    Args:
        stack: ends the process group, where this process is one of several ranks; without it, it is alone.
        device: by default, this rank's GPU, or the CPU.
    """
    config = drawbar.load_config(None, overrides).config
    rank = RankInfo() if stack is None else RankInfo.from_environment()
    dims = ParallelDims.of(config.parallel, rank.world_size)
    world, console = Distributed(rank, device or default_device(), timeout=600, dims=dims), make_console(False)
    if stack is not None:
        stack.enter_context(world)
    config = choose_dtypes(config, world.device)
    seed_everything(config.run.seed)
    task = build_task(task_class(config.task.type), config, world, config.run_dir)
    return Opened(choose_padding_free(task, config, world.device), world, task, console)
