"""A small task of points in a plane, without a tokenizer, for tests of what users write; and a folder with its data."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from drawbar.tasks.batch import Batch
from drawbar.tasks.task import Task


class Points(Task):
    """To find the label of a point. Nothing is wrong with it."""

    def build_model(self) -> nn.Module:
        return nn.Linear(2, 3)

    def encode(self, record: dict[str, Any], train: bool) -> dict[str, Any]:
        return {"x": np.array(record["x"], np.float32), "labels": record["label"]}

    def forward(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        return model(batch["x"])

    def loss(self, outputs: torch.Tensor, batch: Batch) -> torch.Tensor:
        return functional.cross_entropy(outputs, batch["labels"], reduction="sum")

    def predict(self, model: nn.Module, batch: Batch) -> list[Any]:
        return self.forward(model, batch).argmax(-1).tolist()

    def score(self, records: list[dict[str, Any]]) -> dict[str, float]:
        return {"accuracy": sum(record["prediction"] == record["label"] for record in records) / len(records)}


class PointsWithDropout(Points):
    """With two layers, and dropout between them: what is trained depends on the state of the random generators."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.3), nn.Linear(4, 3))


def write_points(folder: Path) -> Path:
    """The folder, with a configuration and 24 records, of which the first nine have one and the same label."""
    chance = np.random.default_rng(0)
    records = [{"x": chance.normal(size=2).tolist(), "label": max(0, number - 9) % 3} for number in range(24)]
    (folder / "points.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "config.yaml").write_text(
        "run: {name: points}\ndata: {train: points.jsonl, validation: points.jsonl}\n"
        "train: {steps: 2, global_batch: 4}\nprecision: fp32\ndevice: cpu\ntracking: {tensorboard: false}\n"
    )
    return folder
