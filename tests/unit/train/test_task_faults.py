"""Errors of a user's own task: in ``__init__``, of a loss without a gradient, and in later steps of training."""

from collections.abc import Callable
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import drawbar
from drawbar.commands.export_run import ExportFormat, export_run
from drawbar.commands.prepare_data import prepare_run
from drawbar.commands.score_run import evaluate_run, predict_from_run
from drawbar.commands.trained_run import TrainedRun
from drawbar.config.schema.run_config import RunConfig
from drawbar.distributed.process_group import Distributed
from drawbar.distributed.rank_info import RankInfo
from drawbar.engines.build import build_engine
from drawbar.errors import ExitCode, UserError
from drawbar.parity.run import make_reference
from drawbar.parity.workload import Workload
from drawbar.tasks.batch import Batch
from drawbar.tasks.method_errors import place
from drawbar.tasks.task import Task
from drawbar.tasks.task_context import TaskContext
from drawbar.tasks.user_methods import make_task
from exhaustive import some
from harness import run_cli
from points import Points, write_points
from runs import fit_in
from tiny import CPU

HERE = Path(__file__).name
TRAIN_ONLY = ("data.validation=null", "eval.every=null", "optim.warmup=0")


def line_of(mark: str) -> str:
    """``file:line`` of the line of this file that ends in a comment with ``mark``."""
    lines = Path(__file__).read_text().splitlines()
    (number,) = (number for number, line in enumerate(lines, start=1) if line.endswith(f"# {mark}"))
    return f"{HERE}:{number}"


@pytest.fixture
def points(tmp_path: Path) -> Path:
    """See ``write_points``."""
    return write_points(tmp_path)


# ---- __init__ --------------------------------------------------------------------------------------------------------


class RaisingInit(Points):
    def __init__(self, context: TaskContext) -> None:
        super().__init__(context)
        self.weights = {}["classes"]  # IN INIT


class FailsInLibrary(Points):
    def __init__(self, context: TaskContext) -> None:
        super().__init__(context)
        torch.zeros(2).reshape(3)  # CALLS TORCH


class NoContext(Points):
    def __init__(self) -> None:
        pass


class NoSuperInit(Points):
    def __init__(self, context: TaskContext) -> None:
        self.mine = context


@pytest.mark.parametrize(
    ("task", "says", "line"),
    [
        (RaisingInit, "RaisingInit.__init__ fails: KeyError: 'classes'", "IN INIT"),
        (FailsInLibrary, "FailsInLibrary.__init__ fails: RuntimeError: shape", "CALLS TORCH"),
        (NoContext, "NoContext.__init__ cannot be called with (self, context)", None),
        (NoSuperInit, "NoSuperInit.__init__ does not call that of its base class", None),
    ],
)
def test_a_task_that_cannot_be_built(task: type[Task], says: str, line: str | None, points: Path) -> None:
    before = set(points.rglob("*"))
    with pytest.raises(UserError) as error:
        fit_in(points, task=task)
    assert says in error.value.what
    assert HERE in str(error.value.where)
    assert line is None or line_of(line) in error.value.what
    assert error.value.exit_code is ExitCode.WRONG_REQUEST
    assert error.value.remedy
    assert set(points.rglob("*")) - before <= {points / "runs"}


def test_what_a_users_init_refuses_itself_stays_as_it_is(points: Path) -> None:
    class Refuses(Points):
        def __init__(self, context: TaskContext) -> None:
            raise UserError("two classes are not enough", remedy="give three")

    with pytest.raises(UserError, match=r"^two classes are not enough") as error:
        fit_in(points, task=Refuses)
    assert error.value.remedy == "give three"


def train_in_parity(config: RunConfig, task: type[Task]) -> None:
    make_reference(Workload(config, task, steps=1), CPU)


@pytest.mark.parametrize(
    "use",
    some(
        [
            lambda config, task: evaluate_run(config, task, "validation", None),
            lambda config, task: predict_from_run(config, task, Path("out.jsonl"), None),
            lambda config, task: export_run(config, task, Path("exported"), None, ExportFormat()),
            lambda config, task: TrainedRun(config, task, None).generate(["a"]),
            lambda config, task: prepare_run(config, task),
            lambda config, task: Workload(config, task, steps=1).with_tokenizer_and_metadata(),
            train_in_parity,
        ],
        2,
    ),
    ids=["evaluate", "predict", "export", "generate", "prepare", "parity", "parity's runs"],
)
def test_whatever_builds_the_task_names_its_fault(use: Callable[[RunConfig, type[Task]], Any], points: Path) -> None:
    fit_in(points, *TRAIN_ONLY, task=Points)
    with chdir(points):
        config = drawbar.load_config("config.yaml", ["data.test=points.jsonl"], Points.Config).config
        with pytest.raises(UserError, match=r"RaisingInit\.__init__ fails: KeyError: 'classes'") as error:
            use(config, RaisingInit)
    assert line_of("IN INIT") in error.value.what


