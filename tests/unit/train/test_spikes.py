"""Numbers that go astray: spikes and ``train.on_spike``, a loss that is none, and a rank whose weights change."""

import errno
import json
import math
import shutil
import statistics
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import drawbar
from conftest import make_project
from drawbar.checkpoint import directory
from drawbar.errors import EVERY_RANK, UserError
from drawbar.tasks.batch import Batch
from drawbar.train.callbacks.replicas import _refuse
from drawbar.train.spikes import MOST_SPIKES, deviations
from exhaustive import asked, params
from harness import run_ranks
from runs import Fit, fit_in, largest_difference, losses, metrics, weights

STEPS = 8
SETTINGS = (
    *(f"train.steps={STEPS}", "train.micro_batch=1", "eval.every=null", "data.validation=null"),
    "launch.timeout=20",  # ranks that disagree wait for one another
)
IN_STEP_5 = 14
"""One of its samples: the seed sets the order."""
IN_STEP_7 = 30


class Spiky(drawbar.CausalLM):
    """causal_lm with a loss that is ten thousand times too large for some samples, or not a number."""

    __qualname__ = "CausalLM"
    wrong: tuple[int, ...] = (IN_STEP_5,)
    factor = 1e4
    trained: list[int]

    def __init__(self, run_config: Any) -> None:
        super().__init__(run_config)
        type(self).trained = []

    def loss(self, outputs: Any, batch: Batch) -> torch.Tensor:
        loss = super().loss(outputs, batch)
        if not loss.requires_grad:
            return loss
        self.trained.extend(batch.ids)
        return loss * self.factor if set(batch.ids) & set(self.wrong) else loss


class Broken(Spiky):
    __qualname__ = "CausalLM"
    factor = math.nan


class Flips(drawbar.Callback):
    """A bit of a weight changes on rank 1, after step 3."""

    def on_step(self, run: drawbar.RunHandle, info: drawbar.StepInfo) -> None:
        if run.rank == 1 and info.step == 3:
            weight = next(
                parameter for name, parameter in Seen.model.named_parameters() if name.endswith("norm.weight")
            )
            weight.data.view(torch.int32)[0] ^= 1


class Seen(drawbar.CausalLM):
    """causal_lm whose model others see."""

    __qualname__ = "CausalLM"
    model: nn.Module

    def forward(self, model: nn.Module, batch: Batch) -> Any:
        type(self).model = model
        return super().forward(model, batch)


@given(st.lists(st.floats(0.9, 1.1), min_size=40, max_size=100), st.floats(1e-6, 1e6))
def test_deviations_do_not_depend_on_the_unit(values: list[float], unit: float) -> None:
    scaled = [value * unit for value in values]
    assert deviations(2 * unit, scaled) == pytest.approx(deviations(2.0, values), rel=1e-6, abs=1e-6)
    logs = [math.log(value) for value in values]
    middle = statistics.median(logs)
    spread = 1.4826 * statistics.median(abs(log - middle) for log in logs)
    assert deviations(2.0, values) == pytest.approx((math.log(2) - middle) / max(spread, 0.1))


@pytest.mark.parametrize(
    ("value", "before", "is_spike"),
    [
        (23_658.0, [5.7, 5.5, 5.5, 5.3], True),
        (9.0, [5.7, 5.5, 5.5, 5.3], False),  # four values say little
        (14.0, [5.7, 5.5, 5.5, 5.3] * 20, False),
        (16.0, [5.7, 5.5, 5.5, 5.3] * 20, True),
        (1.85, [0.68, 0.679, 0.69, 0.67] * 20, True),
        (0.1, [0.001 * 3 ** (step % 5 - 2) for step in range(100)], False),  # a loss that varies by factors
        (50.0, [0.001 * 3 ** (step % 5 - 2) for step in range(100)], False),
        (1e9, [1.0, 1.0], False),
        (1e9, [1.0, 1.0, 1.0, 1.0, math.inf, math.nan], True),
        (0.0, [1.0] * 50, False),
        (-3.0, [-2.0] * 50, False),
        (math.inf, [], True),
        (math.nan, [1.0] * 50, True),
        (1.0, [0.0, -1.0, 0.0], False),
    ],
)
def test_what_is_a_spike(value: float, before: list[float], is_spike: bool) -> None:
    assert (deviations(value, before) > 10) == is_spike


def test_a_warning_names_step_and_samples(fit: Fit, run: Path) -> None:
    fit(*SETTINGS, task=Spiky)
    assert len(losses(run)) == STEPS
    log = (run / "logs" / "rank-0000.log").read_text()
    (line,) = [line for line in log.splitlines() if "WARNING" in line and "step 5" in line]
    assert "the loss is" in line
    assert str(IN_STEP_5) in line.rpartition(":")[2]


