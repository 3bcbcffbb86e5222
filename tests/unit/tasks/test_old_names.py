"""A task written before methods were renamed works as it did, and says what to rename."""

import copy
from typing import Any

import pytest
import torch

from drawbar.config.schema.run_config import RunConfig
from drawbar.errors import UserError
from drawbar.tasks.batch import Batch
from drawbar.tasks.causal_lm import CausalLM
from drawbar.tasks.task import Task
from drawbar.tasks.task_context import TaskContext
from drawbar.tasks.user_methods import name_failing_method

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


def test_a_class_attribute_hides_nothing_that_a_task_has_of_its_run() -> None:
    class Typed:
        tokenizer: Any = None
        labelled = False

    with pytest.warns(FutureWarning) as warned:

        class Old(Typed, Task):
            facts: dict[str, Any] = {}
            dataset_metadata = {"labels": []}

    messages = [str(warning.message) for warning in warned]
    assert messages == [
        f"Old.{name} would hide the run's {new}: remove it from the class"
        for name, new in [
            ("tokenizer", "tokenizer"),
            ("dataset_metadata", "dataset_metadata"),
            ("facts", "dataset_metadata"),
            ("labelled", "has_labels"),
        ]
    ]
    assert {warning.filename for warning in warned} == {__file__}
    task = Old(TaskContext(RunConfig(), ["the"], {"labels": [1]}))
    assert (task.tokenizer, task.dataset_metadata) == (["the"], {"labels": [1]})
    with pytest.warns(FutureWarning, match="called"):
        assert (task.facts, task.labelled) == ({"labels": [1]}, True)


def test_what_a_class_says_of_its_labels_counts_under_the_old_name() -> None:
    class Says:
        targets = "sample"

    with pytest.warns(FutureWarning, match=r"Says.targets is called label_placement now"):

        class Mixed(Says, CausalLM):
            pass

    class Below(Mixed):
        label_placement = "token"

    assert (Mixed.label_placement, Below.label_placement, CausalLM.label_placement) == ("sample", "token", "next_token")


def test_a_property_of_a_tasks_own_stays(recwarn: pytest.WarningsRecorder) -> None:
    class New(Task):
        @property
        def tokenizer(self) -> str:
            return "own"

    assert New(RunConfig()).tokenizer == "own"
    assert not recwarn


def test_an_init_that_reads_the_configuration_works() -> None:
    class Seeded(Task):
        def __init__(self, run_config: Any) -> None:
            super().__init__(run_config)
            self.seed = run_config.run.seed

    with pytest.warns(FutureWarning, match=r"read run_config.run of it") as warned:
        assert Seeded(TaskContext(RunConfig())).seed == RunConfig().run.seed
    assert warned[0].filename == __file__


def test_a_context_has_nothing_else_of_the_configuration() -> None:
    """``super().__init__(run_config.model_copy(...))`` would lose the run's tokenizer."""
    with pytest.raises(AttributeError, match=r"'model_copy'; the configuration is its run_config"):
        TaskContext(RunConfig()).model_copy()
    assert copy.deepcopy(TaskContext(RunConfig())) == TaskContext(RunConfig())


def test_an_override_of_a_mixin_under_its_old_name_is_used() -> None:
    class Halves:
        def weight(self, batch: Batch) -> float:
            found: float = super().weight(batch=batch)  # type: ignore[misc]
            return found / 2

    with pytest.warns(FutureWarning, match=r"Halves.weight is called num_targets now"):

        class Halved(Halves, CausalLM):
            pass

    with pytest.warns(FutureWarning, match="call that"):
        assert Halved(RunConfig()).num_targets(BATCH) == CausalLM(RunConfig()).num_targets(BATCH) / 2 > 0


def test_a_static_method_is_found_under_its_old_name() -> None:
    class Static(CausalLM):
        @staticmethod
        def num_targets(batch: Batch) -> float:
            return 7.0

    with pytest.warns(FutureWarning, match="call that"):
        assert Static(RunConfig()).weight(BATCH) == 7  # type: ignore[attr-defined]


def test_both_names_in_one_class_are_told() -> None:
    with pytest.warns(FutureWarning, match="Both has both weight and num_targets"):

        class Both(CausalLM):
            def num_targets(self, batch: Batch) -> float:
                return 2.0

            def weight(self, batch: Batch) -> float:
                return self.num_targets(batch) / 2


def test_an_error_in_a_method_of_an_old_name_names_it() -> None:
    with pytest.warns(FutureWarning):

        class Raises(CausalLM):
            def weight(self, batch: Batch) -> float:
                raise KeyError("absent")

    task = Raises(RunConfig())
    with pytest.raises(UserError, match=r"Raises\.weight fails: KeyError: 'absent'"), name_failing_method(task):
        task.num_targets(BATCH)