def test_the_command_says_it_without_a_traceback(points: Path) -> None:
    module = "import drawbar\n\nclass Mine(drawbar.CausalLM):\n    def __init__(self, context):\n        1 / 0\n"
    (points / "my_task.py").write_text(module)
    done = run_cli("train", "config.yaml", "task.type=my_task:Mine", "launch.nproc=2", cwd=points)
    assert done.code == ExitCode.WRONG_REQUEST, done.err
    assert done.err.count("Mine.__init__ fails: ZeroDivisionError: division by zero") == 1, done.err
    assert "my_task.py:5" in done.err
    assert "Traceback" not in done.err


# ---- a loss without a gradient ---------------------------------------------------------------------------------------


class UnderNoGrad(Points):
    @torch.no_grad()
    def loss(self, outputs: torch.Tensor, batch: Batch) -> torch.Tensor:
        return super().loss(outputs, batch)


class Detached(Points):
    def loss(self, outputs: torch.Tensor, batch: Batch) -> torch.Tensor:
        return super().loss(outputs.detach(), batch)


class Item(Points):
    def loss(self, outputs: torch.Tensor, batch: Batch) -> torch.Tensor:
        return super().loss(outputs, batch).item()  # type: ignore[return-value]


class ForwardUnderNoGrad(Points):
    def forward(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        with torch.no_grad():
            return super().forward(model, batch)


@pytest.mark.parametrize("task", some([UnderNoGrad, Detached, Item, ForwardUnderNoGrad], 2))
def test_a_loss_without_a_gradient(task: type[Task], points: Path) -> None:
    before = set(points.rglob("*"))
    with pytest.raises(UserError) as error:
        fit_in(points, task=task)
    assert f"{task.__name__}.loss returns a loss without a gradient" in error.value.what
    assert "torch.no_grad()" in str(error.value.remedy)
    assert error.value.exit_code is ExitCode.WRONG_REQUEST
    assert task is ForwardUnderNoGrad or HERE in str(error.value.where)
    assert set(points.rglob("*")) - before <= {points / "runs"}


class GradientInTrainingAlone(Points):
    def forward(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        with torch.set_grad_enabled(model.training):
            return super().forward(model, batch)


class NothingForOneSample(Points):
    def loss(self, outputs: torch.Tensor, batch: Batch) -> torch.Tensor:
        return torch.zeros(()) if len(batch.ids) == 1 else super().loss(outputs, batch)


class Normalized(GradientInTrainingAlone):
    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))


@pytest.mark.parametrize("task", [GradientInTrainingAlone, NothingForOneSample, Normalized])
def test_a_loss_that_has_its_gradient_where_it_counts(task: type[Task], points: Path) -> None:
    assert fit_in(points, *TRAIN_ONLY, task=task).progress.step == 2


def test_looking_for_a_gradient_leaves_no_trace(points: Path) -> None:
    with chdir(points):
        config = drawbar.load_config("config.yaml", ["parallel.strategy=single"], Points.Config).config
    task = make_task(Normalized, TaskContext(config))
    engine = build_engine(task, config, Distributed(RankInfo(), CPU, timeout=60))
    before = {name: tensor.clone() for name, tensor in engine.module.state_dict().items()}
    samples = [{"x": torch.tensor([1.0, number]), "labels": 1, "id": number, "ids": [number]} for number in range(2)]
    batch = task.collate(samples)
    assert not engine.executor.has_gradient(batch, training=False)
    assert engine.executor.has_gradient(batch, training=True)
    for name, tensor in engine.module.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert all(parameter.grad is None for parameter in engine.module.parameters())


# ---- later steps -----------------------------------------------------------------------------------------------------


