"""An evaluation that fails, or that the process does not survive, costs no step, and is made when the run goes on."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from drawbar.distributed.rank_info import RankInfo
from drawbar.errors import ExitCode, UserError
from drawbar.evaluation.scoring import EvaluationFailed
from drawbar.tasks.causal_lm import CausalLM
from drawbar.tracking.jsonl import JsonlTracker
from drawbar.train.callbacks.evaluate import EvaluateCallback
from drawbar.train.step import RunProgress
from exhaustive import some
from harness import run_ranks
from runs import Fit, fit_in, losses, metrics, weights


class Scored(CausalLM):
    """causal_lm with a score of its own, which may fail at the third evaluation of a run (and was tried before)."""

    error: BaseException | None = None
    evaluations = 0
    has_trained = False

    def score(self, records: list[dict[str, Any]]) -> dict[str, float]:
        Scored.evaluations += 1
        if Scored.evaluations == 4 and Scored.error is not None:
            raise Scored.error
        return {"accuracy": 0.5 + 0.01 * (Scored.evaluations % 2)}


class PowerCut(BaseException):
    """Nothing after it is orderly."""


SETTINGS = ("eval.metric=accuracy", "eval.mode=max", "eval.every=2", "checkpoint.keep=9")
"""Evaluations at 2, 4, 6, …; the third is that of step 6."""


@pytest.fixture(autouse=True)
def _forget() -> None:
    Scored.error, Scored.evaluations, Scored.has_trained = None, 0, False


def saved(run: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in (run / "checkpoints").glob("step-*"))


def progress(run: Path, step: int) -> RunProgress:
    """What a checkpoint says."""
    state = json.loads((run / "checkpoints" / f"step-{step:08d}" / "state.json").read_text())
    return RunProgress(**state["progress"])


def lines(run: Path) -> list[tuple[int, list[str]]]:
    """What each line of the metrics is about."""
    return [(int(line["step"]), sorted(line)) for line in metrics(run)]


@pytest.mark.exhaustive
@pytest.mark.parametrize("every", ["null", "3", "4"])
def test_the_step_is_saved_first_and_a_mended_run_goes_on(every: str, fit: Fit, project: Path) -> None:
    settings = (*SETTINGS, f"checkpoint.every={every}")
    fit(*settings, "run.name=whole", task=Scored)
    Scored.error, Scored.evaluations = ZeroDivisionError("of the metric"), 0
    with pytest.raises(EvaluationFailed, match="of the metric") as failed:
        fit(*settings, task=Scored)
    run, whole = project / "runs" / "tiny", project / "runs" / "whole"
    assert failed.value.exit_code == ExitCode.FAILED
    assert max(saved(run)) == 6
    assert progress(run, 6).evaluated_step == 4
    log = (run / "logs" / "rank-0000.log").read_text()
    assert "test_failed_evaluations.py" in log
    assert "ZeroDivisionError: of the metric" in log

    Scored.error, Scored.evaluations = None, 3  # the evaluation of step 6 comes first
    fit(*settings, task=Scored)
    assert progress(run, 12) == progress(whole, 12)
    assert losses(run) == losses(whole)
    assert lines(run) == lines(whole)
    assert (run / "checkpoints" / "best.json").read_text() == (whole / "checkpoints" / "best.json").read_text()


def test_a_due_save_comes_before_the_evaluation(fit: Fit, run: Path) -> None:
    Scored.error = PowerCut()
    with pytest.raises(PowerCut):
        fit(*SETTINGS, "checkpoint.every=6", task=Scored)
    assert max(saved(run)) == 6
    assert progress(run, 6).evaluated_step == 4


@pytest.mark.exhaustive
def test_the_last_step_is_saved_before_its_evaluation_which_the_same_command_makes(fit: Fit, run: Path) -> None:
    settings = ("eval.metric=accuracy", "eval.mode=max", "eval.every=5", "checkpoint.every=null")
    Scored.error = PowerCut()
    with pytest.raises(PowerCut):
        fit(*settings, task=Scored)
    assert progress(run, 12).evaluated_step == 10
    fit(*settings, task=Scored)
    assert progress(run, 12).evaluated_step == 12
    assert [line["step"] for line in metrics(run) if "eval/validation/loss" in line] == [5, 10, 12]
    made = Scored.evaluations
    fit(*settings, task=Scored)
    assert Scored.evaluations == made + 1  # tried out, and not made again


@pytest.mark.exhaustive
def test_an_evaluation_that_its_checkpoint_did_not_hear_of_leaves_no_second_line(
    fit: Fit, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a process is killed between the line and the checkpoint."""
    with monkeypatch.context() as patch:
        patch.setattr(EvaluateCallback, "_compare", lambda *_: (_ for _ in ()).throw(PowerCut()))
        with pytest.raises(PowerCut):
            fit(*SETTINGS, "checkpoint.every=2", task=Scored)
    assert [line["step"] for line in metrics(run) if "eval/validation/loss" in line] == [2]
    fit(*SETTINGS, "checkpoint.every=2", task=Scored)
    assert [line["step"] for line in metrics(run) if "eval/validation/loss" in line] == [2, 4, 6, 8, 10, 12]


