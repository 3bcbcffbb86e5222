"""A task written before methods were renamed works as it did, and says what to rename."""

from typing import Any

import pytest
import torch

from drawbar.config.schema.run_config import RunConfig
from drawbar.tasks.batch import Batch
from drawbar.tasks.causal_lm import CausalLM
from drawbar.tasks.task import Task

BATCH = Batch({"labels": torch.tensor([[0, 1, 2, -100]]), "input_ids": torch.zeros(1, 4, dtype=torch.long)}, ids=[0])


def test_an_override_under_its_old_name_is_used() -> None:
    with pytest.warns(FutureWarning, match=r"Halved.weight is called num_targets now"):

        class Halved(CausalLM):
            def weight(self, batch: Batch) -> float:
                return super().weight(batch) / 2

    task = Halved(RunConfig())
    with pytest.warns(FutureWarning, match="call that"):
        assert task.num_targets(BATCH) == CausalLM(RunConfig()).num_targets(BATCH) / 2 > 0


def test_attributes_and_methods_are_found_under_their_old_names() -> None:
    with pytest.warns(FutureWarning, match="find_dataset_metadata"):

        class Old(Task):
            def find_facts(self) -> dict[str, Any]:
                return {"labels": [1]}

    task = Old(RunConfig())
    assert task.find_dataset_metadata() == {"labels": [1]}
    task.dataset_metadata = {"labels": [2]}
    with pytest.warns(FutureWarning, match="dataset_metadata"):
        assert task.facts == {"labels": [2]}
    with pytest.warns(FutureWarning, match="has_labels"):
        task.labelled = False
    assert not task.has_labels
