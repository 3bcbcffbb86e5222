"""Which batches are made ahead of training: never by a user's code in a thread beside the step."""

from typing import Any

import numpy as np
import pytest
import torch

from drawbar.tasks.batch import Batch
from drawbar.train.batches import make_prefetcher
from tiny import CPU, Numbers, tiny_config


class OwnAugment(Numbers):
    """It may draw from torch's generator now and then, as dropout does in the same moment."""

    def augment(self, sample: dict[str, Any], train: bool, rng: np.random.Generator) -> dict[str, Any]:
        return sample if rng.random() > 0.01 else {**sample, "noise": torch.rand(1)}


class OwnCollate(Numbers):
    def collate(self, samples: list[dict[str, Any]]) -> Batch:
        return super().collate(samples)


@pytest.mark.parametrize(
    ("task_type", "workers", "prefetch"),
    [
        (Numbers, "auto", True),
        (OwnAugment, "auto", False),
        (OwnCollate, "auto", False),
        (OwnAugment, 1, True),
        (Numbers, 0, False),
    ],
)
def test_a_users_code_runs_ahead_in_processes_alone(task_type: type[Numbers], workers: Any, prefetch: bool) -> None:
    config = tiny_config()
    config = config.model_copy(update={"data": config.data.model_copy(update={"workers": workers})})
    prefetcher = make_prefetcher(task_type(config), config, CPU, prefetch=True)
    assert bool(prefetcher._prefetch_count) is prefetch
