"""What a user's task returns, or is called, where drawbar cannot use it: one error that names method and line."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from drawbar.errors import ExitCode, UserError
from drawbar.tasks.batch import Batch
from drawbar.tasks.task import Task
from drawbar.tasks.user_methods import check_signatures
from harness import run_cli
from points import Points, write_points
from runs import fit_in, losses, weights

pytestmark = pytest.mark.exhaustive

HERE = Path(__file__).name
TRAIN_ONLY = ("data.validation=null", "eval.every=null", "optim.warmup=0")


@pytest.fixture
def points(tmp_path: Path) -> Path:
    """See ``write_points``."""
    return write_points(tmp_path)


def refused(points: Path, task: type[Task], *settings: str) -> UserError:
    """The error of a run that is refused before it writes anything."""
    before = set(points.rglob("*"))
    with pytest.raises(UserError) as error:
        fit_in(points, *settings, task=task)
    assert set(points.rglob("*")) - before <= {points / "runs"}
    assert error.value.exit_code is ExitCode.WRONG_REQUEST
    assert error.value.remedy
    return error.value


# ---- num_targets -----------------------------------------------------------------------------------------------------


class Negative(Points):
    def num_targets(self, batch: Batch) -> float:
        return -len(batch.ids)


class NoNumberAtAll(Points):
    def num_targets(self, batch: Batch) -> float:
        return float("nan")


class TensorOfOne(Points):
    def num_targets(self, batch: Batch) -> float:
        return torch.tensor(len(batch.ids))  # type: ignore[return-value]


class NothingReturned(Points):
    def num_targets(self, batch: Batch) -> float:
        pass  # type: ignore[return-value]


class Zero(Points):
    def num_targets(self, batch: Batch) -> float:
        return 0


@pytest.mark.parametrize(
    ("task", "says"),
    [
        (Negative, "returns -1, which is not a number"),
        (NoNumberAtAll, "returns nan, which is not a number"),
        (TensorOfOne, "returns tensor(1), which is not a number"),
        (NothingReturned, "returns None, which is not a number"),
        (Zero, "returns 0 for a batch of 1 with a loss of"),
    ],
)
@pytest.mark.parametrize("settings", [(), TRAIN_ONLY], ids=["validated", "trained only"])
def test_num_targets_that_is_no_count(task: type[Task], says: str, settings: tuple[str, ...], points: Path) -> None:
    error = refused(points, task, *settings)
    assert f"{task.__name__}.num_targets {says}" in error.what
    assert HERE in str(error.where)


class FirstUnlabelled(Points):
    """The labels of the first samples are ignored: they have no target, and a regularizer gives them a loss."""

    def encode(self, record: dict[str, Any], train: bool) -> dict[str, Any]:
        label = record["label"] if record["label"] else -100
        return {**super().encode(record, train), "labels": label}

    def loss(self, outputs: torch.Tensor, batch: Batch) -> torch.Tensor:
        return functional.cross_entropy(outputs, batch["labels"], reduction="sum") + outputs.square().sum()

    def num_targets(self, batch: Batch) -> float:
        return int((batch["labels"] != -100).sum())


def test_samples_whose_labels_are_all_ignored_may_have_no_target(points: Path) -> None:
    assert fit_in(points, *TRAIN_ONLY, task=FirstUnlabelled).progress.step == 2


# ---- build_model -----------------------------------------------------------------------------------------------------


class ForgetsModel(Points):
    def build_model(self) -> nn.Module:
        nn.Linear(2, 3)  # type: ignore[return-value]


class NamesModel(Points):
    def build_model(self) -> nn.Module:
        return "gpt2"  # type: ignore[return-value]


class OnMeta(Points):
    def build_model(self) -> nn.Module:
        with torch.device("meta"):
            return super().build_model()


@pytest.mark.parametrize(
    ("task", "says"),
    [
        (ForgetsModel, "returns NoneType, not a torch.nn.Module"),
        (NamesModel, "returns str, not a torch.nn.Module"),
        (OnMeta, "returns a model without values: weight is on the meta device"),
    ],
)
def test_build_model_that_returns_no_model(task: type[Task], says: str, points: Path) -> None:
    error = refused(points, task)
    assert f"{task.__name__}.build_model {says}" in error.what
    assert HERE in str(error.where)


class WithoutModel(Task):
    def loss(self, outputs: Any, batch: Batch) -> torch.Tensor:
        return outputs.sum()


class WithoutLoss(Task):
    def build_model(self) -> nn.Module:
        return nn.Linear(2, 2)

    def forward(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        return model(batch["x"])


@pytest.mark.parametrize(("task", "method"), [(WithoutModel, "build_model"), (WithoutLoss, "loss")])
def test_a_class_without_a_method_that_it_must_define(task: type[Task], method: str, points: Path) -> None:
    error = refused(points, task, *TRAIN_ONLY)
    lines = Path(__file__).read_text().splitlines()
    line = lines.index(f"class {task.__name__}(Task):") + 1
    assert error.what == f"the task {task.__name__} does not define {method}()"
    assert str(error.where).endswith(f"{HERE}:{line}")
    assert f"define {method}(self" in str(error.remedy)


class LowWeights(Points):
    dtype: torch.dtype

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)).to(self.dtype)


class Half(LowWeights):
    dtype = torch.float16


class Brain(LowWeights):
    dtype = torch.bfloat16


@pytest.mark.parametrize(("task", "name"), [(Half, "float16"), (Brain, "bfloat16")])
def test_trained_weights_are_kept_in_fp32(
    task: type[Task], name: str, points: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit_in(points, *TRAIN_ONLY, task=task)
    said = capsys.readouterr()
    assert (said.out + said.err).count(f"{task.__name__}.build_model returns trained weights in {name}") == 1
    saved = weights(points / "runs" / "points", 2)
    assert all(tensor.dtype == torch.float32 for tensor in saved.values() if tensor.is_floating_point())


# ---- records and predictions -----------------------------------------------------------------------------------------


class ForgetsRecords(Points):
    def records(self, split: str) -> Any:
        pass


class ForgetsPrediction(Points):
    def predict(self, model: nn.Module, batch: Batch) -> list[Any]:
        self.forward(model, batch).argmax(-1).tolist()  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("task", "says"),
    [
        (ForgetsRecords, "ForgetsRecords.records returns NoneType for 'train', and no records"),
        (ForgetsPrediction, "ForgetsPrediction.predict returns NoneType for 1 samples"),
    ],
)
def test_a_method_without_a_return(task: type[Task], says: str, points: Path) -> None:
    error = refused(points, task)
    assert says in error.what
    assert HERE in str(error.where)


# ---- misspelled names ------------------------------------------------------------------------------------------------


class Colate(Points):
    def colate(self, samples: list[Any]) -> Batch:
        return super().collate(samples)


class Encod(Points):
    @staticmethod
    def encod(record: dict[str, Any], train: bool) -> dict[str, Any]:
        return record


class InBase(Colate):
    pass


@pytest.mark.parametrize(
    ("task", "name", "meant"),
    [
        (Colate, "Colate.colate", "collate"),
        (Encod, "Encod.encod", "encode"),
        (InBase, "Colate.colate", "collate"),
    ],
)
def test_a_misspelled_method(task: type[Task], name: str, meant: str, points: Path) -> None:
    error = refused(points, task)
    assert error.what == f"{name} would never be called: a task has no such method"
    assert f"did you mean {meant}?" in str(error.remedy)
    assert HERE in str(error.where)


class WithHelpers(Points):
    """Methods for its own use, whose names are like those of a task."""

    encoder = nn.Identity  # no method

    def decode(self, tokens: list[int]) -> str:
        return str(tokens)

    def encode_text(self, text: str) -> str:
        return text

    def scores(self, records: list[Any]) -> float:
        return float(len(records))

    def record(self, number: int) -> int:
        return number

    @property
    def half_of_records(self) -> list[int]:
        return [self.record(number) for number in range(2)]

    def score(self, records: list[dict[str, Any]]) -> dict[str, float]:
        return {**super().score(records), "count": self.scores(records)}


def test_methods_for_the_users_own_use_are_fine() -> None:
    check_signatures(WithHelpers)


# ---- in later steps --------------------------------------------------------------------------------------------------


class Exits(Points):
    trained = 0

    def loss(self, outputs: torch.Tensor, batch: Batch) -> torch.Tensor:
        Exits.trained += torch.is_grad_enabled() and outputs.requires_grad
        if Exits.trained > 3:  # the check at the start is one of them
            sys.exit("bye")
        return super().loss(outputs, batch)


class ExitsInCollate(Points):
    def collate(self, samples: list[dict[str, Any]]) -> Batch:
        if any(sample["labels"] == 2 for sample in samples):  # none among the first
            sys.exit("bye")
        return super().collate(samples)


class ExitsInScore(Points):
    def score(self, records: list[dict[str, Any]]) -> dict[str, float]:
        if len(records) > 20:
            sys.exit("bye")
        return super().score(records)


@pytest.mark.parametrize(
    ("task", "settings", "says"),
    [
        (Exits, TRAIN_ONLY, "Exits.loss fails: SystemExit: bye"),
        (ExitsInCollate, (*TRAIN_ONLY, "data.shuffle=false"), "ExitsInCollate.collate fails: SystemExit: bye"),
        (ExitsInScore, (), "the evaluation failed: SystemExit: bye"),
    ],
)
def test_a_method_that_ends_the_program_fails_as_any_other(
    task: type[Task], settings: tuple[str, ...], says: str, points: Path
) -> None:
    Exits.trained = 0
    with pytest.raises(UserError) as error:
        fit_in(points, *settings, "train.steps=8", task=task)
    assert says in error.value.what
    assert HERE in f"{error.value.what} {error.value.where}"
    assert error.value.exit_code is ExitCode.FAILED


def test_an_exit_that_an_installed_library_hooks_is_placed_in_the_users_code(
    points: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As W&B's client hooks ``sys.exit``: the innermost frame is the library's."""
    hook = tmp_path / "site-packages" / "hook.py"
    hook.parent.mkdir()
    hook.write_text("def leave(code=None):\n    raise SystemExit(code)\n")
    names: dict[str, Any] = {}
    exec(compile(hook.read_text(), str(hook), "exec"), names)
    monkeypatch.setattr(sys, "exit", names["leave"])
    with pytest.raises(UserError) as error:
        fit_in(points, "train.steps=8", task=ExitsInScore)
    assert HERE in str(error.value.where)


