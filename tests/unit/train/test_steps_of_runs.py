"""How long a run is, what a step trains on, and what evaluation leaves alone."""

import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from drawbar.config.schema.run_config import TrainSection
from drawbar.tasks.batch import Batch
from drawbar.tasks.causal_lm import CausalLM
from drawbar.train.setup import count_steps
from exhaustive import params, some
from runs import Fit, losses, metrics, weights


class Counted(CausalLM):
    """causal_lm that keeps the ids of the samples it trains on, one list a micro-batch."""

    trained: list[list[int]]

    def build_model(self) -> nn.Module:
        type(self).trained = []
        return super().build_model()

    def forward(self, model: nn.Module, batch: Batch) -> Any:
        if model.training:
            self.trained.append(batch.ids)
        return super().forward(model, batch)


class Gambler(CausalLM):
    """causal_lm whose evaluation draws from every random generator, and predicts nothing of use."""

    def predict(self, model: nn.Module, batch: Batch) -> list[float]:
        return [random.random() + float(np.random.rand()) + float(torch.rand(())) for _ in batch.ids]


@given(per_epoch=st.integers(1, 1000), epochs=st.floats(0.001, 50))
def test_epochs_are_steps(per_epoch: int, epochs: float) -> None:
    steps = count_steps(TrainSection(epochs=epochs), per_epoch)
    assert steps >= 1
    assert steps - 1 < epochs * per_epoch <= steps  # a part of a step is a step
    assert count_steps(TrainSection(steps=7), per_epoch) == 7


@pytest.mark.parametrize(
    ("epochs", "steps"), params([("1", 19), ("1.5", 29), ("0.1", 2), ("2", 38)], often=[("1.5", 29), ("0.1", 2)])
)
def test_a_run_of_so_many_epochs(epochs: str, steps: int, fit: Fit, run: Path) -> None:
    fit("train.steps=null", f"train.epochs={epochs}", "optim.warmup=0.1", "eval.every=null", task=Counted)
    trace = losses(run)
    assert list(trace) == list(range(1, steps + 1))  # 151 samples in global batches of 8
    assert metrics(run)[-2]["train/epoch"] == pytest.approx(steps // 19 + steps % 19 * 8 / 151)
    seen = [number for ids in Counted.trained for number in ids]
    whole = min(len(seen), 151)
    assert sorted(seen[:whole]) == sorted(set(seen[:whole]))  # no sample twice in an epoch
    if steps >= 19:
        assert set(seen[:151]) == set(range(151))


@pytest.mark.parametrize(
    ("global_batch", "batching"),
    some([("8", "padded"), ("64", "padded"), ("1000", "padded"), ("7", "packed"), ("1000", "packed")], 2),
)
def test_the_last_incomplete_global_batch_is_trained(global_batch: str, batching: str, fit: Fit, run: Path) -> None:
    settings = ("train.steps=null", "train.epochs=1", "optim.warmup=0", "eval.every=null", "train.micro_batch=1")
    fit(*settings, f"train.global_batch={global_batch}", f"data.batching={batching}", task=Counted)
    seen = [number for ids in Counted.trained for number in ids]
    assert sorted(seen) == list(range(151))
    trained = sum(line.get("train/weight", 0) for line in metrics(run))
    assert trained == 3345 - 151  # every token but the first of each sample is a target


def test_a_number_of_epochs_trains_on_each_token_as_often(fit: Fit, run: Path) -> None:
    fit("train.steps=null", "train.epochs=3", "optim.warmup=0", "eval.every=null", "data.batching=packed")
    assert sum(line.get("train/weight", 0) for line in metrics(run)) == 3 * (3345 - 151)


def test_evaluation_leaves_training_alone(fit: Fit, project: Path) -> None:
    settings = ("task.from_scratch.attention_dropout=0.3", "train.steps=9")
    fit(*settings, "run.name=never", "data.validation=null", "eval.every=null")
    fit(*settings, "run.name=often", "eval.every=2", "eval.at_start=true", task=Gambler)
    never, often = project / "runs" / "never", project / "runs" / "often"
    assert losses(never) == losses(often)
    for name, tensor in weights(never, 9).items():
        assert torch.equal(tensor, weights(often, 9)[name])


@pytest.mark.exhaustive
def test_dropout_matters_in_that_test(fit: Fit, project: Path) -> None:
    traces = []
    for seed in (0, 1):
        settings = ("task.from_scratch.attention_dropout=0.3", "train.steps=3", "eval.every=null", f"run.seed={seed}")
        fit(*settings, f"run.name=seed-{seed}")
        traces.append(losses(project / "runs" / f"seed-{seed}"))
    fit("train.steps=3", "eval.every=null", "run.name=without")
    without = losses(project / "runs" / "without")
    assert traces[0] != traces[1]
    assert traces[0] != without
    assert all(math.isfinite(loss) for loss in without.values())


@pytest.mark.parametrize(("processes", "warns"), [("2", True), ("1", False), ("auto", False)])
def test_a_trainer_starts_no_processes_and_says_so(processes: str, warns: bool, fit: Fit, run: Path) -> None:
    fit("train.steps=1", "optim.warmup=0", "eval.every=null", f"launch.nproc={processes}")
    log = (run / "logs" / "rank-0000.log").read_text()
    assert ("a Trainer does not start the 2 processes of launch.nproc" in log) is warns
