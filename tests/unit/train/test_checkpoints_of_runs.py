"""Which checkpoints a run leaves behind."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from drawbar import Callback, RunHandle
from drawbar.errors import ExitCode, UserError
from drawbar.tasks.batch import Batch
from drawbar.tasks.causal_lm import CausalLM
from drawbar.util.best_score import BestScore
from exhaustive import some
from runs import Fit


class Scripted(CausalLM):
    """causal_lm with another score: a scripted accuracy for each evaluation."""

    accuracies = (0.1, 0.9, 0.3, 0.9, 0.5, 0.6)

    def score(self, records: list[dict[str, Any]]) -> dict[str, float]:
        self.evaluations = getattr(self, "evaluations", -1) + 1  # the first call only tries the task
        return {"accuracy": self.accuracies[self.evaluations - 1]}


class Spoilt(CausalLM):
    """causal_lm whose loss is lost at its seventh forward in training."""

    forwards = 0

    def loss(self, outputs: Any, batch: Batch) -> torch.Tensor:
        self.forwards += torch.is_grad_enabled()
        return super().loss(outputs, batch) * (math.nan if self.forwards == 7 else 1.0)


ACCURACY = ("eval.metric=accuracy", "eval.mode=max", "eval.every=2")  # the best is that of step 4


def saved(run: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in (run / "checkpoints").glob("step-*"))


@pytest.mark.parametrize(
    ("settings", "steps"),
    some(
        [
            (("checkpoint.every=2", "checkpoint.keep=2"), [4, 10, 12]),
            (("checkpoint.every=2", "checkpoint.keep=1"), [4, 12]),
            (("checkpoint.every=5", "checkpoint.keep=9"), [2, 4, 5, 10, 12]),  # at every better score, too
            (("checkpoint.every=null", "checkpoint.keep=9"), [2, 4, 12]),
            (("checkpoint.every=null", "checkpoint.keep=1"), [4, 12]),
        ],
        2,
    ),
)
def test_the_newest_and_the_best_are_kept(settings: tuple[str, ...], steps: list[int], fit: Fit, run: Path) -> None:
    fit(*ACCURACY, *settings, task=Scripted)
    assert saved(run) == steps
    best = BestScore.from_json((run / "checkpoints" / "best.json").read_bytes())
    assert best == BestScore(step=4, metric="accuracy", score=0.9)


@pytest.mark.parametrize(
    ("settings", "steps"),
    some(
        [
            (("checkpoint.every=2", "checkpoint.keep=2"), [10, 12]),
            (("checkpoint.every=5", "checkpoint.keep=9"), [5, 10, 12]),
            (("checkpoint.every=null",), [12]),
        ],
        1,
    ),
)
def test_without_keep_best_only_the_newest(settings: tuple[str, ...], steps: list[int], fit: Fit, run: Path) -> None:
    fit(*ACCURACY, "checkpoint.keep_best=false", *settings, task=Scripted)
    assert saved(run) == steps
    assert not (run / "checkpoints" / "best.json").exists()


class Saves(Callback):
    """Keeps the names of the checkpoints that it is told of."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def on_save(self, run: RunHandle, checkpoint: Path) -> None:
        self.seen.append(checkpoint.name)


def test_callbacks_hear_of_the_best_checkpoint_of_another_run(fit: Fit, run: Path) -> None:
    short = ("optim.warmup=0", "eval.every=2", "checkpoint.every=null")
    fit("train.steps=2", *short)
    saves = Saves()
    best = str(run / "checkpoints" / "step-00000002")
    fit("run.name=other", "train.steps=3", *short, resume=best, callbacks=[saves])
    assert saves.seen == ["step-00000002", "step-00000003"]


def test_a_run_without_validation_saves_at_its_end(fit: Fit, run: Path) -> None:
    fit("data.validation=null", "eval.every=null", "checkpoint.every=null")
    assert saved(run) == [12]
    assert not (run / "eval").exists()


@pytest.mark.parametrize("log_every", [1, 100])
def test_a_run_that_diverges_keeps_its_good_checkpoint(log_every: int, fit: Fit, run: Path) -> None:
    settings = ("train.micro_batch=8", "eval.every=null", f"tracking.log_every={log_every}")
    with pytest.raises(UserError, match="diverged") as diverged:
        fit(*settings, task=Spoilt)
    assert diverged.value.exit_code == ExitCode.FAILED
    assert saved(run) == [4]
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert max(steps) < 7


def test_what_a_checkpoint_says_of_the_run(fit: Fit, run: Path) -> None:
    outcome = fit(*ACCURACY, task=Scripted)
    assert (outcome.exit_code, outcome.run_dir) == (0, Path("runs") / "tiny")
    state = json.loads((run / "checkpoints" / "step-00000012" / "state.json").read_text())
    assert state["progress"] == outcome.progress.state()
    assert (outcome.progress.step, outcome.progress.best_step, outcome.progress.best_score) == (12, 4, 0.9)
    assert outcome.progress.evaluations_since_best == 4
    assert outcome.progress.evaluated_step == 12


def test_the_record_of_the_best_stays_true_when_it_is_kept_no_longer(fit: Fit, run: Path) -> None:
    """Other commands go by best.json, whatever ``checkpoint.keep_best`` is now."""
    settings = ("eval.every=2", "checkpoint.every=2", "checkpoint.keep=9")
    fit(*settings, "train.steps=4", "optim.schedule=constant")
    outcome = fit(*settings, "optim.schedule=constant", "checkpoint.keep_best=false")
    best = BestScore.from_json((run / "checkpoints" / "best.json").read_bytes())
    assert outcome.progress.best_step == best.step > 4