@pytest.mark.parametrize("end", [lambda: sys.exit("bye"), lambda: sys.exit(0)], ids=["with a message", "with success"])
def test_an_init_that_ends_the_program(end: Callable[[], None], points: Path) -> None:
    class Ends(Points):
        def __init__(self, context: Any) -> None:
            end()

    assert "Ends.__init__ fails: SystemExit" in refused(points, Ends).what


def test_an_interrupt_is_no_fault_of_the_method(points: Path) -> None:
    class Interrupted(Points):
        def loss(self, outputs: torch.Tensor, batch: Batch) -> torch.Tensor:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit_in(points, *TRAIN_ONLY, task=Interrupted)


EXITS_LATE = """
import sys
import drawbar

class Mine(drawbar.CausalLM):
    steps = 0

    def loss(self, outputs, batch):
        self.steps += outputs.logits.requires_grad
        if self.steps == 4:
            sys.exit(0)
        return super().loss(outputs, batch)
"""


def test_the_command_fails_where_a_method_ends_the_program(project: Path) -> None:
    (project / "my_task.py").write_text(EXITS_LATE)
    done = run_cli("train", "config.yaml", "task.type=my_task:Mine", *TRAIN_ONLY, "train.steps=6", cwd=project)
    assert done.code == ExitCode.FAILED, done.err
    assert "Mine.loss fails: SystemExit: 0" in done.err
    assert "my_task.py" in done.err
    assert "Traceback" not in done.err