@pytest.mark.parametrize("task", [Spiky, Broken])
def test_a_skipped_update_changes_nothing(task: type[Spiky], fit: Fit, run: Path) -> None:
    fit(*SETTINGS, "train.on_spike=skip", "checkpoint.every=1", "checkpoint.keep=9", task=task)
    kept = [weights(run, step) for step in range(1, STEPS + 1)]
    assert all(torch.equal(kept[4][name], tensor) for name, tensor in kept[3].items())
    assert not all(torch.equal(kept[5][name], tensor) for name, tensor in kept[4].items())
    assert metrics(run)[-1]["train/skipped"] == 1
    assert len(set(task.trained[-8 * STEPS :])) == 8 * STEPS  # the samples after it are the next ones


def test_a_run_that_stops_at_a_spike_goes_on_as_one_that_skips_it(fit: Fit, run: Path) -> None:
    fit(*SETTINGS, "train.on_spike=skip", "run.name=skips", task=Spiky)
    with pytest.raises(UserError, match="step 5 is a spike") as stopped:
        fit(*SETTINGS, "train.on_spike=stop", task=Spiky)
    assert (stopped.value.exit_code, stopped.value.origin) == (1, EVERY_RANK)
    assert f"{IN_STEP_5}" in str(stopped.value.where)
    fit(*SETTINGS, "train.on_spike=stop", task=Spiky)
    assert losses(run) == losses(run.parent / "skips")


def rewound(
    project: Path, *settings: str, task: type[Spiky] = Spiky, callbacks: Sequence[drawbar.Callback] = ()
) -> None:
    always = (*SETTINGS, "train.on_spike=rewind", "checkpoint.every=3")
    fit_in(project, *always, *settings, task=task, callbacks=callbacks)


def test_a_run_that_goes_back_leaves_the_samples_out(project: Path, run: Path) -> None:
    fit_in(project, *SETTINGS, "run.name=plain", task=Spiky)
    order = Spiky.trained[-8 * STEPS :]
    rewound(project)
    assert Spiky.trained[-8 * 5 :][:8] == order[8 * 5 : 8 * 6]  # step 4, for the second time
    assert sorted(losses(run)) == list(range(1, STEPS + 1))
    before, plain = losses(run), losses(project / "runs" / "plain")
    assert [before[step] for step in (1, 2, 3)] == [plain[step] for step in (1, 2, 3)]
    assert before[4] != plain[4]
    log = (run / "logs" / "rank-0000.log").read_text()
    assert log.count("goes back to step 3, without the samples trained since then, up to step 5") == 1
    assert log.count("resumed from") == 1


def test_a_run_that_is_killed_after_going_back_is_the_same_run(project: Path, run: Path) -> None:
    rewound(project)
    whole = project / "runs" / "whole"
    shutil.copytree(run, whole)
    for step in (6, 8):
        shutil.rmtree(run / "checkpoints" / f"step-{step:08d}")
    rewound(project)  # from step 3, which knows that it has gone back
    assert losses(run) == losses(whole)
    assert (run / "logs" / "rank-0000.log").read_text().count("goes back") == 1
    ours, theirs = weights(run, STEPS), weights(whole, STEPS)
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())


def test_without_a_checkpoint_a_run_goes_on(project: Path, run: Path) -> None:
    rewound(project, "checkpoint.every=100")
    assert "this run has no checkpoint to go back to" in (run / "logs" / "rank-0000.log").read_text()
    assert sorted(losses(run)) == list(range(1, STEPS + 1))


def test_a_run_goes_back_to_a_checkpoint_once(project: Path, run: Path) -> None:
    class Twice(Spiky):
        __qualname__ = "CausalLM"
        wrong = (IN_STEP_5, IN_STEP_7)  # which is then in step 5

    rewound(project, "checkpoint.every=3", task=Twice)
    log = (run / "logs" / "rank-0000.log").read_text()
    assert log.count("goes back to step 3") == log.count("has gone back to its newest checkpoint before") == 1
    assert sorted(losses(run)) == list(range(1, STEPS + 1))


@pytest.mark.parametrize("on_error", ["warn", "stop"])
def test_a_checkpoint_that_cannot_be_amended_stays_as_it_is(
    on_error: str, project: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    fit_in(
        project,
        *SETTINGS,
        "train.on_spike=skip",
        "run.name=skips",
        "checkpoint.every=3",
        "checkpoint.keep=9",
        task=Spiky,
    )
    monkeypatch.setattr("drawbar.checkpoint.directory.write_with_changed_state", fail)
    with nullcontext() if on_error == "warn" else pytest.raises(UserError, match="could not be written"):
        rewound(project, f"checkpoint.on_error={on_error}", "checkpoint.keep=9")
    monkeypatch.undo()
    rewound(project, f"checkpoint.on_error={on_error}", "checkpoint.keep=9")
    skipped = project / "runs" / "skips"
    for step in (3, STEPS):
        ours, theirs = weights(run, step), weights(skipped, step)
        assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())


