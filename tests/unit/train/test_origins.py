"""A run that began at another run's checkpoint begins there again, until it has a checkpoint of its own."""

import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest

from drawbar import Callback, RunHandle
from drawbar.errors import ExitCode, UserError
from exhaustive import some
from runs import Fit, losses

QUIET = ("eval.every=null", "data.validation=null", "train.steps=16", "checkpoint.keep_best=false")


class LeavesAtOnce(Callback):
    def on_train_start(self, run: RunHandle) -> None:
        run.request_stop()


@pytest.mark.parametrize("forked", some([True, False], 1))
def test_a_run_that_stopped_before_its_first_checkpoint(
    fit: Fit, project: Path, forked: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    fit(*QUIET, "train.steps=12")
    source = str(project / "runs" / "tiny" / "checkpoints" / "step-00000008")
    how = {"fork": "other"} if forked else {"resume": source}
    named = () if forked else ("run.name=other",)
    changed = ("optim.lr=5e-3",) if forked else ()
    fit(*QUIET, *changed, "run.name=straight", resume=source) if not forked else fit(*QUIET, *changed, fork="straight")
    capfd.readouterr()
    fit(*QUIET, *changed, *named, callbacks=[LeavesAtOnce()], **how)
    assert "other: stopped before its first step" in capfd.readouterr().out
    other = project / "runs" / "other"
    assert not list((other / "checkpoints").glob("step-*"))
    (project / "runs").rename(project / "moved")
    assert fit(*QUIET, *changed, "run.name=other", "run.dir=moved").progress.step == 16
    assert losses(project / "moved" / "other") == losses(project / "moved" / "straight")


def test_a_fork_must_have_a_name_of_its_own(fit: Fit, project: Path) -> None:
    fit(*QUIET, "train.steps=4")
    before = losses(project / "runs" / "tiny")
    with pytest.raises(UserError, match="would have the name of the run that it starts from: tiny") as refused:
        fit(*QUIET, "optim.lr=5e-3", fork="tiny")
    assert refused.value.where == "--fork"
    assert losses(project / "runs" / "tiny") == before


def test_a_run_whose_origin_is_gone_is_refused(fit: Fit, project: Path) -> None:
    fit(*QUIET, "train.steps=12")
    fit(*QUIET, fork="other", callbacks=[LeavesAtOnce()])
    shutil.rmtree(project / "runs" / "tiny" / "checkpoints" / "step-00000012")
    with pytest.raises(UserError, match="has no checkpoint yet, and the one that it started from") as lost:
        fit(*QUIET, "run.name=other")
    assert "--resume PATH" in str(lost.value.remedy)
    assert fit(*QUIET, fork="other").progress.step == 16  # with --fork, from the newest that there is
    assert min(losses(project / "runs" / "other")) == 9


def test_the_same_fork_begins_where_it_began(fit: Fit, project: Path) -> None:
    """The run that it comes from has trained on meanwhile."""
    fit(*QUIET, "train.steps=12")
    fit(*QUIET, fork="other", callbacks=[LeavesAtOnce()])
    fit(*QUIET, "train.steps=14")
    fit(*QUIET, fork="other")
    assert min(losses(project / "runs" / "other")) == 13


@pytest.mark.parametrize("forked", [True, False])
def test_a_new_run_must_have_a_step_to_make(fit: Fit, project: Path, forked: bool) -> None:
    fit(*QUIET)
    newest = str(project / "runs" / "tiny" / "checkpoints" / "step-00000016")
    with pytest.raises(UserError, match="asks for 16 steps, and the run that it starts from has made 16") as none:
        fit(*QUIET, fork="other") if forked else fit(*QUIET, "run.name=other", resume=newest)
    assert none.value.exit_code is ExitCode.WRONG_REQUEST
    assert not (project / "runs" / "other").exists()


def test_a_name_of_another_run_is_no_fork_to_go_on_with(fit: Fit, project: Path) -> None:
    """Only the same command goes on with a fork: another run, another step or the weights alone are another fork."""
    fit(*QUIET, "train.steps=12")
    fit(*QUIET, "run.name=second", "train.steps=4")
    fit(*QUIET, fork="other", resume="8", callbacks=[LeavesAtOnce()])
    other = project / "runs" / "other"
    began = f"a run other already, which began from step-00000008 of {project / 'runs' / 'tiny'}; --fork asks for "
    for settings, ways, wanted in (
        ((), {"resume": "12"}, "step-00000012 of "),
        ((), {"resume": "8", "weights_only": True}, "step-00000008 of .* \\(weights only\\)"),
        (("run.name=second",), {}, "the newest checkpoint of .*second"),
    ):
        with pytest.raises(UserError, match=f"{began}{wanted}") as refused:
            fit(*QUIET, *settings, fork="other", **ways)  # type: ignore[arg-type]
        assert refused.value.exit_code is ExitCode.WRONG_REQUEST
        assert "run.name=other without --fork" in str(refused.value.remedy)
    with pytest.raises(
        UserError, match="a run second already, which did not begin as a fork; --fork asks for the newest"
    ):
        fit(*QUIET, fork="second")
    assert not losses(other)
    fit(*QUIET, fork="other", resume="8")
    shutil.rmtree(project / "runs" / "tiny" / "checkpoints" / "step-00000008")
    assert fit(*QUIET, fork="other", resume="8").progress.step == 16
    assert min(losses(other)) == 9


def test_a_fork_says_what_becomes_of_schedule_and_optimizer(fit: Fit, capfd: pytest.CaptureFixture[str]) -> None:
    fit(*QUIET, "train.steps=4", "optim.schedule=linear", "optim.warmup=0")
    capfd.readouterr()
    fit(*QUIET, "train.steps=8", "optim.schedule=linear", "optim.warmup=0", fork="longer", weights_only=True)
    said = capfd.readouterr().err
    assert "train.steps was 4 and is now 8: the run continues from step 4 to step 8" in said
    assert "that of a run of 8 steps: it continues at 0.005" in said
    assert "the optimizer starts fresh" in said


def test_weights_that_do_not_fit_are_named_once(fit: Fit, capfd: pytest.CaptureFixture[str]) -> None:
    fit(*QUIET, "train.steps=4")
    capfd.readouterr()
    with pytest.raises(UserError, match="the checkpoint does not fit this model"):
        fit(*QUIET, "task.from_scratch.hidden_size=64", fork="wide")
    assert "does not fit" not in capfd.readouterr().err


def test_a_fork_trains_no_other_tokenizer(fit: Fit, project: Path) -> None:
    fit(*QUIET, "train.steps=4")
    with pytest.raises(
        UserError, match="the weights belong to the tokenizer of the run that they come from"
    ) as refused:
        fit(*QUIET, "task.tokenizer.vocab_size=280", fork="other")
    assert all(size in str(refused.value) for size in ("300", "280"))
    assert not (project / "runs" / "other").exists()


def test_a_fork_heeds_another_tokenizer(fit: Fit, project: Path, capfd: pytest.CaptureFixture[str]) -> None:
    fit(*QUIET, "train.steps=4")
    shutil.copytree(project / "runs" / "tiny" / "tokenizer", project / "own")
    (project / "own" / "mark").touch()
    capfd.readouterr()
    fit(*QUIET, "task.tokenizer=own", "train.steps=6", fork="other")
    assert "task.tokenizer: own, which is not the tokenizer of the run" in capfd.readouterr().err


def test_on_train_start_comes_before_an_evaluation(fit: Fit) -> None:
    class Order(Callback):
        def __init__(self) -> None:
            self.events: list[str] = []

        def on_train_start(self, run: RunHandle) -> None:
            self.events.append("start")

        def on_evaluate(self, run: RunHandle, scores: Mapping[str, float]) -> None:
            self.events.append("evaluate")

    order = Order()
    fit("eval.at_start=true", "train.steps=3", callbacks=[order])
    assert order.events == ["start", "evaluate", "evaluate"]
