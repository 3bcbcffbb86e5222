"""ZeRO-1 (Rajbhandari et al. 2020, arXiv:1910.02054): every rank keeps the optimizer state of some parameters, updates
these, and sends them to the others. Uses torch's ``ZeroRedundancyOptimizer``, with DDP."""

import inspect
import sys
from typing import TYPE_CHECKING, TypeGuard

from torch.optim import Optimizer

if TYPE_CHECKING:
    from torch.distributed.optim import ZeroRedundancyOptimizer

_HOME = "torch.distributed.optim"
"""torch.distributed.optim compiles eight optimizers on import, so it is imported only when needed."""


def zero1_optimizer(optimizer: Optimizer) -> "ZeroRedundancyOptimizer":
    """The same optimizer, with its parameters partitioned over the ranks. It must not have made a step.

    If all parameters have the same dtype, they become views of one tensor per rank, which is sent in one broadcast.
    Otherwise torch sends them one by one.
    """
    from torch.distributed.optim import ZeroRedundancyOptimizer

    groups = [
        {name: value for name, value in group.items() if name != "param_names"} for group in optimizer.param_groups
    ]
    known = inspect.signature(type(optimizer)).parameters  # AdamW's defaults have a key that AdamW() does not accept
    defaults = {name: value for name, value in optimizer.defaults.items() if name in known}
    one_dtype = len({parameter.dtype for group in groups for parameter in group["params"]}) == 1
    return ZeroRedundancyOptimizer(
        groups, optimizer_class=type(optimizer), parameters_as_bucket_view=one_dtype, **defaults
    )


def local_optimizer(optimizer: Optimizer) -> Optimizer:
    """The optimizer with this rank's partition of the state."""
    return optimizer.optim if is_zero1(optimizer) else optimizer


def is_zero1(optimizer: Optimizer) -> "TypeGuard[ZeroRedundancyOptimizer]":
    """Whether its state is partitioned over the ranks."""
    return _HOME in sys.modules and isinstance(optimizer, sys.modules[_HOME].ZeroRedundancyOptimizer)
