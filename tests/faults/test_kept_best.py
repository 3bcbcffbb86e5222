"""The best checkpoint stays until a better one is complete, also where the save of the better one fails."""

import resource
from pathlib import Path
from typing import Any

import pytest

import drawbar
from drawbar.checkpoint import space
from drawbar.checkpoint.directory import CheckpointDirectory
from drawbar.checkpoint.read import read_state
from drawbar.errors import UserError
from drawbar.tasks.causal_lm import CausalLM
from drawbar.util.best_score import BestScore
from exhaustive import params
from harness import wait_until
from runs import Fit

SETTINGS = ("eval.metric=accuracy", "eval.mode=max", "eval.every=3", "checkpoint.keep=1")


class Scripted(CausalLM):
    """causal_lm with a scripted accuracy for each evaluation."""

    accuracies: tuple[float, ...]

    def score(self, records: list[dict[str, Any]]) -> dict[str, float]:
        self.evaluations = getattr(self, "evaluations", -1) + 1  # the first call only tries the task
        return {"accuracy": self.accuracies[self.evaluations - 1]}


class FailingSave(drawbar.Callback):
    """Lets the save of step 6 fail: files can be no larger than 30 kB meanwhile."""

    def on_step(self, run: drawbar.RunHandle, info: drawbar.StepInfo) -> None:
        folder = run.run_dir / "checkpoints"
        if info.step == 5:
            wait_until(lambda: CheckpointDirectory(folder).best_record() is not None, "the checkpoint of step 3")
            if run.config.checkpoint.every == 4:
                wait_until((folder / "step-00000004").exists, "the checkpoint of step 4")
            self._limit(30_000)
        if info.step == 7:
            log = run.run_dir / "logs" / "rank-0000.log"
            wait_until(lambda: "the save of step 6 failed" in log.read_text(), "the save to fail")
            self._limit(resource.RLIM_INFINITY)

    @staticmethod
    def _limit(size: int) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


@pytest.mark.parametrize("every", params(["4", "null"], often=["4"]))
@pytest.mark.parametrize(
    ("later", "best"),
    [
        ((0.3, 0.4), BestScore(step=3, metric="accuracy", score=0.5)),
        ((0.7, 0.6), BestScore(step=9, metric="accuracy", score=0.7)),  # better than the best one that is there
    ],
)
def test_a_skipped_save_is_not_the_best(
    every: str, later: tuple[float, float], best: BestScore, fit: Fit, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Scripted, "accuracies", (0.5, 0.9, *later), raising=False)
    settings = (*SETTINGS, "checkpoint.on_error=warn", f"checkpoint.every={every}")
    outcome = fit(*settings, task=Scripted, callbacks=[FailingSave()])
    directory = CheckpointDirectory(run / "checkpoints")
    assert directory.steps() == [best.step, 12]
    assert directory.best_record() == best
    assert (outcome.progress.best_step, outcome.progress.best_score) == (best.step, best.score)
    newest = directory.latest()
    assert newest is not None
    assert read_state(newest)["progress"] == outcome.progress.state()


class Stops(drawbar.Callback):
    def on_step(self, run: drawbar.RunHandle, info: drawbar.StepInfo) -> None:
        if info.step == 8:
            run.request_stop()


@pytest.mark.parametrize(("later", "best"), [((0.7, 0.6), (9, 0.7)), ((0.4, 0.3), (3, 0.5))])
def test_a_failed_save_is_not_the_best_of_the_run_that_goes_on(
    later: tuple[float, float], best: tuple[int, float], fit: Fit, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ``on_error: stop``, the save that ends the run may be that of a later step than the one that failed."""
    monkeypatch.setattr(Scripted, "accuracies", (0.5, 0.4), raising=False)
    stopped = fit(*SETTINGS, task=Scripted, callbacks=[Stops()])
    directory = CheckpointDirectory(run / "checkpoints")
    assert directory.steps() == [3, 8]
    directory.update_state(8, {"progress": stopped.progress.state() | {"best_step": 6, "best_score": 0.9}})
    monkeypatch.setattr(Scripted, "accuracies", later)
    ended = fit(*SETTINGS, task=Scripted).progress
    assert (ended.best_step, ended.best_score) == best
    assert directory.steps() == [best[0], 12]
    assert directory.best_record() == BestScore(step=best[0], metric="accuracy", score=best[1])


class FullDisk(drawbar.Callback):
    """Says from the second evaluation on that there is no free space: a small disk that others fill."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch

    def on_evaluate(self, run: drawbar.RunHandle, scores: Any) -> None:
        if run.step == 6:
            self._monkeypatch.setattr(space, "free_bytes", lambda folder: 0)


def test_no_room_for_a_better_one(fit: Fit, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is deleted to make room is not the best checkpoint that there is."""
    monkeypatch.setattr(Scripted, "accuracies", (0.5, 0.9), raising=False)
    with pytest.raises(UserError, match="step-00000006 was not begun, as it does not fit"):
        fit(*SETTINGS, "checkpoint.every=5", task=Scripted, callbacks=[FullDisk(monkeypatch)])
    directory = CheckpointDirectory(run / "checkpoints")
    assert directory.steps() == [3, 5]
    assert directory.resolve("best").name == "step-00000003"


@pytest.mark.parametrize("steps", [6, 9])
def test_a_run_that_ended_between_the_writes_of_its_best_step(
    steps: int, fit: Fit, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint of step 6 says that it is the best one, and ``best.json`` does not: also if it was the last."""
    set_best = CheckpointDirectory.set_best

    def fails_at_6(directory: CheckpointDirectory, step: int, metric: str, score: float) -> None:
        if step == 6:
            raise space.DiskFault("the disk is full", remedy="free some space")
        set_best(directory, step, metric, score)

    monkeypatch.setattr(Scripted, "accuracies", (0.5, 0.7), raising=False)
    monkeypatch.setattr(CheckpointDirectory, "set_best", fails_at_6)
    settings = (*SETTINGS, "optim.schedule=constant")
    with pytest.raises(UserError, match="the disk is full"):
        fit(*settings, "train.steps=6", task=Scripted)
    directory = CheckpointDirectory(run / "checkpoints")
    assert directory.best_record() == BestScore(step=3, metric="accuracy", score=0.5)
    monkeypatch.setattr(CheckpointDirectory, "set_best", set_best)
    monkeypatch.setattr(Scripted, "accuracies", (0.6,))
    fit(*settings, f"train.steps={steps}", task=Scripted)
    assert directory.best_record() == BestScore(step=6, metric="accuracy", score=0.7)
