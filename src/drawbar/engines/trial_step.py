"""Training steps without the optimizer update, to measure memory and time. They do not change the engine's state."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain

from torch.distributed.tensor import DTensor

from drawbar.data.loader import MicroBatch
from drawbar.engines.engine import Engine
from drawbar.engines.updaters import TorchUpdater
from drawbar.optim.bf16_moments import AdamWOwnMoments
from drawbar.parallel.buffers import kept_buffers
from drawbar.parallel.zero1 import local_optimizer
from drawbar.runtime.seed import rng_state, set_rng_state
from drawbar.tasks.batch import Batch


@contextmanager
def trial_step(engine: Engine, updater: TorchUpdater, micro_batches: Sequence[MicroBatch[Batch]]) -> Iterator[None]:
    """Context manager that runs forward and backward of a step, and keeps the gradients inside the context. On exit,
    weights, buffers and random generators are as before the step. Collective.

    Args:
        updater: the engine's updater; not a ``DeepSpeedUpdater``, which cannot discard gradients.
    """
    device = engine.world.device
    generators = rng_state(device)
    try:
        with kept_buffers(engine.module):
            engine.executor.forward_backward(list(micro_batches), scale=1.0)
            yield
    finally:
        updater.zero_grad()
        set_rng_state(generators, device)


def future_optimizer_bytes(updater: TorchUpdater) -> int:
    """Upper bound on the bytes that the first update will add to this rank's device: an optimizer without state creates
    up to two numbers per weight."""
    total = 0
    for optimizer in map(local_optimizer, updater.optimizers):
        if not optimizer.state:
            size = 2 if isinstance(optimizer, AdamWOwnMoments) else 4
            parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
            locals_ = [one.to_local() if isinstance(one, DTensor) else one for one in parameters]
            total += sum(2 * size * local.numel() for local in locals_ if local.device.type == updater.device.type)
    return total
