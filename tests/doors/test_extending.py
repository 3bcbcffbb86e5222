"""docs/extending.md, as a stranger would follow it.

Each example is a file of theirs, named by a line of YAML, or by the entry points of an installed package.
"""

import csv
import json
import sys
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest
import torch
from ruamel.yaml import YAML

import drawbar
from docs.made_up import write_data
from docs.pages import blocks, write_files
from drawbar.errors import ExitCode, UserError
from exhaustive import some
from runs import metrics

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"
EXAMPLES = ["csv_tracker", "ema", "signed", "alarms", "bag"]
PARTS = [block for block in blocks(PAGE) if block.language == "yaml" and block.mark]
ENTRY_POINTS = """
[drawbar.trackers]
csv = csv_tracker:CsvTracker
[drawbar.callbacks]
ema = ema:Ema
[drawbar.readers]
.signed = signed:SignedLines
[drawbar.metrics]
alarms = alarms:false_alarms
[drawbar.tasks]
bag = bag:Bag
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the files of the page, which is the current one."""
    write_data(tmp_path)
    write_files(PAGE, tmp_path)
    rows = list(csv.DictReader((tmp_path / "train.tsv").open(), delimiter="\t"))
    signs = {"positive": "+", "negative": "-"}
    (tmp_path / "train.signed").write_text("".join(f"{signs[row['label']]} {row['text']}\n" for row in rows))
    monkeypatch.setattr(sys, "path", list(sys.path))
    with chdir(tmp_path):
        yield tmp_path
    for name in EXAMPLES:
        sys.modules.pop(name, None)


def train(*settings: str, **options: Any) -> Path:
    """Train by ``train.yaml`` and more settings; the run directory."""
    torch.set_num_threads(1)
    config = drawbar.load_config("train.yaml", settings).config
    return drawbar.Trainer(config, **options).fit().run_dir


def train_with(number: int) -> Path:
    """Train by ``train.yaml`` with a part of the page."""
    part = YAML(typ="safe").load(PARTS[number].text)
    if PARTS[number].mark == "replace":
        whole = YAML(typ="safe").load(Path("train.yaml"))
        with Path("train.yaml").open("w") as file:
            YAML().dump({**whole, **part}, file)
        return train()
    keys = {f"{section}.{key}" if isinstance(inner, dict) else section: value for section, inner in part.items()
            for key, value in (inner.items() if isinstance(inner, dict) else [(section, inner)])}  # fmt: skip
    return train(*(f"{key}={json.dumps(value)}" for key, value in keys.items()))


def values(run: Path, name: str) -> dict[int, float]:
    """What was logged under a name, by step."""
    return {int(line["step"]): line[name] for line in metrics(run) if name in line}


def check_csv(run: Path) -> None:
    told = [(int(step), name, float(value)) for step, name, value in csv.reader((run / "all.csv").open())]
    names = {"train/loss", "eval/validation/loss"}
    of_run = [(line["step"], name, line[name]) for line in metrics(run) for name in line if name in names]
    assert [item for item in told if item[1] in names] == of_run


@pytest.mark.usefixtures("project")
def test_a_tracker() -> None:
    check_csv(train_with(0))


@pytest.mark.usefixtures("project")
def test_a_callback() -> None:
    run = train_with(1)
    assert list(values(run, "train/loss")) == [1]  # it asked to stop at once
    assert (run / "checkpoints" / "step-00000001").is_dir()


@pytest.mark.usefixtures("project")
def test_a_reader() -> None:
    by_ending = train("run.name=usual")
    assert values(train_with(2), "train/loss") == values(by_ending, "train/loss")


@pytest.mark.usefixtures("project")
def test_a_metric() -> None:
    assert set(values(train_with(3), "eval/validation/false_alarms")) == {6, 12}


@pytest.mark.usefixtures("project")
def test_a_task() -> None:
    assert set(values(train_with(4), "eval/validation/accuracy")) == {6, 12}


def test_all_of_them_by_the_entry_points_of_a_package(project: Path) -> None:
    """An installed package, as pip leaves it: modules, and beside them what the package brings."""
    package = project / "site" / "stranger-1.0.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: stranger\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text(ENTRY_POINTS)
    for name in EXAMPLES:
        (project / f"{name}.py").rename(package.parent / f"{name}.py")
    sys.path.insert(0, str(package.parent))
    run = train(
        "tracking.trackers={csv: {file: all.csv}}",
        "callbacks=[ema]",
        "data.train=train.signed",
        "task.metrics=[accuracy, alarms]",
    )
    check_csv(run)
    assert set(values(run, "train/loss_ema")) == {2, 4, 6, 8, 10, 12}
    assert set(values(run, "eval/validation/alarms")) == {6, 12}
    (project / "train.yaml").write_text("task: {type: bag}\ndata: {train: train.tsv}\ntrain: {steps: 2}\n")
    assert set(values(train(), "train/loss")) == {1, 2}


