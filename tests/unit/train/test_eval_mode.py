"""Which of two scores is the better one: by the metric, by ``eval.mode``, and as the run began."""

import json
from pathlib import Path
from typing import Any

import pytest

from drawbar.config.schema.run_config import EvalSection
from drawbar.errors import ExitCode, UserError
from drawbar.metrics.metric_registry import BUILT_IN_METRICS, best_is, compute, load_metrics
from drawbar.tasks.causal_lm import CausalLM
from drawbar.train.resolve import resolve_mode
from runs import Fit

TEXTS = (["the driver couples the load", "the hill keeps the wind"], ["the driver", "a village"])
TAGS = ([["B-X", "O"]], [["O", "B-X"]])
NUMBERS = ([0.0, 1.0, 2.0], [2.0, 1.0, 0.5])
SETS = ([["a"], ["b"]], [["b"], ["a"]])
LABELS = ([0, 1], [1, 0])
EXAMPLES: dict[str, Any] = {
    **dict.fromkeys(("exact_match", "bleu", "chrf", "rouge"), TEXTS),
    **dict.fromkeys(("entity_f1", "tag_accuracy"), TAGS),
    **dict.fromkeys(("mse", "mae", "pearson", "spearman"), NUMBERS),
    **dict.fromkeys(("f1_samples", "precision_samples", "recall_samples"), SETS),
}
"""References, and predictions that are worse than the references themselves."""


@pytest.mark.parametrize("name", BUILT_IN_METRICS)
def test_the_best_score_of_a_built_in_metric_is_that_of_right_predictions(name: str) -> None:
    references, wrong = EXAMPLES.get(name, LABELS)
    right, worse = (compute(load_metrics([name]), predictions, references) for predictions in (references, wrong))
    for score in right:
        better = {"min": min, "max": max}[str(best_is(score))]
        assert better(right[score], worse[score]) == right[score] != worse[score]


def test_scores_of_the_loss() -> None:
    assert {best_is(score) for score in ("loss", "perplexity", "bits_per_byte")} == {"min"}


class Scripted(CausalLM):
    """causal_lm with scores that only get smaller: an accuracy, and one of its own."""

    evaluations = 0

    def score(self, records: list[dict[str, Any]]) -> dict[str, float]:
        self.evaluations += 1
        return {"accuracy": 1 / self.evaluations, "own": 1 / self.evaluations}


def best_step(run: Path) -> int:
    return json.loads((run / "checkpoints" / "best.json").read_text())["step"]


THREE_STEPS = ("train.steps=3", "eval.every=1", "optim.warmup=0")


def test_a_known_metric_needs_no_mode_and_may_have_one_afterwards(fit: Fit, run: Path) -> None:
    settings = (*THREE_STEPS, "eval.metric=accuracy")
    fit(*settings, task=Scripted)
    assert best_step(run) == 1
    assert "mode: max" in (run / "config.yaml").read_text()
    fit(*settings, "eval.mode=max", task=Scripted)
    fit(*settings, task=Scripted)
    with pytest.raises(UserError, match="another configuration"):
        fit(*settings, "eval.mode=min", task=Scripted)


def test_a_score_of_a_users_own_needs_a_mode(fit: Fit, run: Path) -> None:
    with pytest.raises(UserError, match="a lower or a higher own is better") as error:
        fit(*THREE_STEPS, "eval.metric=own", task=Scripted)
    assert error.value.exit_code == ExitCode.WRONG_REQUEST
    assert "eval.mode=min or eval.mode=max" in str(error.value.remedy)
    assert not run.exists(), "nothing is begun"
    fit(*THREE_STEPS, "eval.metric=own", "eval.mode=min", task=Scripted)
    assert best_step(run) == 3


@pytest.mark.exhaustive
def test_a_run_goes_on_as_it_began(fit: Fit, run: Path) -> None:
    """``min`` was the default once, and is in the config.yaml of each run of then."""
    settings = ("eval.every=1", "optim.warmup=0", "optim.schedule=constant", "eval.metric=accuracy")
    fit(*settings, "eval.mode=min", "train.steps=3", task=Scripted)
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("steps: 3", "steps: 5"))
    fit(*settings, "train.steps=5", task=Scripted)
    assert "mode: min" in config.read_text()
    fit(*settings, "train.steps=6", task=Scripted, fork="again")
    assert "mode: max" in (run.parent / "again" / "config.yaml").read_text()


@pytest.mark.parametrize(
    ("metric", "mode", "begun", "settled", "warns"),
    [
        ("loss", "auto", None, "min", False),
        ("loss", "auto", "min", "min", False),
        ("bleu", "auto", None, "max", False),
        ("bleu", "auto", "min", "min", True),
        ("bleu", "min", None, "min", True),
        ("loss", "max", None, "max", True),
        ("own", "min", None, "min", False),
        ("own", "auto", "min", "min", False),
        ("own", "auto", "auto", "auto", False),
        ("loss", "auto", "auto", "min", False),  # a run without validation data
    ],
)
def test_modes(
    metric: str,
    mode: str,
    begun: str | None,
    settled: str,
    warns: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert resolve_mode(EvalSection(metric=metric, mode=mode), begun).mode == settled
    assert ("is kept as the best one, which is the worst" in caplog.text) == warns
