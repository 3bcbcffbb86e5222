"""Which engine serves a configuration. The only place that maps strategies to engines."""

from drawbar.config.schema import RunConfig
from drawbar.engines.engine import Engine
from drawbar.engines.native import NativeEngine
from drawbar.errors import UserError
from drawbar.runtime.dist import World
from drawbar.runtime.log import logger
from drawbar.tasks.task import Task


def choose_engine(task: Task, config: RunConfig, world: World, total_steps: int) -> Engine:
    """Build the engine for this world.

    Raises:
        UserError: the strategy cannot run on this many processes.
    """
    strategy = config.parallel.strategy
    if strategy == "auto":
        strategy = "ddp" if world.size > 1 else "single"
        logger.info("strategy: %s (%d process%s)", strategy, world.size, "" if world.size == 1 else "es")
    if strategy == "single" and world.size > 1:
        raise UserError(
            f"parallel.strategy is single, but {world.size} processes were started",
            where="parallel.strategy",
            remedy="set parallel.strategy=ddp, or start one process",
        )
    if strategy not in ("single", "ddp"):
        raise UserError(
            f"parallel.strategy={strategy} is not in this version",
            where="parallel.strategy",
            remedy="set parallel.strategy to auto, single or ddp",
        )
    return NativeEngine(task, config, world, total_steps)
