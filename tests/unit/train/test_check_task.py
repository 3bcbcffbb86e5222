"""A user's overrides are tried before training: each fault is one error with the method's name; no false alarm."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from conftest import make_project
from drawbar.errors import ExitCode, UserError
from drawbar.evaluation.scoring import unknown_metric
from drawbar.metrics.metric_registry import compute, load_metrics
from drawbar.tasks.batch import Batch
from drawbar.tasks.causal_lm import CausalLM
from drawbar.tasks.task import Task
from drawbar.tasks.user_methods import check_signatures
from exhaustive import params, some
from points import Points, write_points
from runs import fit_in

HERE = Path(__file__).name


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """See ``write_points``."""
    return write_points(tmp_path_factory.mktemp("points"))


numbers: Iterator[int] = iter(range(10**6))


def check_on_samples(project: Path, task: type[Task], *settings: str) -> Path:
    """A whole run of two steps, in a directory of its own."""
    name = f"run-{next(numbers)}"
    fit_in(project, f"run.name={name}", *settings, task=task)
    return project / "runs" / name


def refused(project: Path, task: type[Task], *settings: str) -> UserError:
    before = set(project.rglob("*"))
    with pytest.raises(UserError) as error:
        check_on_samples(project, task, *settings)
    assert set(project.rglob("*")) - before <= {project / "runs"}, "nothing is written"
    return error.value


class NoBatch(Points):
    def loss(self, outputs: Any) -> torch.Tensor:  # type: ignore[override]
        return outputs.sum()


class TooMany(Points):
    def predict(self, model: nn.Module, batch: Batch, extra: int) -> list[Any]:  # type: ignore[override]
        return []


class NoRng(Points):
    def augment(self, sample: dict[str, Any], train: bool) -> dict[str, Any]:  # type: ignore[override]
        return sample


class NoFunction(Points):
    num_targets = 3  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("task", "method"),
    [(NoBatch, "loss(self, outputs"), (TooMany, "predict(self, model"), (NoRng, "augment(self, sample"),
     (NoFunction, "num_targets(self, batch")],
)  # fmt: skip
def test_a_wrong_signature(task: type[Task], method: str, project: Path) -> None:
    error = refused(project, task)
    name = method.partition("(")[0]
    assert f"{task.__name__}.{name}" in error.what
    assert f"define it as {method}" in error.remedy
    if task is not NoFunction:
        assert HERE in str(error.where)


class Static(Points):
    @staticmethod
    def collate(samples: list[Any]) -> Batch:  # type: ignore[override]
        return Batch({name: torch.tensor(np.stack([sample[name] for sample in samples])) for name in ("x", "labels")},
                     ids=[number for sample in samples for number in sample["ids"]])  # fmt: skip

    @classmethod
    def loss(cls, outputs: torch.Tensor, batch: Batch, reduction: str = "sum") -> torch.Tensor:  # type: ignore[override]
        return functional.cross_entropy(outputs, batch["labels"], reduction=reduction)

    def num_targets(self, *arguments: Any) -> float:
        return len(arguments[0].ids)


@pytest.mark.exhaustive
def test_other_ways_to_write_a_method_are_fine(project: Path) -> None:
    check_signatures(Static)
    check_on_samples(project, Static)


class Mean(Points):
    def loss(self, outputs: torch.Tensor, batch: Batch) -> torch.Tensor:
        return functional.cross_entropy(outputs, batch["labels"])


class EachLoss(Points):
    def loss(self, outputs: torch.Tensor, batch: Batch) -> torch.Tensor:
        return functional.cross_entropy(outputs, batch["labels"], reduction="none")


class NoLoss(Points):
    def loss(self, outputs: torch.Tensor, batch: Batch) -> torch.Tensor:
        return None  # type: ignore[return-value]


class Failing(Points):
    def loss(self, outputs: torch.Tensor, batch: Batch) -> torch.Tensor:
        return outputs.sum() + batch["label"]  # KEY ERROR


class FailingDeep(Points):
    def forward(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        return model(batch["x"].repeat(1, 2))  # WRONG SHAPE


class Constant(Points):
    def num_targets(self, batch: Batch) -> float:
        return 1.0


class TooFew(Points):
    def predict(self, model: nn.Module, batch: Batch) -> list[Any]:
        return super().predict(model, batch)[1:]


class Tensors(Points):
    def predict(self, model: nn.Module, batch: Batch) -> list[Any]:
        return self.forward(model, batch).argmax(-1)


class ListOfTensors(Points):
    def predict(self, model: nn.Module, batch: Batch) -> list[Any]:
        return list(self.forward(model, batch))


class Dict(Points):
    def collate(self, samples: list[Any]) -> Batch:
        return dict(super().collate(samples))  # type: ignore[return-value]


class LosesIds(Points):
    def collate(self, samples: list[Any]) -> Batch:
        return Batch(super().collate(samples), ids=[samples[0]["id"]])


class NoPrediction(Points):
    def score(self, records: list[dict[str, Any]]) -> dict[str, float]:
        return {"accuracy": sum(record["predicted"] for record in records)}  # NO SUCH KEY


class FailingAugment(Points):
    def augment(self, sample: dict[str, Any], train: bool, rng: Any) -> dict[str, Any]:
        return sample if train else sample / 2  # type: ignore[operator, return-value]


class ForgetsToReturn(Points):
    def augment(self, sample: dict[str, Any], train: bool, rng: Any) -> dict[str, Any]:
        if not train:
            return sample
        return None  # type: ignore[return-value]


class NoModel(Points):
    def build_model(self) -> nn.Module:
        raise OSError("no such weights")


class NoTokenizer(Points):
    def build_tokenizer(self) -> Any:
        return {}["tokenizer"]


class NoRecords(Points):
    def records(self, split: str) -> list[dict[str, Any]]:
        return [1 / 0]  # type: ignore[list-item]


class SetOfFacts(Points):
    def find_dataset_metadata(self) -> dict[str, Any]:
        return {"labels": {0, 1}}


class WordScore(Points):
    def score(self, records: list[dict[str, Any]]) -> dict[str, float]:
        return {"accuracy": "high"}  # type: ignore[dict-item]


class ListScore(Points):
    def score(self, records: list[dict[str, Any]]) -> dict[str, float]:
        return [0.5]  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("task", "method", "says"),
    some(
        [
            (ForgetsToReturn, "augment", "returns NoneType"),
            (NoModel, "build_model", "OSError: no such weights"),
            (NoTokenizer, "build_tokenizer", "KeyError: 'tokenizer'"),
            (NoRecords, "records", "ZeroDivisionError"),
            (SetOfFacts, "find_dataset_metadata", "JSON cannot hold"),
            (WordScore, "score", "returns {'accuracy': 'high'}"),
            (ListScore, "score", "returns [0.5]"),
            (Mean, "loss", "a mean"),
            (EachLoss, "loss", "not return a number"),
            (NoLoss, "loss", "not return a number"),
            (Failing, "loss", "KeyError: 'label'"),
            (FailingDeep, "forward", "RuntimeError"),
            (Constant, "num_targets", "returns 1 for one sample"),
            (TooFew, "predict", "returns 0 values for 1 samples"),
            (Tensors, "predict", "returns Tensor for 1 samples"),
            (ListOfTensors, "predict", "JSON cannot represent"),
            (Dict, "collate", "returns dict"),
            (LosesIds, "collate", "gives the ids [0] for samples [0, 0]"),
            (NoPrediction, "score", "KeyError: 'predicted'"),
            (FailingAugment, "augment", "TypeError"),
        ],
        6,
    ),
)
def test_a_fault_is_named_with_its_method(task: type[Task], method: str, says: str, project: Path) -> None:
    error = refused(project, task)
    assert f"{task.__name__}.{method}" in error.what
    assert says in error.what
    assert error.remedy
    assert HERE in f"{error.where} {error.what}", "the user's file"


@pytest.mark.parametrize(
    ("task", "code"),
    some([(Failing, "# KEY ERROR"), (FailingDeep, "# WRONG SHAPE"), (NoPrediction, "# NO SUCH KEY")], 1),
)
def test_an_exception_is_shown_with_its_line(task: type[Task], code: str, project: Path) -> None:
    lines = Path(__file__).read_text().splitlines()
    line = next(number for number, text in enumerate(lines, start=1) if code in text and "return" in text)
    assert f'{HERE}", line {line}' in refused(project, task).what


def test_a_metric_that_score_does_not_give(project: Path) -> None:
    error = refused(project, Points, "eval.metric=f1")
    assert "eval.metric is 'f1', but the scores are accuracy, loss" in error.what


@pytest.mark.parametrize(
    ("metric", "near"), [("f1", "entity_f1"), ("accurracy", "tag_accuracy"), ("entity", "entity_f1"), ("bleu", None)]
)
def test_the_score_that_may_be_meant(metric: str, near: str | None) -> None:
    error = unknown_metric(metric, ["loss", "entity_f1", "tag_accuracy"], "")
    assert error.what.endswith(f"tag_accuracy; did you mean {near}?" if near else "tag_accuracy")


class SecondLoss(Points):
    def score(self, records: list[dict[str, Any]]) -> dict[str, float]:
        return {"loss": 7.0}


@pytest.mark.exhaustive
def test_two_scores_of_one_name(project: Path) -> None:
    error = refused(project, SecondLoss)
    assert "SecondLoss.score and loss_scores both return 'loss'" in error.what
    assert error.exit_code == ExitCode.WRONG_REQUEST


class Divides(Points):
    def score(self, records: list[dict[str, Any]]) -> dict[str, float]:
        others = [record for record in records if record["label"]]  # none among the first
        return {"accuracy": sum(record["prediction"] == record["label"] for record in others) / len(others)}


class Contrastive(Points):
    """InfoNCE: each sample against the others of its batch."""

    def loss(self, outputs: torch.Tensor, batch: Batch) -> torch.Tensor:
        one, two = outputs, outputs * 1.5 + 0.1
        return functional.cross_entropy(one @ two.T, torch.arange(len(one)), reduction="sum")


class Pairs(Points):
    """Every pair of a batch, of which one sample has none."""

    def loss(self, outputs: torch.Tensor, batch: Batch) -> torch.Tensor:
        return torch.cdist(outputs, outputs + 0.1).sum()


class Correlates(Points):
    def predict(self, model: nn.Module, batch: Batch) -> list[Any]:
        return self.forward(model, batch)[:, 0].tolist()

    def score(self, records: list[dict[str, Any]]) -> dict[str, float]:
        references = [record["label"] for record in records]
        return compute(load_metrics(["pearson"]), [record["prediction"] for record in records], references)


class NotFinite(Points):
    def loss(self, outputs: torch.Tensor, batch: Batch) -> torch.Tensor:
        return super().loss(outputs, batch) * (math.inf if not self.tried else 1.0)

    tried = False


class LossAlone(Points):
    predict = Task.predict
    score = Task.score


class NumpyScore(Points):
    def score(self, records: list[dict[str, Any]]) -> dict[str, float]:
        return {"accuracy": np.mean([record["prediction"] == record["label"] for record in records])}  # type: ignore


class Windows(Points):
    """Three samples of each record, whose predictions are put together."""

    def encode(self, record: dict[str, Any], train: bool) -> list[dict[str, Any]]:  # type: ignore[override]
        return [super().encode(record, train)] * 3

    def postprocess(self, record: dict[str, Any], prediction: list[int]) -> int:
        assert len(prediction) == 3
        return max(prediction)

    def score(self, records: list[dict[str, Any]]) -> dict[str, float]:
        assert [record["id"] for record in records] == list(range(len(records)))
        return super().score(records)


class Counter(nn.Linear):
    """A layer that counts its calls outside of its buffers."""

    calls = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


class ExtraState(Points):
    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(2, 3), Counter(3, 3))


class Complex128(Points):
    persistent = True

    def build_model(self) -> nn.Module:
        model = super().build_model()
        model.register_buffer("phase", torch.zeros(3, dtype=torch.complex128), persistent=self.persistent)
        return model


class NotSaved(Complex128):
    persistent = False


class Quantized(Points):
    def build_model(self) -> nn.Module:
        model = super().build_model()
        model.register_buffer("scale", torch.zeros(3).to(torch.float8_e8m0fnu))
        return model


class NoTensor(Points):
    def build_model(self) -> nn.Module:
        model = super().build_model()
        model.register_state_dict_post_hook(lambda module, state, prefix, _: state.update({"calls": 3}))
        return model


@pytest.mark.parametrize(
    ("task", "what"),
    some(
        [
            (ExtraState, "1 is a Counter, which defines get_extra_state"),
            (Complex128, "phase is torch.complex128"),
            (Quantized, "scale is torch.float8_e8m0fnu"),
            (NoTensor, "calls is int"),
        ],
        2,
    ),
)
def test_state_that_no_checkpoint_can_hold(task: type[Task], what: str, project: Path) -> None:
    error = refused(project, task)
    assert error.exit_code == ExitCode.WRONG_REQUEST
    assert what in error.what
    assert f"{task.__name__}.build_model" in error.what
    assert HERE in (error.where or "")


@pytest.mark.parametrize("task", some([Points, NotSaved, Contrastive, Pairs, LossAlone, NumpyScore, Windows], 2))
def test_what_is_right_trains(task: type[Task], project: Path) -> None:
    assert (check_on_samples(project, task) / "checkpoints").is_dir()


class LateCollate(Points):
    def collate(self, samples: list[dict[str, Any]]) -> Batch:
        if any(sample["labels"] == 2 for sample in samples):  # none among the first
            raise ValueError("no batch for twos")
        return super().collate(samples)


class LateAugment(Points):
    def augment(self, sample: dict[str, Any], train: bool, rng: np.random.Generator) -> dict[str, Any]:
        if train and sample["labels"] == 2:
            raise ValueError("no sample for twos")
        return sample


@pytest.mark.parametrize(("task", "method"), [(LateCollate, "collate"), (LateAugment, "augment")])
@pytest.mark.parametrize("workers", params(["auto", "1"], often=["auto"]))
def test_a_fault_in_a_later_step_is_named_with_its_method(
    task: type[Task], method: str, workers: str, project: Path
) -> None:
    settings = ["data.validation=null", "train.steps=6", f"data.workers={workers}", "data.shuffle=false"]
    with pytest.raises(UserError, match=rf"{task.__name__}.{method} fails: ValueError: no \w+ for twos") as error:
        check_on_samples(project, task, *settings)
    assert HERE in str(error.value)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("task", "metric"), [(Divides, "accuracy"), (Correlates, "pearson")])
def test_what_the_first_samples_lack_is_no_fault(task: type[Task], metric: str, project: Path) -> None:
    """Their labels are all the same: a recall divides by zero, and a correlation is nan."""
    run = check_on_samples(project, task, f"eval.metric={metric}", "eval.mode=max")
    assert metric in json.loads((run / "eval" / "validation" / "scores.json").read_text())


def test_a_built_in_task_is_right(tmp_path: Path) -> None:
    fit_in(make_project(tmp_path), "train.steps=1", "optim.warmup=0", task=CausalLM)


class NormalizedPoints(Points):
    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(2), super().build_model())


class Centred(nn.Module):
    """Subtracts the mean over the batch, also in evaluation."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(0, keepdim=True)


class CentredPoints(Points):
    def build_model(self) -> nn.Module:
        return nn.Sequential(Centred(), super().build_model())


@pytest.mark.parametrize(
    ("task", "said"),
    some(
        [
            (Points, ""),
            (NormalizedPoints, "the layer 0 normalizes over the samples of a micro-batch"),
            (CentredPoints, "or treats the batch as a whole"),
        ],
        1,
    ),
)
def test_a_model_whose_losses_depend_on_the_micro_batch_is_told_of(
    task: type[Points], said: str, project: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    fit_in(project, f"run.name={task.__name__}", "train.steps=1", task=task)
    told = capfd.readouterr().err
    assert said in told
    assert ("train.micro_batch" in told) == bool(said)
    assert ("whole share of train.global_batch" in told) == (task is CentredPoints)
