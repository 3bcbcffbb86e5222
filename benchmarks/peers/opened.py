"""The parts of a drawbar run without the run, for what is measured below the training loop."""

from dataclasses import dataclass
from typing import Any

import drawbar
from benchmarks.peers.recorder import default_device
from drawbar.distributed.process_group import Distributed
from drawbar.distributed.rank_info import RankInfo
from drawbar.engines.build import build_engine
from drawbar.engines.engine import Engine
from drawbar.parallel.precision import choose_formats
from drawbar.runtime.seed import seed_everything
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


def open_task(overrides: list[str]) -> Opened:
    """Build the task, seeded as a run is."""
    world, console = Distributed(RankInfo(), default_device(), timeout=600), make_console(False)
    config = choose_formats(drawbar.load_config(None, overrides).config, world.device)
    seed_everything(config.run.seed)
    return Opened(config, world, build_task(task_class(config.task.type), config, world, config.run_dir), console)
