"""The same command again, and a run that begins at another run's checkpoint."""

import errno
import fcntl
import importlib
import json
import os
import shutil
import signal
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from drawbar import Callback, RunHandle, StepInfo
from drawbar.distributed.process_group import Distributed
from drawbar.errors import ExitCode, UserError
from drawbar.tasks.batch import Batch
from drawbar.tasks.causal_lm import CausalLM
from drawbar.tracking.run_view import RunState, RunStatus, write_run_status
from drawbar.train.run_dir_lock import lock_run_dir
from exhaustive import some
from harness import run_ranks
from runs import Fit, fit_in, losses, metrics, scores, weights


class LeavesAtOnce(Callback):
    def on_train_start(self, run: RunHandle) -> None:
        run.request_stop()


class Interrupted(CausalLM):
    """causal_lm that gets a SIGTERM, as from a scheduler, in its sixth training step, or fails there."""

    __qualname__ = "CausalLM"  # the run goes on with the class of this name
    fails = False
    told_in = 6
    tokenizers_built = 0

    def __init__(self, run_config: Any) -> None:
        super().__init__(run_config)
        self.steps = 0

    def build_tokenizer(self) -> Any:
        type(self).tokenizers_built += 1
        return super().build_tokenizer()

    def forward(self, model: nn.Module, batch: Batch) -> Any:
        self.steps += model.training
        if model.training and self.steps == self.told_in:
            if self.fails:
                raise ValueError("planted")
            os.kill(os.getpid(), signal.SIGTERM)
        return super().forward(model, batch)


class InterruptedLast(Interrupted):
    __qualname__ = "CausalLM"
    told_in = 24


def test_a_signal_in_the_last_step_asks_for_no_restart(fit: Fit) -> None:
    assert fit("data.validation=null", "eval.every=null", task=InterruptedLast).exit_code == ExitCode.DONE


def test_a_signal_while_the_ranks_part_asks_for_no_restart(fit: Fit, monkeypatch: pytest.MonkeyPatch) -> None:
    part = Distributed.__exit__

    def told(world: Distributed, *error: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        part(world, *error)

    monkeypatch.setattr(Distributed, "__exit__", told)
    outside: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: outside.append(number))
    try:
        assert fit("train.steps=3").exit_code == ExitCode.DONE
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not outside


class Failing(Interrupted):
    __qualname__ = "CausalLM"  # the run goes on with the class of this name
    fails = True


class Spoiled(CausalLM):
    """causal_lm whose data go bad."""

    is_bad = False

    def collate(self, samples: list[dict[str, Any]]) -> Batch:
        if Spoiled.is_bad:
            raise ValueError("bad data")
        return super().collate(samples)


class SpoilFifth(Callback):
    """Lets the data of the sixth step be bad, and asks for something in the fifth."""

    def __init__(self, ask: Callable[[RunHandle], None]) -> None:
        self.ask = ask

    def on_step(self, run: RunHandle, info: StepInfo) -> None:
        if info.step == 5:
            Spoiled.is_bad = True
            self.ask(run)


def fail(run: RunHandle) -> None:
    raise ValueError("planted")


ONE_FORWARD = ("train.micro_batch=8", "eval.at_start=true")
AS_OWN = ("data.padding_free=false", "task.cross_entropy=plain")
"""A task with a ``forward`` of its own is given padded rows: the runs that it is compared with are, too."""


def contents(run: Path) -> dict[str, bytes]:
    """Every file of a run but its log, with what it holds."""
    files = (path for path in run.rglob("*") if path.is_file())
    return {str(path.relative_to(run)): path.read_bytes() for path in files if path.parent.name != "logs"}


def state_of(run: Path) -> tuple[str, int, int]:
    """What ``status.json`` says: state, step, and steps of the whole run."""
    status = RunStatus.read(run)
    assert status is not None
    return status.state, status.step, status.total_steps