# ---- a loss that is not finite ---------------------------------------------------------------------------------------


class NotFinite(Points):
    def loss(self, outputs: torch.Tensor, batch: Batch) -> torch.Tensor:
        return super().loss(outputs, batch) * float("nan")


class NotFiniteLater(Points):
    __qualname__ = "Points"  # the run goes on with the class of this name
    trained = 0

    def loss(self, outputs: torch.Tensor, batch: Batch) -> torch.Tensor:
        NotFiniteLater.trained += outputs.requires_grad
        return super().loss(outputs, batch) * (float("nan") if NotFiniteLater.trained > 3 else 1.0)


def test_a_loss_that_is_not_finite_before_any_update(points: Path) -> None:
    with pytest.raises(UserError) as error:
        fit_in(points, *TRAIN_ONLY, task=NotFinite)
    assert "the loss of step 1 is nan, before any update of the weights" in error.value.what
    assert "optim." not in str(error.value)
    assert all(word in str(error.value) for word in ("data", "loss", "model"))
    assert error.value.exit_code is ExitCode.FAILED


def test_a_loss_that_is_not_finite_after_updates(points: Path) -> None:
    NotFiniteLater.trained = 0
    with pytest.raises(UserError, match=r"the run has diverged") as error:
        fit_in(points, *TRAIN_ONLY, "train.steps=6", "tracking.log_every=1", task=NotFiniteLater)
    assert "lower optim.lr" in str(error.value.remedy)
    assert min(losses(points / "runs" / "points")) == 1


@pytest.mark.parametrize("fork", [None, "branch"])
def test_a_loss_that_is_not_finite_at_the_first_step_after_a_checkpoint(fork: str | None, points: Path) -> None:
    NotFiniteLater.trained = -1000
    fit_in(points, *TRAIN_ONLY, "train.steps=3", task=NotFiniteLater)
    NotFiniteLater.trained = 1000
    with pytest.raises(
        UserError, match=r"the loss of step 4 is nan, .* first step after the checkpoint of step 3"
    ) as error:
        fit_in(points, *TRAIN_ONLY, "train.steps=12", "tracking.log_every=10", task=NotFiniteLater, fork=fork)
    assert "after the checkpoint of step 3" in error.value.what
    assert all(word in str(error.value) for word in ("optimizer state", "precision", "optim.lr", "--resume STEP"))
    assert error.value.exit_code is ExitCode.FAILED
