"""drawbar's own callbacks: one file for each feature of a run.

A step is saved before it is evaluated, because the evaluation may fail; the progress in its checkpoint (best score,
evaluated step) is updated afterwards.
"""

from collections.abc import Callable

import torch

from drawbar.train.callback import Callback
from drawbar.train.callbacks.core_wait import CoreWaitCallback
from drawbar.train.callbacks.evaluate import EvaluateCallback
from drawbar.train.callbacks.log import LogCallback
from drawbar.train.callbacks.profile import ProfileCallback
from drawbar.train.callbacks.replicas import ReplicasCallback
from drawbar.train.callbacks.save import SaveCallback, SaveScoreCallback, TimedSaveCallback
from drawbar.train.callbacks.status import StatusCallback
from drawbar.train.run import Run

OWN_CALLBACKS: list[tuple[Callable[[Run], Callback], Callable[[Run], bool]]] = [
    # before an evaluation or a save, which should not appear in a trace
    (ProfileCallback, lambda run: run.config.tracking.profile is not None),
    (ReplicasCallback, lambda run: run.config.parallel.check_replicas is not None and run.world.size > 1),
    (LogCallback, lambda run: True),
    (SaveCallback, lambda run: True),
    (EvaluateCallback, lambda run: run.validation is not None),
    (SaveScoreCallback, lambda run: run.validation is not None),
    (lambda run: CoreWaitCallback(), lambda run: run.world.device.type == "cpu" and torch.get_num_threads() > 1),
    (StatusCallback, lambda run: run.world.is_rank0),
    (TimedSaveCallback, lambda run: run.world.is_rank0 and isinstance(run.config.checkpoint.every, str)),
]
"""Each callback with a test whether a run has it, in calling order."""


def own_callbacks(run: Run) -> list[Callback]:
    """Create the callbacks of this rank."""
    return [make(run) for make, is_wanted in OWN_CALLBACKS if is_wanted(run)]
