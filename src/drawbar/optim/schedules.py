"""Learning-rate schedules: the curves of transformers' ``get_scheduler``, as pure functions of the step.

A pure function needs no state in a checkpoint, and no resume can get it wrong.
"""

import math
from collections.abc import Callable
from functools import cache

from torch.optim import Optimizer

from drawbar.config.io.user_modules import cause, import_user_object
from drawbar.config.schema.run_config import OptimSection
from drawbar.errors import UserError

INVERSE_SQRT_TIMESCALE = 10_000
"""transformers' time scale, in steps, for ``inverse_sqrt`` without a warm-up."""


def learning_rate_scale(step: int, total_steps: int, config: OptimSection) -> float:
    """The learning rate of one update, as a share of the peak ``config.lr``.

    Args:
        step: 0-based index of the update about to be made.
        total_steps: number of updates in the whole run, T below; if ``config.schedule_steps`` is given, that is T, and
            each later update has the learning rate of update T − 1.
        config: names the curve. W is the number of warm-up steps, m is ``min_lr_ratio``, and
            p = (step − W) / (T − W) is the progress after the warm-up, at most 1.

    During the warm-up the scale is ``step / W``. So the first update has a learning rate of 0: that is how
    transformers counts, and the same name gives the same curve here. (``wsd`` warms up from m:
    ``m + (1 − m)·step / W``.) Afterwards:

    - ``constant``: 1.
    - ``linear``: ``m + (1 − m)·(1 − p)``.
    - ``cosine``: ``m + (1 − m)·(1 + cos(π·p)) / 2``.
    - ``polynomial``: ``m + (1 − m)·(1 − p)^power``. (transformers ends at the learning rate ``lr_end``, default
      1e-7, and not at a share of the peak.)
    - ``inverse_sqrt``: ``1 / sqrt((step − W + S) / S)``, where S is W, or 10,000 without a warm-up.
    - ``wsd``: 1, then over the last D = ⌈decay·T⌉ steps ``m + (1 − m)·(1 + cos(π·q)) / 2``, where q is the
      progress of the decay; transformers' ``warmup_stable_decay`` with its default shape. Where warm-up and decay
      overlap, the decay is shorter and starts after the warm-up.

    Your own, ``package.module:function``, is called with ``(step, total_steps, config)``, and also warms up.

    Raises:
        UserError: your own fails, or gives no number of at least 0.
    """
    if config.schedule_steps is not None:
        total_steps = config.schedule_steps
        step = min(step, total_steps - 1)
    if ":" in config.schedule:
        return _own_scale(step, total_steps, config)
    warmup = warmup_steps(total_steps, config)
    if step < warmup:
        return _from_floor(step / warmup, config) if config.schedule == "wsd" else step / warmup
    progress = _progress(step, warmup, total_steps)
    match config.schedule:
        case "constant":
            return 1.0
        case "linear":
            return _from_floor(1.0 - progress, config)
        case "cosine":
            return _from_floor(_half_cosine(progress), config)
        case "polynomial":
            return _from_floor((1.0 - progress) ** config.power, config)
        case "inverse_sqrt":
            timescale = warmup or INVERSE_SQRT_TIMESCALE
            return 1.0 / math.sqrt((step - warmup + timescale) / timescale)
        case "wsd":
            decay_start = max(warmup, total_steps - math.ceil(config.decay * total_steps))
            if step < decay_start:
                return 1.0
            return _from_floor(_half_cosine(_progress(step, decay_start, total_steps)), config)
    raise AssertionError(f"{config.schedule} is no schedule")


def _own_scale(step: int, total_steps: int, config: OptimSection) -> float:
    """What the user's function gives. Raises UserError if that is no share of a learning rate."""
    function = _own_function(config.schedule)
    try:
        scale = float(function(step, total_steps, config))
        if 0 <= scale < math.inf:
            return scale
        problem = f"gives {scale}"
    except Exception as error:  # noqa: BLE001 - whatever a user's function raises
        problem = f"fails: {cause(error)}"
    raise UserError(
        f"{config.schedule} {problem} for step {step} of {total_steps}",
        where="optim.schedule",
        remedy="let it return the share of the peak learning rate, from (step, total_steps, optim)",
    )


@cache
def _own_function(name: str) -> Callable[[int, int, OptimSection], float]:
    return import_user_object(name, "schedule", "optim.schedule", "function")


def warmup_steps(total_steps: int, config: OptimSection) -> int:
    """Number of warm-up steps; a fraction of all steps is rounded up, as transformers does."""
    return config.warmup if isinstance(config.warmup, int) else math.ceil(config.warmup * total_steps)


def set_learning_rate(optimizers: list[Optimizer], lr: float) -> None:
    """Give every parameter group of every optimizer this learning rate, times the group's ``lr_scale``, if any."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr * group.get("lr_scale", 1.0)


def _progress(step: int, start: int, end: int) -> float:
    return 1.0 if step >= end else (step - start) / (end - start)


def _half_cosine(progress: float) -> float:
    return (1.0 + math.cos(math.pi * progress)) / 2.0


def _from_floor(share: float, config: OptimSection) -> float:
    return config.min_lr_ratio + (1.0 - config.min_lr_ratio) * share