class Events(drawbar.Callback):
    """Keeps what it was called with, asks for what it was made with, and fails where it was told to."""

    def __init__(self, save_at: int = 0, fail_in: str = "") -> None:
        self.seen: list[tuple[str, int]] = []
        self.save_at, self.fail_in = save_at, fail_in

    def _see(self, event: str, run: drawbar.RunHandle) -> None:
        self.seen.append((event, run.step))
        if event == self.fail_in:
            raise ZeroDivisionError("as told")

    def on_train_start(self, run: drawbar.RunHandle) -> None:
        self._see("start", run)

    def on_step(self, run: drawbar.RunHandle, info: drawbar.StepInfo) -> None:
        assert info.step == run.step
        if run.step == self.save_at:
            run.request_save()
        self._see("step", run)

    def on_evaluate(self, run: drawbar.RunHandle, scores: dict[str, float]) -> None:
        assert "eval/validation/loss" in scores
        self._see("evaluate", run)

    def on_save(self, run: drawbar.RunHandle, checkpoint: Path) -> None:
        assert checkpoint.name == f"step-{run.step:08d}"
        self._see("save", run)

    def on_exception(self, run: drawbar.RunHandle, error: Exception) -> None:
        self._see("exception", run)

    def on_train_end(self, run: drawbar.RunHandle) -> None:
        assert (run.run_dir / "checkpoints" / f"step-{run.step:08d}").is_dir()
        self._see("end", run)


@pytest.mark.usefixtures("project")
def test_every_event_comes_in_its_turn() -> None:
    events = Events(save_at=1)
    train("train.steps=4", "eval.every=3", "checkpoint.every=null", "checkpoint.keep_best=false", callbacks=[events])
    assert events.seen == [
        ("start", 0), ("step", 1), ("save", 2), ("step", 2), ("evaluate", 3), ("step", 3), ("save", 4), ("evaluate", 4),
        ("step", 4), ("end", 4),
    ]  # fmt: skip


@pytest.mark.usefixtures("project")
@pytest.mark.parametrize(("event", "step"), some([("start", 0), ("step", 1), ("evaluate", 3), ("end", 4)], 2))
def test_a_callback_that_fails_is_named_and_costs_no_step(event: str, step: int) -> None:
    events = Events(fail_in=event)
    settings = ("train.steps=4", "eval.every=3")
    with pytest.raises(UserError, match=rf"Events.on_(train_)?{event} failed: ZeroDivisionError: as told") as caught:
        train(*settings, callbacks=[events])
    assert caught.value.exit_code == ExitCode.FAILED
    assert events.seen[-1] == (event, step)  # it is not called again
    saved = sorted(path.name for path in Path("runs/reviews/checkpoints").glob("step-*"))
    assert (saved[-1] if saved else "") == (f"step-{step:08d}" if step else "")
    assert set(values(train(*settings), "eval/validation/loss")) == {3, 4}  # and the run goes on from there


@pytest.mark.usefixtures("project")
def test_a_run_that_fails_tells_its_callbacks(monkeypatch: pytest.MonkeyPatch) -> None:
    def diverged(*_: Any) -> None:
        raise UserError("the run has diverged", remedy="lower optim.lr")

    monkeypatch.setattr("drawbar.train.callbacks.log.check_finite", diverged)
    events = Events()
    with pytest.raises(UserError, match="the run has diverged"):
        train(callbacks=[events])
    assert events.seen == [("start", 0), ("exception", 1)]


class Impatient(Events):
    """Asks for the end after three steps."""

    def on_step(self, run: drawbar.RunHandle, info: drawbar.StepInfo) -> None:
        super().on_step(run, info)
        if run.step == 3:
            run.request_stop()


@pytest.mark.usefixtures("project")
def test_a_run_that_a_callback_ends_goes_on_with_the_same_command(capfd: pytest.CaptureFixture[str]) -> None:
    events = Impatient()
    train("eval.every=null", "checkpoint.every=null", callbacks=[events])
    assert events.seen[-3:] == [("step", 3), ("save", 3), ("end", 3)]
    assert "saved at step 3; the same command resumes from there" in capfd.readouterr().out
    assert max(values(train("eval.every=null", "checkpoint.every=null"), "train/loss")) == 12


@pytest.mark.usefixtures("project")
@pytest.mark.parametrize(
    ("callbacks", "what", "remedy"),
    [
        ("[no_such]", "there is no callback 'no_such'", "package.module:Class"),
        ("['ema:Emma']", "the module has no 'Emma'; did you mean ema:Ema?", "name a class of ema"),
        ("[{'ema:Ema': {decoy: 1}}]", "unexpected keyword argument 'decoy'", "it takes: decay: float = 0.9"),
        ("['bag:Bag.Config']", "the module has no 'Bag.Config'", "name a class of bag"),
        ("['alarms:false_alarms']", "is not a subclass of drawbar.Callback", "name a subclass"),
    ],
)
def test_a_callback_that_cannot_be_made_is_refused(callbacks: str, what: str, remedy: str) -> None:
    with pytest.raises(UserError) as caught:
        train(f"callbacks={callbacks}")
    with pytest.raises(UserError, match="int is not a subclass"):
        train(callbacks=[3])
    with pytest.raises(UserError, match=r"on_steps would never be called[\s\S]*did you mean on_step"):
        train(callbacks=[type("Misspelt", (drawbar.Callback,), {"on_steps": print})()])
    Path("misspelt.py").write_text("import drawbar\n\nclass Late(drawbar.Callback):\n    on_steps = print\n")
    with pytest.raises(UserError, match=r"Late\.on_steps would never be called"):
        train("callbacks=['misspelt:Late']")
    with pytest.raises(
        UserError, match=r"Curt\.on_step cannot be called with \(run, info\)[\s\S]*def on_step\(self, run"
    ):
        train(callbacks=[type("Curt", (drawbar.Callback,), {"on_step": lambda self, run: None})()])
    assert what in caught.value.what
    assert remedy in str(caught.value.remedy)
    assert not Path("runs").exists()
