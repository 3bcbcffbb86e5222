"""How training batches are made of encoded samples: by the task's augment and collate, ahead of the step."""

from dataclasses import dataclass

import numpy as np
import torch

from drawbar.config.schema.run_config import RunConfig
from drawbar.data.dataset import Sample
from drawbar.data.prefetch import Augment, BatchMaker, Collate, Prefetcher, unchanged
from drawbar.tasks.batch import Batch
from drawbar.tasks.method_errors import is_user_defined, method_error
from drawbar.tasks.padding import train_collate
from drawbar.tasks.task import Task
from drawbar.tasks.user_methods import name_failing_method


def make_augment(task: Task, config: RunConfig, train: bool) -> Augment:
    """``task.augment`` with a generator that is a pure function of seed, epoch and sample."""
    return unchanged if type(task).augment is Task.augment else TaskAugment(task, config.run.seed, train)


@dataclass(frozen=True)
class TaskAugment:
    """See ``make_augment``. It pickles, as tasks do."""

    task: Task
    seed: int
    train: bool

    def __call__(self, sample: Sample, epoch: int) -> Sample:
        # a counter-based generator: no two samples or epochs ever share a number
        rng = np.random.Generator(np.random.Philox(key=[self.seed, epoch], counter=[0, 0, sample["id"], 0]))
        with name_failing_method(self.task):
            augmented = self.task.augment(sample, self.train, rng)
        if not isinstance(augmented, dict):
            raise method_error(
                self.task, "augment", f"returns {type(augmented).__name__}", "return the sample as a dict"
            )
        return {**augmented, "id": sample["id"], "ids": sample["ids"]}


@dataclass(frozen=True)
class _NamedCollate:
    """Collates as ``collate`` does; the error of a failure names the task's method. It pickles, as tasks do."""

    task: Task
    collate: Collate[Batch]

    def __call__(self, samples: list[Sample]) -> Batch:
        with name_failing_method(self.task):
            return self.collate(samples)


def batch_maker(task: Task, config: RunConfig) -> BatchMaker[Batch]:
    """The ``BatchMaker`` of training batches: the task's augment and collate."""
    return BatchMaker(_NamedCollate(task, train_collate(task, config)), make_augment(task, config, train=True))


def make_prefetcher(task: Task, config: RunConfig, device: torch.device, prefetch: bool) -> Prefetcher[Batch]:
    """The ``Prefetcher`` of training batches by ``data.workers``. ``auto`` prefetches in a thread, unless ``augment``
    or ``collate`` is user-defined: that may draw from the global random generators, as the step does.

    Args:
        prefetch: False to make each batch at its step, whatever ``data.workers`` says.
    """
    workers = config.data.workers
    return Prefetcher(
        batch_maker(task, config),
        prefetch=prefetch and (not is_user_defined(task, "augment", "collate") if workers == "auto" else workers != 0),
        workers=0 if workers == "auto" else workers,
        finish=_Pinned(device) if device.type == "cuda" else None,
        timeout=config.launch.timeout,
    )


@dataclass(frozen=True)
class _Pinned:
    """Moves batches into pinned memory, in any thread."""

    device: torch.device

    def __call__(self, batch: Batch) -> Batch:
        with torch.cuda.device(self.device):  # else a new thread would make a CUDA context on device 0
            return batch.pin_memory()
