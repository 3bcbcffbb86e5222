"""Every sample is evaluated exactly once, at any number of processes; the task is one without any text."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional

import drawbar
from drawbar.commands.score_run import evaluate_run
from drawbar.errors import ExitCode, UserError
from drawbar.tasks.batch import Batch
from drawbar.tasks.task import Task
from exhaustive import params
from harness import run_ranks

FEATURES = 5
DROPPED, SEVERAL = 4, 7
"""Records that give no sample, and three samples."""


class Points(Task):
    """Classify points by the sign of a sum. A record with several points gives several samples."""

    def build_model(self) -> nn.Module:
        return Linear()

    def encode(self, record: dict[str, Any], train: bool) -> list[dict[str, Any]] | None:
        return [{"x": point, "labels": record["label"]} for point in record["points"]] or None

    def loss(self, outputs: torch.Tensor, batch: Batch) -> torch.Tensor:
        return functional.cross_entropy(outputs, batch["labels"], reduction="sum")

    def predict(self, model: nn.Module, batch: Batch) -> list[int]:
        return self.forward(model, batch).argmax(-1).tolist()

    def score(self, records: list[dict[str, Any]]) -> dict[str, float]:
        right = [np.mean(record["prediction"]) == record["label"] for record in records]
        return {"accuracy": float(np.mean(right)), "records": len(records)}


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(FEATURES, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


class Forgetful(Points):
    def predict(self, model: nn.Module, batch: Batch) -> list[int]:
        return super().predict(model, batch)[1:]


class Weightless(Points):
    def num_targets(self, batch: Batch) -> float:
        return 0.0


def write_points(path: Path, records: int, seed: int) -> None:
    chance = np.random.default_rng(seed)
    lines = []
    for number in range(records):
        label = int(chance.integers(2))
        points = 0 if number == DROPPED else 3 if number == SEVERAL else 1
        sides = (label + np.arange(points)) % 2  # neighbours in a record get different predictions
        x = chance.normal(size=(points, FEATURES)) + 2 * sides[:, None] - 1
        lines.append(json.dumps({"name": f"record {number}", "points": x.round(3).tolist(), "label": label}))
    path.write_text("\n".join(lines) + "\n")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained run of :class:`Points`."""
    folder = tmp_path_factory.mktemp("points")
    write_points(folder / "train.jsonl", 60, seed=1)
    write_points(folder / "validation.jsonl", 17, seed=2)
    write_points(folder / "test.jsonl", 2, seed=3)
    outcome = drawbar.Trainer(config(folder), Points).fit()
    assert outcome.progress.best_score is not None
    assert outcome.progress.best_score > 0.8
    return folder


def config(folder: Path, *settings: str) -> drawbar.RunConfig:
    data = [f"data.{split}={folder / split}.jsonl" for split in ("train", "validation", "test")]
    fixed = ["train.steps=30", "train.global_batch=8", "optim.lr=0.1", "precision=fp32", "device=cpu"]
    scores = ["eval.metric=accuracy", "eval.mode=max", "eval.every=10", "tracking.tensorboard=false"]
    overrides = [f"run.dir={folder}", *data, *fixed, *scores, *settings]
    return drawbar.load_config(None, overrides, Points.Config).config


def evaluate_here(folder: str, split: str, micro_batch: int) -> dict[str, float]:
    """What ``drawbar eval`` does on one of several ranks."""
    return evaluate_run(config(Path(folder), f"eval.micro_batch={micro_batch}"), Points, split, "latest")


def read_results(folder: Path, split: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    results = folder / "run" / "eval" / split
    lines = (results / "predictions.jsonl").read_text().splitlines()
    return json.loads((results / "scores.json").read_text()), [json.loads(line) for line in lines]


@pytest.mark.parametrize(("split", "micro_batch"), [("validation", 1), ("validation", 4), ("test", 4)])
@pytest.mark.parametrize("world_size", params([1, 2, 3], often=[1, 2]))
def test_every_sample_once_at_any_world_size(project: Path, split: str, micro_batch: int, world_size: int) -> None:
    returned = run_ranks(evaluate_here, world_size, str(project), split, micro_batch)
    scores, merged = read_results(project, split)
    assert all(found == returned[0] for found in returned)  # every rank knows the scores
    assert scores == {"step": 30, **returned[0]}

    records = [json.loads(line) for line in (project / f"{split}.jsonl").read_text().splitlines()]
    expected, loss, samples = [], 0.0, 0
    for number, record in enumerate(records):
        if record["points"]:
            logits = by_hand(project, record["points"])
            predictions = logits.argmax(-1).tolist()
            expected.append(
                {**record, "id": number, "prediction": predictions if len(predictions) > 1 else predictions[0]}
            )
            labels = torch.tensor([record["label"]] * len(predictions))
            loss += float(functional.cross_entropy(logits, labels, reduction="sum"))
            samples += len(predictions)
    assert merged == expected
    assert scores["records"] == len(expected)
    assert scores["accuracy"] == Points(config(project)).score(expected)["accuracy"]
    assert scores["loss"] == pytest.approx(loss / samples, rel=1e-6)
    if split == "validation":
        assert (len(records), len(expected), samples) == (17, 16, 18)


def by_hand(project: Path, points: list[list[float]]) -> torch.Tensor:
    weights = load_file(project / "run" / "checkpoints" / "step-00000030" / "model-00000.safetensors")
    return torch.tensor(points) @ weights["inner.weight"].T + weights["inner.bias"]


def test_training_wrote_the_same_results(project: Path) -> None:
    """The evaluation at the last step of training, and that of its checkpoint."""
    other = project / "again"
    drawbar.Trainer(config(project, f"run.dir={other}"), Points).fit()
    of_training = read_results(other, "validation")
    evaluate_run(config(project, f"run.dir={other}"), Points, "validation", "latest")
    assert read_results(other, "validation") == of_training


def test_scores_of_a_few_records_are_not_those_of_the_run(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evaluate_run(config(project), Points, "validation", "latest")
    before = read_results(project, "validation")
    assert before[0]["records"] == 16
    evaluate_run(config(project, "data.limit.validation=3"), Points, "validation", "latest")
    assert read_results(project, "validation") == before
    scores, records = read_results(project, "validation-other")
    assert scores["records"] == len(records) == 3
    assert "other records than the run's (data.limit.validation)" in " ".join(capsys.readouterr().out.split())


def refuse(project: Path, task: type[Task], what: str) -> UserError:
    with pytest.raises(UserError, match=what) as error:
        evaluate_run(config(project), task, "validation", "latest")
    return error.value


def test_a_prediction_for_each_sample(project: Path) -> None:
    error = refuse(project, Forgetful, r"Forgetful\.predict returned 17 predictions for 18 samples")
    assert error.exit_code == ExitCode.FAILED


def test_nothing_to_compute_a_loss_over(project: Path) -> None:
    error = refuse(project, Weightless, "validation data has nothing to compute a loss over")
    assert error.where == "data.validation"


@pytest.mark.exhaustive
def test_an_evaluation_that_fails_leaves_results_alone(project: Path) -> None:
    evaluate_run(config(project), Points, "validation", "latest")
    before = read_results(project, "validation")
    refuse(project, Forgetful, "predict")
    assert read_results(project, "validation") == before
