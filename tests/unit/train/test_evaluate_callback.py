"""Evaluation: at which steps, which score is the best, and when to stop early."""

import json
import math
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drawbar.config.schema.run_config import EvalSection, RunConfig
from drawbar.distributed.process_group import Distributed
from drawbar.distributed.rank_info import RankInfo
from drawbar.engines.results import StepResult
from drawbar.errors import ExitCode
from drawbar.evaluation.scoring import Evaluation
from drawbar.tracking.console import make_console
from drawbar.tracking.jsonl import JsonlTracker
from drawbar.tracking.tracker import TrackedRun
from drawbar.tracking.trackers import Trackers
from drawbar.train.callback import RunHandle
from drawbar.train.callbacks.evaluate import EvaluateCallback
from drawbar.train.step import RunProgress, StepInfo
from drawbar.train.stop import Reason, Stop

ONE = torch.tensor(1.0)
RESULT = StepResult(ONE, ONE, num_targets=1.0, lr=0.1, skipped=False, rejected=False, own_loss=ONE)


class Script:
    """An EvaluateCallback that gets one scripted score after another, and a run of steps to call it."""

    def __init__(self, folder: Path, config: EvalSection, scores: list[float]) -> None:
        world = Distributed(RankInfo(), torch.device("cpu"), timeout=60)
        self.stop = Stop(world)
        self.progress = RunProgress()
        self.evaluated: list[int] = []
        self.metrics = folder / "metrics.jsonl"
        self._trackers = Trackers([JsonlTracker()])
        self._trackers.start(TrackedRun(folder, {}))
        self._scores = iter(scores)
        self.announced: list[dict[str, float]] = []
        run: Any = SimpleNamespace(
            config=RunConfig(eval=config, run={"dir": str(folder.parent), "name": folder.name}),
            world=world,
            stop=self.stop,
            console=make_console(False),
            trackers=self._trackers,
            saver=SimpleNamespace(confirm_best=lambda progress: None),
            evaluate=self._evaluate,
            owns_directory=lambda: True,
            announce_scores=lambda scores: self.announced.append(dict(scores)),
        )
        self.callback = EvaluateCallback(run)

    def handle(self, total: int) -> RunHandle:
        return RunHandle(RunConfig(), self.progress, 0, 1, total, self.stop, self._trackers.log)

    def _evaluate(self) -> Evaluation | None:
        if self.stop.wanted:
            return None
        self.evaluated.append(self.progress.step)
        return Evaluation({"loss": next(self._scores), "other": 0.0}, [])

    def run(self, until: int, total: int) -> None:
        """Steps up to ``until`` of ``total``, or to an early stop."""
        while self.progress.step < until:
            self.progress.advance(RESULT)
            info = StepInfo(self.progress.step, RESULT, self.progress, last=self.progress.step == total)
            self.callback.on_step(self.handle(total), info)
            if self.stop.agree():
                break
        self.callback.on_train_end(self.handle(total))


@pytest.mark.parametrize(
    ("every", "total", "steps"),
    [
        (4, 12, [4, 8, 12]),
        (5, 12, [5, 10, 12]),
        (None, 12, [12]),
        (12, 12, [12]),
        (20, 12, [12]),
        (1, 3, [1, 2, 3]),
    ],
)
def test_at_which_steps(every: int | None, total: int, steps: list[int], tmp_path: Path) -> None:
    script = Script(tmp_path, EvalSection(every=every), [1.0] * 20)
    script.run(total, total)
    assert script.evaluated == steps
    lines = [json.loads(line) for line in script.metrics.read_text().splitlines()]
    assert [line["step"] for line in lines] == steps
    assert all(line["eval/validation/loss"] == 1.0 and line["eval/validation/other"] == 0.0 for line in lines)
    assert script.announced == [{"eval/validation/loss": 1.0, "eval/validation/other": 0.0}] * len(steps)


def test_a_run_that_is_cut_short_does_not_evaluate_at_its_end(tmp_path: Path) -> None:
    script = Script(tmp_path, EvalSection(every=4), [1.0] * 20)
    script.run(6, 12)  # a signal, say; the same command goes on at step 7, and would not have evaluated at 6
    assert script.evaluated == [4]


def test_never_twice_at_one_step(tmp_path: Path) -> None:
    script = Script(tmp_path, EvalSection(every=4), [1.0, 0.5])
    script.run(4, 4)
    script.callback.on_step(script.handle(4), StepInfo(4, RESULT, script.progress, last=True))
    script.callback.on_train_start(script.handle(4))
    assert script.evaluated == [4]


