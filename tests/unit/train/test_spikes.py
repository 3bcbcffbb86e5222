"""Numbers that go astray: spikes and ``train.on_spike``, a loss that is none, and a rank whose weights change."""

import math
import shutil
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import drawbar
from conftest import make_project
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
    assert deviations(2.0, values) == pytest.approx((math.log(2) - middle) / max(spread, 0.05))


@pytest.mark.parametrize(
    ("value", "before", "is_spike"),
    [
        (23_658.0, [5.7, 5.5, 5.5, 5.3], True),
        (9.0, [5.7, 5.5, 5.5, 5.3], False),  # four values say little
        (9.0, [5.7, 5.5, 5.5, 5.3] * 20, False),
        (15.0, [5.7, 5.5, 5.5, 5.3] * 20, True),
        (0.1, [0.001 * 3 ** (step % 5 - 2) for step in range(100)], False),  # a loss that varies by factors
        (50.0, [0.001 * 3 ** (step % 5 - 2) for step in range(100)], False),
        (1e9, [1.0, 1.0], False),
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


def rewound(project: Path, *settings: str, task: type[Spiky] = Spiky) -> None:
    fit_in(project, *SETTINGS, "train.on_spike=rewind", "checkpoint.every=3", *settings, task=task)


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
    assert "there is no checkpoint to go back to" in (run / "logs" / "rank-0000.log").read_text()
    assert sorted(losses(run)) == list(range(1, STEPS + 1))


@pytest.mark.parametrize("does", ["skip", "rewind"])
def test_too_many_spikes_end_the_run(does: str, project: Path) -> None:
    class Hopeless(Broken):
        __qualname__ = "CausalLM"
        wrong = tuple(range(200))

    settings = (f"train.on_spike={does}", "train.steps=30", "checkpoint.every=2")
    with pytest.raises(UserError, match=rf"{MOST_SPIKES + 1} spikes in the last {MOST_SPIKES + 1} steps"):
        fit_in(project, *SETTINGS, *settings, task=Hopeless)


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
        rewound(Path(folder), *STRATEGIES[name], f"train.on_spike={does}", f"run.name={name}-{does}")
    rank = int(drawbar.distributed.rank_info.RankInfo.from_environment().rank)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("drawbar.train.spikes.deviations", lambda value, before: 99.0 * (rank == 1 and len(before) == 3))
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
