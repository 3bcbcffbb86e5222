"""``first_samples.json`` never costs a run anything."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

import drawbar
from runs import Fit, losses


class OwnAugment(drawbar.CausalLM):
    """Draws from a global generator, as a user's may."""

    def augment(self, sample: Any, train: bool, rng: np.random.Generator) -> Any:
        torch.rand(1)
        return sample


class OddLabels(drawbar.CausalLM):
    """Its tokenizer cannot say what its labels are."""

    def encode(self, record: dict[str, Any], train: bool) -> Any:
        found = super().encode(record, train) or []
        return [{**sample, "labels": np.full(len(sample["labels"]), -5)} for sample in found]

    def loss(self, outputs: Any, batch: drawbar.Batch) -> torch.Tensor:
        return outputs.logits.float().square().sum()

    def num_targets(self, batch: drawbar.Batch) -> float:
        return batch["input_ids"].numel()


def test_generators_are_not_drawn_from(fit: Fit, run: Path) -> None:
    """A model with dropout goes on, after a stop, with the numbers that it would have drawn."""
    settings = ("task.from_scratch.attention_dropout=0.3", "optim.schedule=constant", "eval.every=null")
    fit(*settings, "run.name=through", "train.steps=6", task=OwnAugment)
    fit(*settings, "train.steps=3", task=OwnAugment)
    fit(*settings, "train.steps=6", task=OwnAugment)
    assert losses(run) == losses(run.parent / "through")


def test_what_cannot_be_shown_is_left_out(fit: Fit, run: Path) -> None:
    fit("train.steps=3", "eval.every=null", "data.validation=null", task=OddLabels)
    assert json.loads((run / "first_samples.json").read_text()) == []
