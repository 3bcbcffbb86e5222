"""``Strategy``: name, features and builder of a value of ``parallel.strategy``. Without torch.

Code tests features (``strategy.shards_parameters``), rarely names. To add a strategy, write a function that builds the
parts of its engine (see ``drawbar.engines.parts``), and a ``Strategy`` that names it. Register it here or, in another
package, as an entry point of the group ``drawbar.strategies``; a run can also name it as ``package.module:name``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from drawbar.config.io.user_modules import find_by_name
from drawbar.util.registry import Registry

AUTO = "auto"
"""The strategy is chosen when a run starts: see ``ParallelSection.strategy``."""


@dataclass(frozen=True)
class Strategy:
    """How parameters, gradients and optimizer state are distributed over the data-parallel ranks."""

    name: str
    builder: str | Callable[..., Any]
    """``build(task, config, world)``, which returns the engine's parts (``world`` is the ``Distributed``), or its
    location as ``package.module:function``; only ranks import it."""
    one_process: bool = False
    """Runs in one process."""
    many_devices: bool = False
    """The process computes on several devices, in threads."""
    shards_parameters: bool = False
    """Each data-parallel rank holds a shard of every parameter, as a DTensor."""
    supports_model_parallel: bool = False
    """Supports one or more of tensor, pipeline and context parallelism; ``config.rules`` refuses the rest."""
    offloads: bool = False
    """Can keep its state in host memory."""
    has_engine: bool = False
    """Another library's engine, such as DeepSpeed's, casts, reduces, updates, and shards layers in its own way."""
    zero_stages: bool = False
    """``parallel.zero_stage`` sets what it shards."""

    def build(self, *args: Any) -> Any:
        """The parts of an engine: see ``drawbar.engines.parts.EngineParts``."""
        if not isinstance(self.builder, str):
            return self.builder(*args)
        module, _, function = self.builder.partition(":")
        return getattr(import_module(module), function)(*args)


_TORCH = "drawbar.engines.torch_strategies"
_UNDECIDED = Strategy(AUTO, "", supports_model_parallel=True)  # ``auto`` may become one that supports it
BUILT_IN = (
    Strategy("single", f"{_TORCH}:build_single", one_process=True),
    Strategy("dp", f"{_TORCH}:build_dp", one_process=True, many_devices=True),
    Strategy("ddp", f"{_TORCH}:build_ddp", supports_model_parallel=True),
    Strategy("zero1", f"{_TORCH}:build_zero1"),
    Strategy("fsdp", f"{_TORCH}:build_fsdp", shards_parameters=True, supports_model_parallel=True, offloads=True),
)
STRATEGIES = Registry[Strategy]("strategy", "drawbar.strategies", {strategy.name: strategy for strategy in BUILT_IN})


def find_strategy(name: str) -> Strategy:
    """Find a strategy by name, or as ``package.module:name``. ``auto`` gives a placeholder, as it is resolved later.

    Raises:
        UserError: there is no such strategy.
    """
    if name == AUTO:
        return _UNDECIDED
    return find_by_name(STRATEGIES, name, "parallel.strategy", "strategy", lambda found: isinstance(found, Strategy))