def test_an_evaluation_that_was_given_up_is_made_when_the_run_goes_on(tmp_path: Path) -> None:
    script = Script(tmp_path, EvalSection(every=4), [1.0])
    script.run(3, 12)
    script.stop.request(Reason.REQUEUE)
    script.run(4, 12)
    assert (script.evaluated, script.progress.best_step, script.progress.evaluated_step) == ([], None, None)
    assert not script.metrics.read_text()

    resumed = Script(tmp_path, EvalSection(every=4), [1.0])
    resumed.progress = script.progress
    resumed.callback.on_train_start(resumed.handle(12))
    assert (resumed.evaluated, resumed.progress.best_step) == ([4], 4)
    assert [json.loads(line)["step"] for line in resumed.metrics.read_text().splitlines()] == [4]


def test_a_metric_that_no_score_has_stops_the_run(tmp_path: Path) -> None:
    script = Script(tmp_path, EvalSection(every=4, metric="f1"), [1.0])
    script.run(12, 12)
    assert script.progress.step == 4
    failure = script.stop.failure()
    assert failure is not None
    assert failure.what.startswith("eval.metric is 'f1', but the scores are loss, other")
    assert failure.exit_code == ExitCode.FAILED


def test_the_evaluation_at_the_start_is_that_of_a_new_run(tmp_path: Path) -> None:
    script = Script(tmp_path, EvalSection(every=4, at_start=True), [1.0] * 2)
    script.callback.on_train_start(script.handle(12))
    script.progress.step = 3
    script.callback.on_train_start(script.handle(12))
    assert script.evaluated == [0]


finite = st.floats(min_value=-3, max_value=3).map(lambda score: round(score, 1))  # so that ties happen


@given(scores=st.lists(finite | st.just(math.nan), min_size=1, max_size=12), mode=st.sampled_from(["min", "max"]))
def test_the_best_is_the_first_of_the_best(scores: list[float], mode: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        script = Script(Path(folder), EvalSection(every=1, mode=mode), scores)
        script.run(len(scores), len(scores))
    numbers = [score for score in scores if not math.isnan(score)]
    progress = script.progress
    if not numbers:
        assert (progress.best_step, progress.best_score) == (None, None)
        return
    best = {"min": min, "max": max}[mode](numbers)
    assert progress.best_score == best
    assert progress.best_step == scores.index(best) + 1
    assert progress.evaluations_since_best == len(scores) - progress.best_step


def test_a_score_that_is_nan_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    script = Script(tmp_path, EvalSection(every=1), [math.nan, 1.0, math.nan])
    with caplog.at_level("WARNING", logger="drawbar"):
        script.run(3, total=3)
    assert [record.getMessage()[:27] for record in caplog.records] == ["the loss of step 1 is nan ("]


@pytest.mark.parametrize(
    ("scores", "mode", "patience", "stops_at"),
    [
        ([3, 2, 2, 2, 1], "min", 2, 4),  # a tie is no better
        ([3, 2, 2, 1, 2, 3, 0], "min", 2, 6),
        ([1, 2, 3, 4, 5], "min", 4, 5),
        ([1, 2, 3, 4, 5], "max", 1, None),
        ([5, 4], "max", 1, 2),
        ([math.nan, math.nan, 1], "min", 2, 2),
        ([3, 2, 2, 2, 1], "min", None, None),
    ],
)
def test_early_stop(scores: list[float], mode: str, patience: int | None, stops_at: int | None, tmp_path: Path) -> None:
    script = Script(tmp_path, EvalSection(every=1, mode=mode, patience=patience), scores)
    script.run(len(scores), total=100)
    assert script.stop.reason == (Reason.NONE if stops_at is None else Reason.EARLY)
    assert script.progress.step == (stops_at or len(scores))
    assert script.stop.exit_code == 0


def test_a_metric_that_is_no_score(tmp_path: Path) -> None:
    script = Script(tmp_path, EvalSection(every=1, metric="accuracy"), [1.0])
    script.run(1, 1)
    assert "'accuracy', but the scores are loss, other" in str(script.stop.failure())
    assert (script.stop.reason, script.stop.exit_code) == (Reason.FAILED, ExitCode.FAILED)
    assert script.progress.evaluated_step is None  # a run that can be mended makes it again