class LateFault(Points):
    """Its forwards in training mode are counted: one a step."""

    trained = 0
    fails_at = 3

    def forward(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        LateFault.trained += model.training
        return super().forward(model, batch)

    @property
    def is_due(self) -> bool:
        return LateFault.trained == self.fails_at and torch.is_grad_enabled()


class LateLoss(LateFault):
    def loss(self, outputs: torch.Tensor, batch: Batch) -> torch.Tensor:
        if self.is_due:
            raise ValueError("planted")  # LATE
        return super().loss(outputs, batch)


class FirstLoss(LateLoss):
    fails_at = 1


class LateDetached(LateFault):
    def loss(self, outputs: torch.Tensor, batch: Batch) -> torch.Tensor:
        found = super().loss(outputs, batch)
        return found.detach() if self.is_due else found


class LateTargets(LateFault):
    def num_targets(self, batch: Batch) -> float:
        if LateFault.trained == self.fails_at - 1:
            raise ValueError("planted")
        return super().num_targets(batch)


@pytest.fixture(autouse=True)
def _begin_to_count() -> None:
    LateFault.trained = 0


@pytest.mark.parametrize(
    ("task", "says"),
    [
        (LateLoss, "LateLoss.loss fails: ValueError: planted"),
        (LateDetached, "LateDetached.loss returns a loss without a gradient"),
        (LateTargets, "LateTargets.num_targets fails: ValueError: planted"),
    ],
)
def test_a_fault_in_a_later_step_has_its_method_and_a_traceback_in_the_log(
    task: type[Task], says: str, points: Path
) -> None:
    with pytest.raises(UserError) as error:
        fit_in(points, *TRAIN_ONLY, "train.steps=5", task=task)
    assert says in error.value.what
    assert HERE in f"{error.value.what} {error.value.where}"
    assert error.value.exit_code is ExitCode.FAILED
    assert LateFault.trained <= 3
    log = (points / "runs" / "points" / "logs" / "rank-0000.log").read_text()
    assert "Traceback (most recent call last)" in log
    assert says in log


def test_the_line_of_a_late_fault(points: Path) -> None:
    with pytest.raises(UserError) as error:
        fit_in(points, *TRAIN_ONLY, "train.steps=5", task=LateLoss)
    name, _, number = line_of("LATE").partition(":")
    assert f'{name}", line {number}, in loss' in error.value.what


def test_a_fault_in_the_first_step_is_a_wrong_request(points: Path) -> None:
    with pytest.raises(UserError, match=r"LateLoss\.loss, which FirstLoss inherits, fails: ValueError") as error:
        fit_in(points, *TRAIN_ONLY, task=FirstLoss)
    assert error.value.exit_code is ExitCode.WRONG_REQUEST


class WrongModel(Task):
    """``forward`` is inherited from ``Task``, and its model does not take the batch."""

    def build_model(self) -> nn.Module:
        return nn.Linear(2, 3)

    def encode(self, record: dict[str, Any], train: bool) -> dict[str, Any]:
        return {"x": torch.zeros(2), "labels": 0}


class CallsInherited(WrongModel):
    def forward(self, model: nn.Module, batch: Batch) -> Any:
        return super().forward(model, batch)


@pytest.mark.parametrize(
    ("task", "says", "remedy"),
    [
        (
            WrongModel,
            "Task.forward, which WrongModel inherits, fails: TypeError",
            "correct what it is given (the model,",
        ),
        (CallsInherited, "CallsInherited.forward fails: TypeError", "correct the method"),
    ],
)
def test_an_inherited_method_is_not_said_to_be_the_users(
    task: type[Task], says: str, remedy: str, points: Path
) -> None:
    with pytest.raises(UserError) as error:
        fit_in(points, *TRAIN_ONLY, task=task)
    assert error.value.what.startswith(says)
    assert str(error.value.remedy).startswith(remedy)


LATE_ON_ONE_RANK = """
import os
import drawbar

class Mine(drawbar.CausalLM):
    steps = 0

    def loss(self, outputs, batch):
        self.steps += outputs.logits.requires_grad
        if os.environ["RANK"] == "1" and self.steps == 3:
            raise ValueError("planted")
        return super().loss(outputs, batch)
"""


def test_a_fault_on_one_rank_is_one_error(project: Path) -> None:
    (project / "my_task.py").write_text(LATE_ON_ONE_RANK)
    settings = ("task.type=my_task:Mine", "parallel.strategy=ddp", "launch.nproc=2", "launch.timeout=60")
    done = run_cli("train", "config.yaml", *settings, *TRAIN_ONLY, "train.steps=6", cwd=project)
    assert done.code == ExitCode.FAILED, done.err
    assert done.err.count("Mine.loss fails: ValueError: planted") == 1, done.err
    assert "Traceback" not in done.err, done.err
    assert "Traceback" in (project / "runs" / "tiny" / "logs" / "rank-0001.log").read_text()


# ---- where a method is -----------------------------------------------------------------------------------------------


class OtherForms(Points):
    @torch.no_grad()
    def predict(self, model: nn.Module, batch: Batch) -> list[Any]:
        return super().predict(model, batch)

    @staticmethod
    def collate(samples: list[dict[str, Any]]) -> Batch:  # type: ignore[override]
        raise ValueError("planted")  # IN A STATIC METHOD


@pytest.mark.parametrize("method", ["predict", "collate"])
def test_the_place_of_a_decorated_method_is_the_users(method: str) -> None:
    assert HERE in str(place(getattr(OtherForms, method)))


def test_a_static_method_that_fails_is_named(points: Path) -> None:
    with pytest.raises(UserError, match=r"OtherForms\.collate fails: ValueError: planted") as error:
        fit_in(points, task=OtherForms)
    name, _, number = line_of("IN A STATIC METHOD").partition(":")
    assert f'{name}", line {number}, in collate' in error.value.what