@pytest.mark.parametrize("settings", [("tracking.tensorboard=true",), ("eval.at_start=true", "checkpoint.every=null")])
def test_a_finished_run_says_so_and_changes_nothing(
    settings: tuple[str, ...], fit: Fit, run: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    first = fit(*settings)
    before = contents(run)
    capfd.readouterr()
    again = fit(*settings)
    assert "tiny is complete: it has made 12 steps" in capfd.readouterr().out
    assert contents(run) == before
    assert again == first


def test_a_run_that_stopped_early_is_finished(fit: Fit, run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    settings = ("optim.lr=0.0", "eval.every=2", "eval.patience=2", "train.steps=50")
    assert fit(*settings).progress.step == 6
    before = contents(run)
    capfd.readouterr()
    assert fit(*settings).progress.step == 6
    assert "tiny is complete: it has made 6 steps, and stopped early" in capfd.readouterr().out
    assert contents(run) == before
    assert fit(*settings[:2], "eval.patience=4", settings[3]).progress.step == 10  # which may be decided anew


@pytest.mark.parametrize("every", some([3, 6], 1))
def test_an_interrupted_run_goes_on(every: int, fit: Fit, project: Path) -> None:
    settings = (*ONE_FORWARD, *AS_OWN, f"eval.every={every}", "checkpoint.every=null")
    fit(*settings, "run.name=whole")
    first = fit(*settings, task=Interrupted)
    assert (first.exit_code, first.progress.step) == (ExitCode.REQUEUE, 6)
    assert state_of(project / "runs" / "tiny") == ("stopped", 6, 12)
    built = Interrupted.tokenizers_built
    assert fit(*settings).exit_code == ExitCode.DONE
    assert state_of(project / "runs" / "tiny") == ("complete", 12, 12)
    assert Interrupted.tokenizers_built == built
    whole, run = project / "runs" / "whole", project / "runs" / "tiny"
    assert losses(run) == losses(whole)
    assert scores(run) == scores(whole)
    assert [line["step"] for line in metrics(run)] == [line["step"] for line in metrics(whole)]
    for name, tensor in weights(whole, 12).items():
        assert torch.equal(tensor, weights(run, 12)[name])


@pytest.mark.parametrize("state", some(["training", "stopped", "failed"], 1))
def test_a_finished_run_is_complete_whatever_its_last_process_said(state: RunState, fit: Fit, run: Path) -> None:
    fit()
    write_run_status(run, state, 11, 12, started=0.0)
    fit()
    assert state_of(run) == ("complete", 12, 12)


def test_a_run_that_is_told_to_stop_at_its_last_step_is_complete(
    fit: Fit, run: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    class StopAtTheEnd(Callback):
        def on_step(self, run: RunHandle, info: StepInfo) -> None:
            if info.last:
                run.request_stop()

    fit(callbacks=[StopAtTheEnd()])
    assert state_of(run) == ("complete", 12, 12)
    assert "12 steps made" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("ask", "error"),
    [
        (RunHandle.request_stop, None),
        (lambda run: os.kill(os.getpid(), signal.SIGTERM), None),
        (fail, r"the callback SpoilFifth.on_step failed: ValueError: planted"),
        (lambda run: None, "bad data"),
    ],
    ids=["stop", "signal", "failure", "nothing"],
)
def test_a_stop_comes_before_an_error_of_the_next_step(
    ask: Callable[[RunHandle], None], error: str | None, fit: Fit, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Spoiled, "is_bad", False)
    settings = ("checkpoint.every=null", "checkpoint.keep_best=false", "eval.every=null")
    with pytest.raises(UserError, match=error) if error else nullcontext():
        fit(*settings, task=Spoiled, callbacks=[SpoilFifth(ask)])
    saved = [path.name for path in (run / "checkpoints").glob("step-*")]
    assert saved == ["step-00000005"]


def test_what_a_callback_asks_for_before_the_first_step_is_done(fit: Fit, run: Path) -> None:
    class AtTheStart(Callback):
        def __init__(self, ask: Callable[[RunHandle], None]) -> None:
            self.ask = ask

        def on_train_start(self, run: RunHandle) -> None:
            self.ask(run)

    settings = ("checkpoint.every=null", "checkpoint.keep_best=false")
    fit(*settings, callbacks=[AtTheStart(RunHandle.request_stop)])
    assert not list((run / "checkpoints").glob("step-*"))
    fit(*settings, callbacks=[AtTheStart(RunHandle.request_save)])
    assert [path.name for path in sorted((run / "checkpoints").glob("step-*"))] == ["step-00000001", "step-00000012"]


@pytest.mark.exhaustive
def test_a_run_that_failed_before_its_first_checkpoint_begins_anew(fit: Fit, project: Path) -> None:
    settings = (*ONE_FORWARD, "tracking.tensorboard=true", "checkpoint.every=null", "checkpoint.keep_best=false")
    with pytest.raises(UserError, match=r"Interrupted\.forward, which Failing inherits, fails: ValueError"):
        fit(*settings, task=Failing)
    assert state_of(project / "runs" / "tiny")[0] == "failed"
    fit(*settings)
    fit(*settings, "run.name=whole")
    whole, run = project / "runs" / "whole", project / "runs" / "tiny"
    assert [line["step"] for line in metrics(run)] == [line["step"] for line in metrics(whole)]
    assert losses(run) == losses(whole)
    assert scores(run) == scores(whole)


def test_more_steps_go_on_with_a_complete_run(fit: Fit, run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The learning rates of the steps that are made stay, and those to come are of the longer run."""
    settings = ("optim.schedule=linear", "optim.warmup=0", "checkpoint.every=null")
    fit(*settings, "train.steps=6")
    begun = metrics(run)
    capfd.readouterr()
    assert fit(*settings, "train.steps=9").progress.step == 9
    said = capfd.readouterr().err
    assert "train.steps was 6 and is now 9: the run continues from step 6 to step 9" in said
    assert "that of a run of 9 steps: it continues at 0.0033" in said
    rates = {line["step"]: line["train/lr"] for line in metrics(run) if "train/lr" in line}
    lr = 1e-2
    assert rates == pytest.approx(
        {step: lr * (1 - (step - 1) / (6 if step <= 6 else 9)) for step in range(1, 10)}, abs=1e-9
    )
    assert metrics(run)[: len(begun)] == begun
    capfd.readouterr()
    assert fit(*settings, "train.steps=9").progress.step == 9
    assert "is now" not in capfd.readouterr().err


@pytest.mark.exhaustive
def test_a_longer_run_may_keep_its_schedule(fit: Fit, run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """And afterwards goes back to one that is computed anew."""
    settings = ("optim.schedule=linear", "optim.warmup=0", "checkpoint.every=null", "eval.every=null")
    fit(*settings, "train.steps=6", "optim.min_lr_ratio=0.1")
    assert "optim.schedule_steps" not in capfd.readouterr().err
    fit(*settings, "train.steps=9", "optim.min_lr_ratio=0.1", "optim.schedule_steps=6")
    said = capfd.readouterr().err
    assert "that of a run of 6 steps: it continues at 0.0025" in said
    assert "change little" not in said
    fit(*settings, "train.steps=12", "optim.min_lr_ratio=0.1")
    assert "optim.schedule_steps=9 keeps" in capfd.readouterr().err
    rates = {line["step"]: line["train/lr"] for line in metrics(run) if "train/lr" in line}
    planned = {step: 6 if step <= 9 else 12 for step in range(1, 13)}
    assert rates == pytest.approx(
        {step: 1e-2 * (0.1 + 0.9 * (1 - (min(step, of) - 1) / of)) for step, of in planned.items()}, abs=1e-9
    )


@pytest.mark.exhaustive
def test_a_kept_schedule_that_has_ended_near_zero_is_warned_of(fit: Fit, capfd: pytest.CaptureFixture[str]) -> None:
    settings = ("optim.schedule=polynomial", "optim.power=3", "optim.warmup=0", "eval.every=null")
    fit(*settings, "train.steps=6")
    fit(*settings, "train.steps=8", "optim.schedule_steps=6")
    said = capfd.readouterr().err
    assert "after step 6 the schedule is over, and the learning rate stays at 4.6e-05" in said


@pytest.mark.exhaustive
def test_a_longer_run_without_a_schedule_is_the_run_of_so_many_steps(fit: Fit, project: Path) -> None:
    settings = ("optim.schedule=constant", "optim.warmup=0", "train.steps=null", "eval.every=null")
    fit(*settings, "train.epochs=0.25")
    fit(*settings, "train.epochs=0.5")
    fit(*settings, "train.epochs=0.5", "run.name=straight")
    tiny, straight = project / "runs" / "tiny", project / "runs" / "straight"
    assert losses(tiny) == losses(straight)
    for name, tensor in weights(straight, 10).items():
        assert torch.equal(tensor, weights(tiny, 10)[name])


@pytest.mark.parametrize(
    ("shorter", "says"),
    [
        ("train.steps=8", r"train\.steps=8 asks for 8 steps, but 12 are made already"),
        ("train.epochs=0.5", r"train\.epochs=0\.5 asks for 10 steps, but 12 are made already"),
    ],
)
def test_fewer_steps_than_were_made_are_refused(shorter: str, says: str, fit: Fit, run: Path) -> None:
    fit()
    before = contents(run)
    with pytest.raises(UserError, match=says):
        fit("train.steps=null", shorter)
    assert contents(run) == before


@pytest.mark.exhaustive
def test_what_can_be_done_about_another_configuration(fit: Fit, run: Path) -> None:
    """There is nothing to fork before the first checkpoint, and nothing to lose."""
    with pytest.raises(UserError, match=r"Interrupted\.forward, which Failing inherits, fails: ValueError"):
        fit(*ONE_FORWARD, "checkpoint.every=null", "checkpoint.keep_best=false", task=Failing)
    with pytest.raises(UserError, match="another configuration") as refused:
        fit("optim.lr=0.5", task=CausalLM)
    assert "delete the folder, which has no checkpoint yet" in str(refused.value.remedy)
    assert "--fork" not in str(refused.value.remedy)
    fit(*ONE_FORWARD)
    with pytest.raises(UserError, match="another configuration") as refused:
        fit(*ONE_FORWARD, "optim.lr=0.5")
    assert "delete the folder" in str(refused.value.remedy)
    assert "--fork" in str(refused.value.remedy)


def test_a_run_that_diverges_before_its_first_checkpoint_has_nothing_to_fork(fit: Fit) -> None:
    with pytest.raises(UserError, match="diverged") as lost:
        fit("optim.lr=1e6", "optim.warmup=0", "checkpoint.every=null", "checkpoint.keep_best=false", "eval.every=null")
    assert "--fork" not in str(lost.value)
    assert "deleting its folder" in str(lost.value.remedy)


@pytest.mark.exhaustive
def test_a_tokenizer_is_trained_once_for_a_run(fit: Fit) -> None:
    Interrupted.tokenizers_built = 0
    for _ in range(2):
        fit(*ONE_FORWARD, task=Interrupted)
    assert Interrupted.tokenizers_built == 1


def test_begin_at_a_checkpoint_of_another_run(fit: Fit, project: Path) -> None:
    fit()
    checkpoint = str(project / "runs" / "tiny" / "checkpoints" / "step-00000008")
    for _ in range(2):  # the same command again goes on with the run, which is complete
        outcome = fit("run.name=other", resume=checkpoint)
        assert outcome.progress.step == 12
    tiny, other = project / "runs" / "tiny", project / "runs" / "other"
    assert losses(other) == {step: loss for step, loss in losses(tiny).items() if step > 8}
    for name, tensor in weights(tiny, 12).items():
        assert torch.equal(tensor, weights(other, 12)[name])


def test_an_interrupted_run_that_began_elsewhere_goes_on(fit: Fit, project: Path) -> None:
    fit("train.steps=20", *ONE_FORWARD, "eval.every=null")
    checkpoint = str(project / "runs" / "tiny" / "checkpoints" / "step-00000012")
    command = ("train.steps=20", *ONE_FORWARD, "eval.every=null", "run.name=other")
    assert fit(*command, resume=checkpoint, task=Interrupted).progress.step == 18
    with pytest.raises(UserError, match="exists already, and started from another checkpoint"):
        fit(*command, resume=checkpoint.replace("00000012", "00000016"))
    with pytest.raises(UserError, match="exists already, and started with the optimizer state"):
        fit(*command, resume=checkpoint, weights_only=True)
    assert fit(*command, resume=checkpoint).progress.step == 20
    assert list(losses(project / "runs" / "other")) == list(range(13, 21))


def test_an_older_checkpoint_of_the_run_itself_is_refused(fit: Fit, run: Path) -> None:
    fit()
    before = contents(run)
    older = str(run / "checkpoints" / "step-00000008")
    for resume in (older, "8", "step-00000008"):
        with pytest.raises(UserError, match="resuming from it would lose later steps") as refused:
            fit(resume=resume)
        assert "--fork" in str(refused.value.remedy)
    assert fit(resume=str(run / "checkpoints" / "step-00000012")).progress.step == 12
    with pytest.raises(UserError, match="no checkpoint 'step-00000009'"):
        fit(resume="step-00000009")
    with pytest.raises(UserError, match="exists already"):
        fit(resume="never")
    assert contents(run) == before


def moments(run: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(run / "checkpoints" / f"step-{step:08d}" / "optimizer-00000.safetensors")


def updates(run: Path, step: int) -> set[float]:
    """How many updates the optimizer says that it has made of each parameter."""
    return {float(tensor) for name, tensor in moments(run, step).items() if name.endswith("/step")}


@pytest.mark.parametrize("interrupted", some([False, True], 1))
def test_a_fork_of_the_weights_alone(fit: Fit, project: Path, interrupted: bool) -> None:
    """Step, data and learning rate go on; the optimizer begins anew. So it is after a stop before the first save."""
    settings = ("train.steps=16", "eval.every=null")
    fit(*settings, "train.steps=12", "optim.schedule_steps=16")
    fit(*settings, fork="whole")
    if interrupted:
        fit(*settings, fork="anew", weights_only=True, callbacks=[LeavesAtOnce()])
        fit(*settings, "run.name=anew")
    else:
        fit(*settings, fork="anew", weights_only=True)
    runs = project / "runs"
    assert (updates(runs / "whole", 16), updates(runs / "anew", 16)) == ({16.0}, {4.0})
    rates, anew = (
        {line["step"]: line["train/lr"] for line in metrics(runs / name) if "train/lr" in line}
        for name in ("whole", "anew")
    )
    assert rates == anew
    assert list(rates) == [13, 14, 15, 16]
    whole_losses, own_losses = losses(runs / "whole"), losses(runs / "anew")
    assert whole_losses[13] == own_losses[13]
    assert whole_losses[14] != own_losses[14]
    before = updates(runs / "anew", 16)
    fit(*settings, "train.steps=18", fork="anew", weights_only=True)  # its own optimizer goes on
    assert updates(runs / "anew", 18) == {count + 2 for count in before}


def test_weights_alone_are_those_of_another_run(fit: Fit, run: Path) -> None:
    fit(*ONE_FORWARD)
    for resume in ("auto", "never", "latest", str(run / "checkpoints" / "step-00000012")):
        with pytest.raises(UserError, match="a checkpoint of another run, and none is named") as refused:
            fit(*ONE_FORWARD, resume=resume, weights_only=True)
        assert refused.value.where == "--weights-only"
    newest = str(run / "checkpoints" / "step-00000012")
    fit(*ONE_FORWARD, "run.name=other", "train.steps=14", resume=newest, weights_only=True)
    assert updates(run.parent / "other", 14) == {2.0}


def test_a_fork_of_another_optimizer_and_data(fit: Fit, project: Path, capfd: pytest.CaptureFixture[str]) -> None:
    fit()
    (project / "more.txt").write_text((project / "train.txt").read_text() + "the load\n" * 30)
    capfd.readouterr()
    outcome = fit("optim.name=sgd", "data.train=more.txt", "train.steps=16", fork="changed")
    warnings = capfd.readouterr().err
    assert "only the weights are loaded" in warnings
    assert "the data starts at its first sample" in warnings
    assert outcome.run_dir == Path("runs") / "changed"
    assert list(losses(project / "runs" / "changed")) == [13, 14, 15, 16]
    assert outcome.progress.best_step is None or outcome.progress.best_step > 12


def test_other_validation_data_are_refused_and_a_fork_forgets_the_best_score(fit: Fit, project: Path) -> None:
    fit("train.steps=6", "eval.every=3")
    lines = (project / "valid.txt").read_text().splitlines()
    (project / "valid.txt").write_text("\n".join(lines[:5]) + "\n")
    with pytest.raises(UserError, match="the validation data changed"):
        fit("train.steps=6", "eval.every=3")
    assert fit("train.steps=8", "eval.every=4", fork="other").progress.best_step == 8


def test_a_file_system_without_locks_says_so_and_trains(
    fit: Fit, run: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    fit("train.steps=6")
    monkeypatch.setattr(fcntl, "flock", no_locks)
    fit("train.steps=6")
    assert "without locks" in capfd.readouterr().err


@pytest.mark.exhaustive
def test_a_stream_goes_on_with_mended_code_and_not_with_other_data(
    fit: Fit, project: Path, run: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    code = project / "streaming_task.py"
    code.write_text("import drawbar\n\nclass Mine(drawbar.CausalLM):\n    pass\n")
    monkeypatch.syspath_prepend(str(project))
    mine = importlib.import_module("streaming_task").Mine
    settings = ("data.streaming=true", "data.validation=null", "eval.every=null", "train.steps=8", "task.type=mine")
    fit(*settings, task=mine)
    shutil.rmtree(run / "checkpoints" / "step-00000008")
    code.write_text(code.read_text() + "\n\ndef metric(predictions, references):\n    return 1.0\n")
    capfd.readouterr()
    assert fit(*settings, task=mine).progress.step == 8
    assert "changed since the checkpoint was written: streaming_task.py;" in capfd.readouterr().err
    shutil.rmtree(run / "checkpoints" / "step-00000008")
    (project / "train.txt").write_text("the load\n")
    with pytest.raises(UserError, match="the training data changed"):
        fit(*settings, task=mine)


def test_a_stream_keeps_its_lanes_and_a_fork_finds_its_place(
    fit: Fit, run: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = ("data.streaming=true", "data.validation=null", "eval.every=null", "train.steps=8")
    fit(*settings, "data.stream_lanes=12", "data.shuffle_buffer=48")
    with pytest.raises(UserError, match=r"set data.shuffle_buffer=48 data.stream_lanes=12; for a new one"):
        fit(*settings)
    capfd.readouterr()
    steps = (*settings[:-1], "train.steps=10")
    assert fit(*steps, "data.stream_lanes=6", "data.shuffle_buffer=48", fork="new").progress.step == 10
    assert "it goes on where a block of 48 records began" in capfd.readouterr().err
    assert fit(*steps, "data.stream_lanes=12", "data.shuffle_buffer=48", fork="same").progress.step == 10
    assert "where a block" not in capfd.readouterr().err


def test_only_one_process_trains_a_run(fit: Fit, run: Path) -> None:
    fit()
    held = lock_run_dir(run)
    with pytest.raises(UserError, match=rf"being trained now, by process {os.getpid()} on"):
        lock_run_dir(run, patience=0.0)
    held.close()
    lock_run_dir(run, patience=0.0).close()


def test_a_run_that_another_process_begins_meanwhile_is_left_alone(fit: Fit, run: Path) -> None:
    """While this process builds its model, another one trains the run of the same name, and ends."""

    class Slow(CausalLM):
        def build_model(self) -> nn.Module:
            if not run.exists():
                fit(*ONE_FORWARD, "optim.lr=0.02")
            return super().build_model()

    with pytest.raises(UserError, match="another process has just started the run"):
        fit(*ONE_FORWARD, "optim.lr=0.5", task=Slow)
    assert "lr: 0.02" in (run / "config.yaml").read_text()
    kept = losses(run)
    assert fit(*ONE_FORWARD, "optim.lr=0.02").exit_code == ExitCode.DONE  # the lock is free again
    assert losses(run) == kept


@pytest.mark.exhaustive
def test_checkpoints_behind_a_link_are_the_runs_own(fit: Fit, run: Path, tmp_path: Path) -> None:
    fit("train.steps=6", "run.name=whole", "optim.schedule=constant")
    fit("train.steps=3", "optim.schedule=constant")
    elsewhere = tmp_path / "other-disk" / "tiny"
    elsewhere.parent.mkdir()
    (run / "checkpoints").rename(elsewhere)
    (run / "checkpoints").symlink_to(elsewhere)
    for _ in range(2):  # the second time it is complete
        assert fit("train.steps=6", "optim.schedule=constant").exit_code == ExitCode.DONE
    assert losses(run) == losses(run.parent / "whole")
    assert json.loads((run / "origin.json").read_text()).keys() == {"run"}


def test_a_resumed_run_keeps_its_number_formats_on_other_hardware(
    fit: Fit, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = (*ONE_FORWARD, *AS_OWN, "precision=auto", "optim.name=muon")
    monkeypatch.setattr("drawbar.parallel.precision._has_fast_bf16", lambda device: False)
    fit(*settings, "run.name=straight")
    fit(*settings, task=Interrupted)
    monkeypatch.setattr("drawbar.parallel.precision._has_fast_bf16", lambda device: True)
    fit(*settings)
    assert losses(run) == losses(run.parent / "straight")


def rebuild(folder: str) -> int:
    return fit_in(Path(folder), "data.rebuild=true", "train.steps=3", "parallel.strategy=ddp").progress.step


def test_ranks_rebuild_their_data_together(project: Path) -> None:
    assert run_ranks(rebuild, 2, str(project)) == [3, 3]


def test_a_run_that_goes_on_does_not_encode_its_data_again(
    fit: Fit, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though every requeue gives the same command."""
    removed: list[str] = []
    monkeypatch.setattr("drawbar.train.batches.remove_cached", lambda cache, name, inputs: removed.append(name))
    fit("data.rebuild=true")
    assert removed == ["train", "validation"]
    assert "rebuild: false" in (run / "config.yaml").read_text()  # which evaluations of the run are made with
    for lost in (run / "checkpoints" / "step-00000012", run / "checkpoints"):  # or it ended before it had any
        shutil.rmtree(lost)
        assert fit("data.rebuild=true").progress.step == 12
    assert removed == ["train", "validation"]
    fit("data.rebuild=true", "train.steps=13", fork="new")
    assert removed == ["train", "validation"] * 2