class FailsOnRank1(Scored):
    """In an evaluation, after what its forward needs the other rank for."""

    rank = 0

    def forward(self, model: Any, batch: Any) -> Any:
        outputs = super().forward(model, batch)
        Scored.has_trained |= model.training
        if Scored.has_trained and self.rank == 1 and not model.training:
            raise ValueError("of one rank")
        return outputs


class FailsInTheHead(Scored):
    """On both ranks, with the weights of the head gathered, which FSDP does not free after a forward."""

    def forward(self, model: Any, batch: Any) -> Any:
        Scored.has_trained |= model.training
        if Scored.has_trained and not model.training:
            model.lm_head.register_forward_pre_hook(lambda *_: 1 / 0)
        return super().forward(model, batch)


def fail_on_ranks(project: str, task: type[Scored], *settings: str) -> str:
    FailsOnRank1.rank = RankInfo.from_environment().rank
    try:
        fit_in(Path(project), *SETTINGS, "checkpoint.every=null", *settings, task=task)
    except UserError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("strategy", some(["ddp", "fsdp"], 1))
def test_one_rank_fails_and_all_save(strategy: str, project: Path) -> None:
    told = run_ranks(fail_on_ranks, 2, str(project), FailsOnRank1, f"parallel.strategy={strategy}")
    assert told[0] == told[1]
    assert "failed on rank 1" in told[0]
    assert "ValueError: of one rank" in told[0]
    assert saved(project / "runs" / "tiny") == [2]
    for rank in (0, 1):
        assert "ValueError: of one rank" in (project / f"runs/tiny/logs/rank-{rank:04d}.log").read_text()


@pytest.mark.exhaustive
def test_what_a_failed_forward_had_gathered_in_bf16_is_saved_in_fp32(project: Path) -> None:
    # in both runs: a task with a forward of its own, as the second one has, gets logits and padding anyway
    settings = ("parallel.strategy=fsdp", "precision=bf16", "task.cross_entropy=plain", "data.padding_free=false")
    told = run_ranks(fail_on_ranks, 2, str(project), Scored, *settings, "checkpoint.every=2", "run.name=whole")
    assert told == ["nothing", "nothing"]
    told = run_ranks(fail_on_ranks, 2, str(project), FailsInTheHead, *settings)
    assert "ZeroDivisionError" in told[0]
    wanted, found = (weights(project / "runs" / name, 2) for name in ("whole", "tiny"))
    assert wanted.keys() == found.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


def test_metrics_that_cannot_be_written_cost_nothing(fit: Fit, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(JsonlTracker, "log", fail)
    monkeypatch.setattr("drawbar.train.callbacks.evaluate.write_results", fail)
    assert fit().exit_code == 0
    assert max(saved(run)) == 12
    assert (run / "logs" / "rank-0000.log").read_text().count("JsonlTracker: OSError") == 1