def test_a_failed_amendment_is_no_failed_save(project: Path, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, calls = directory.write_with_changed_state, []

    def fail_once(*arguments: Any) -> None:
        calls.append(arguments)
        if len(calls) == 1:  # the scores of step 4
            raise OSError(errno.EIO, "Input/output error")
        write(*arguments)

    monkeypatch.setattr(directory, "write_with_changed_state", fail_once)
    settings = ("eval.every=4", "data.validation=valid.txt", "checkpoint.keep_best=false", "checkpoint.keep=1")
    rewound(project, *settings, "checkpoint.every=2", "checkpoint.on_error=warn")
    log = (run / "logs" / "rank-0000.log").read_text()
    assert log.count("goes back to step 4") == log.count("resumed from") == 1


def test_a_fork_and_a_run_that_only_warned_decide_anew(project: Path, run: Path) -> None:
    fit_in(project, *SETTINGS, "train.on_spike=skip")
    assert len(json.loads((run / "checkpoints" / f"step-{STEPS:08d}" / "state.json").read_text())["progress"]["recent"])
    more = ("train.steps=10", "data.train=other.txt")
    (project / "other.txt").write_text("\n".join(f"{n * 7919 % 997} zq{n * 31 % 97}dxv jk" for n in range(300)))
    fit_in(project, *SETTINGS, *more, "train.on_spike=skip", "train.spike_threshold=0.5", fork="forked")
    assert "is a spike" not in (project / "runs" / "forked" / "logs" / "rank-0000.log").read_text()
    fit_in(project, *SETTINGS, "train.steps=9", "train.on_spike=warn")
    state = json.loads((run / "checkpoints" / "step-00000009" / "state.json").read_text())
    assert state["progress"]["recent"] == []


def test_a_loss_that_is_no_number_is_skipped_in_fp16_too(fit: Fit, run: Path) -> None:
    fit(*SETTINGS, "train.on_spike=skip", "precision=fp16", task=Broken)
    assert (run / "logs" / "rank-0000.log").read_text().count("is a spike") == 1
    assert sorted(losses(run)) == list(range(1, STEPS + 1))


class Normed(Broken):
    """causal_lm with a batch norm, whose statistics a step without finite numbers would spoil."""

    __qualname__ = "CausalLM"

    def build_model(self) -> nn.Module:
        model = super().build_model()
        model.statistics = nn.BatchNorm1d(1)
        return model

    def forward(self, model: nn.Module, batch: Batch) -> Any:
        if model.training:
            bad = math.nan if set(batch.ids) & set(self.wrong) else 1.0
            model.statistics(batch["input_ids"].float().reshape(-1, 1) * bad)
        return super().forward(model, batch)


def test_a_skipped_step_leaves_buffers_as_they_were(fit: Fit, run: Path) -> None:
    fit(*SETTINGS, "train.on_spike=skip", "checkpoint.every=1", "checkpoint.keep=9", task=Normed)
    before, after = (weights(run, step)["statistics.running_mean"] for step in (4, 5))
    assert torch.equal(before, after)
    assert torch.isfinite(weights(run, STEPS)["statistics.running_mean"]).all()


class Asks(drawbar.Callback):
    def __init__(self) -> None:
        self.saved: list[str] = []
        self.ended = 0

    def on_step(self, run: drawbar.RunHandle, info: drawbar.StepInfo) -> None:
        if info.step == 4 and not self.ended:
            self.ended = 1
            run.request_save()

    def on_save(self, run: drawbar.RunHandle, checkpoint: Path) -> None:
        self.saved.append(checkpoint.name)

    def on_train_end(self, run: drawbar.RunHandle) -> None:
        self.ended += 1


def test_callbacks_of_a_run_that_goes_back(project: Path) -> None:
    asks = Asks()
    fit_in(project, *SETTINGS, "train.on_spike=rewind", "checkpoint.every=3", task=Spiky, callbacks=[asks])
    assert [int(name[5:]) for name in asks.saved] == [3, 4, 6, 8]  # the request is for the next step
    assert asks.ended == 2  # one request, one end


@pytest.mark.parametrize("does", ["skip", "rewind"])
def test_too_many_spikes_end_the_run(does: str, project: Path) -> None:
    class Hopeless(Broken):
        __qualname__ = "CausalLM"
        wrong = tuple(range(200))

    settings = (f"train.on_spike={does}", "train.steps=30", "checkpoint.every=2")
    with pytest.raises(UserError, match=rf"{MOST_SPIKES + 1} spikes in the last {MOST_SPIKES + 1} steps"):
        fit_in(project, *SETTINGS, *settings, task=Hopeless)


class Groups(drawbar.Callback):
    """Counts the process groups of this rank at each start."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def on_train_start(self, run: drawbar.RunHandle) -> None:
        self.counts.append(len(torch.distributed.distributed_c10d._world.pg_map))


STRATEGIES = {
    "ddp": ["parallel.strategy=ddp"],
    "zero1": ["parallel.strategy=zero1"],
    "fsdp": ["parallel.strategy=fsdp"],
    "tensor": ["parallel.tensor=2"],
    "pipeline": ["parallel.pipeline=2"],
}


def fit_all(folder: str, asked_for: Sequence[tuple[str, str]]) -> str:
    """A run for each strategy and action; one where only the last rank finds a spike; and one without a loss."""
    for name, does in asked_for:
        groups, settings = Groups(), (f"train.on_spike={does}", f"run.name={name}-{does}")
        rewound(Path(folder), *STRATEGIES[name], *settings, callbacks=[groups])
        assert len(groups.counts) == 1 + (does == "rewind")
        assert len(set(groups.counts)) == 1, "a run that goes back leaves process groups behind"
    rank = int(drawbar.distributed.rank_info.RankInfo.from_environment().rank)
    told: list[int] = []

    def one_spike(value: float, before: Sequence[float]) -> float:
        is_spike = rank == 1 and len(before) == 3 and not told
        told.extend([1] * is_spike)
        return 99.0 * is_spike

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("drawbar.train.spikes.deviations", one_spike)
        fit_in(Path(folder), *SETTINGS, "train.on_spike=skip", "parallel.strategy=ddp", "run.name=alone")
    with pytest.raises(UserError, match="the loss of step 5 is nan") as diverged:
        fit_in(Path(folder), *SETTINGS, "parallel.strategy=ddp", "run.name=nan", task=Broken)
    return diverged.value.origin


def flip(folder: str) -> str:
    checked = ("parallel.check_replicas=2", "run.name=flipped", "parallel.strategy=ddp", "checkpoint.every=1")
    differ = "after step 4, the weights of ranks 0, 1 differ from one another"
    with pytest.raises(UserError, match=differ) as flipped:
        fit_in(Path(folder), *SETTINGS, *checked, task=Seen, callbacks=[Flips()])
    return flipped.value.origin


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    project = make_project(tmp_path_factory.mktemp("spikes"))
    for does in ("skip", "rewind"):
        rewound(project, f"train.on_spike={does}", f"run.name=one-{does}")
    return project / "runs", run_ranks(fit_all, 2, str(project), asked(request, "strategy", "does"))


@pytest.mark.parametrize(
    ("strategy", "does"),
    params([(name, does) for name in STRATEGIES for does in ("skip", "rewind")], often=[("ddp", "rewind")]),
)
def test_a_spike_is_the_same_under_every_strategy(strategy: str, does: str, ranks: tuple[Path, Any]) -> None:
    runs, _ = ranks
    assert largest_difference(losses(runs / f"one-{does}"), losses(runs / f"{strategy}-{does}")) < 1e-5


def test_all_ranks_skip_what_one_finds(ranks: tuple[Path, Any]) -> None:
    runs, _ = ranks
    assert [line["train/skipped"] for line in metrics(runs / "alone")] == [0, 0, 0, 1, 1, 1, 1, 1]
    assert "another rank's loss" in (runs / "alone" / "logs" / "rank-0000.log").read_text()


def test_a_loss_that_is_not_a_number_is_the_fault_of_the_rank_that_computed_it(ranks: tuple[Path, Any]) -> None:
    _, (one, other) = ranks
    assert one == other
    assert one in ("rank 0", "rank 1")


def test_weights_that_differ_between_ranks_are_not_saved(project: Path) -> None:
    assert run_ranks(flip, 2, str(project)) == [EVERY_RANK] * 2
    saved = sorted(path.name for path in (project / "runs" / "flipped" / "checkpoints").glob("step-*"))
    assert saved[-1] == "step-00000003"


def test_a_rank_whose_weights_differ_from_those_of_two_others_is_named() -> None:
    with pytest.raises(
        UserError, match="the weights of rank 1 differ from those that the other ranks hold: a and 1 more"
    ):
        _refuse({"a": [[0, 2], [1]], "b": [[0, 2], [1]]}, 4)
