"""A task need not be text: small pictures, from records() of one's own, through a convolution."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import drawbar
from drawbar.commands.score_run import evaluate_run
from drawbar.tasks.batch import Batch
from drawbar.tasks.task import Task
from exhaustive import some
from harness import run_ranks
from runs import fit_in, losses, scores, weights

CONFIG = """\
run: {name: pictures}
data: {train: generated, validation: generated}
train: {global_batch: 16, micro_batch: 8, steps: 80}
optim: {lr: 2.0e-2, schedule: constant}
eval: {metric: accuracy, mode: max, every: 40}
checkpoint: {every: 40, keep: 5}
tracking: {tensorboard: false, log_every: 1}
precision: fp32
device: cpu
"""


class Pictures(Task):
    """Is the bright stripe of an 8 by 8 picture upright?"""

    def build_model(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 4, kernel_size=3), nn.ReLU(), nn.AdaptiveMaxPool2d(2), nn.Flatten(), nn.Linear(16, 2)
        )

    def records(self, split: str) -> list[dict[str, Any]]:
        chance = np.random.default_rng(0 if split == "train" else 1)
        found = []
        for number in range(64 if split == "train" else 19):
            picture = chance.integers(0, 60, (8, 8), dtype=np.uint8)
            upright, place = number % 2, int(chance.integers(8))
            picture[(slice(None), place) if upright else (place, slice(None))] = 255
            found.append({"picture": self.as_record(picture), "upright": upright})
        return found

    def as_record(self, picture: np.ndarray) -> Any:
        return picture.tolist()

    def encode(self, record: dict[str, Any], train: bool) -> dict[str, Any]:
        return {
            "pixels": torch.as_tensor(record["picture"], dtype=torch.uint8).numpy()[None],
            "labels": record["upright"],
        }

    def forward(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        return model(batch["pixels"].float() / 255)

    def loss(self, outputs: torch.Tensor, batch: Batch) -> torch.Tensor:
        return functional.cross_entropy(outputs, batch["labels"], reduction="sum")

    def predict(self, model: nn.Module, batch: Batch) -> list[int]:
        return self.forward(model, batch).argmax(-1).tolist()

    def score(self, records: list[dict[str, Any]]) -> dict[str, float]:
        return {"accuracy": float(np.mean([record["prediction"] == record["upright"] for record in records]))}


class Centered(nn.Module):
    """Subtracts a running mean, in training too."""

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean.lerp_(rows.detach().mean(), 0.1)
        return rows - self.mean


class Normed(Pictures):
    """The model has running statistics, which each rank makes of its own rows."""

    def build_model(self) -> nn.Module:
        convolution, *others = super().build_model()
        return nn.Sequential(nn.BatchNorm2d(1), convolution, Centered(), *others)

    def as_record(self, picture: np.ndarray) -> Any:
        return (picture // (1 + 9 * (picture.sum() % 2))).tolist()  # some pictures are dark


class Tensors(Pictures):
    """The records hold tensors, which no key is made of: nothing is cached."""

    def as_record(self, picture: np.ndarray) -> Any:
        return torch.from_numpy(picture)


@pytest.mark.parametrize("task", some([Pictures, Tensors], 1))
def test_it_trains_evaluates_and_resumes(task: type[Task], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.yaml").write_text(CONFIG)
    fit_in(tmp_path, task=task)
    run = tmp_path / "runs" / "pictures"
    assert scores(run)[80]["eval/validation/accuracy"] > 0.9
    cached = list((tmp_path / "runs" / ".cache").glob("*")) if (tmp_path / "runs" / ".cache").exists() else []
    assert bool(cached) is (task is Pictures)

    fit_in(tmp_path, "run.name=other", task=task, resume=str(run / "checkpoints" / "step-00000040"))
    other = tmp_path / "runs" / "other"
    assert losses(other) == {step: loss for step, loss in losses(run).items() if step > 40}
    assert all(torch.equal(tensor, weights(other, 80)[name]) for name, tensor in weights(run, 80).items())

    monkeypatch.chdir(tmp_path)
    config = drawbar.load_config("config.yaml").config
    found = evaluate_run(config, task, "validation", "latest")
    assert {f"eval/validation/{name}": value for name, value in found.items()} == pytest.approx(scores(run)[80])


def train_normed(project: str) -> None:
    folder = Path(project)
    for strategy in ("ddp", "fsdp"):
        settings = (f"parallel.strategy={strategy}", "train.steps=8")
        for name, evaluated, saved in (("", 2, 4), ("-often", 2, 2), ("-rarely", "null", 4)):
            every = (f"eval.every={evaluated}", f"checkpoint.every={saved}")
            fit_in(folder, *settings, *every, f"run.name={strategy}{name}", task=Normed)
        middle = folder / "runs" / f"{strategy}-rarely" / "checkpoints" / "step-00000004"
        fit_in(folder, *settings, *every, f"run.name={strategy}-resumed", task=Normed, resume=str(middle))


@pytest.mark.exhaustive
def test_all_ranks_have_the_buffers_of_one_where_they_are_saved_or_evaluated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.yaml").write_text(CONFIG)
    run_ranks(train_normed, 2, str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for strategy in ("ddp", "fsdp"):
        run, often, rarely, resumed = (
            tmp_path / "runs" / f"{strategy}{name}" for name in ("", "-often", "-rarely", "-resumed")
        )
        assert scores(run) == scores(often)
        assert losses(resumed) == {step: loss for step, loss in losses(rarely).items() if step > 4}
        config = drawbar.load_config("config.yaml", [f"run.name={strategy}", "train.steps=8"]).config
        found = evaluate_run(config, Normed, "validation", "latest")
        assert {f"eval/validation/{name}": value for name, value in found.items()} == pytest.approx(
            scores(run)[8], rel=1e-5
        )
