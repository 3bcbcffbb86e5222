"""``task.model`` may name a checkpoint of another run: its model is copied, and begins a run of its own."""

import json
import shutil
from contextlib import chdir
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import drawbar
from conftest import make_project
from drawbar import Callback, RunHandle
from drawbar.cli.arguments import load_run
from drawbar.commands.export_run import export_run
from drawbar.commands.prepare_data import prepare_run
from drawbar.errors import ExitCode, UserError
from drawbar.jobs.doctor.examine import hub_names
from drawbar.train.checkpoint_export import ExportFormat
from drawbar.util.run_dir import LOCK_FILE
from harness import run_ranks
from runs import Fit, fit_in, largest_difference, losses, weights

PRETRAINED = ("task.from_scratch=null", "task.tokenizer=null", "run.name=second", "eval.every=null")
NEXT = (*PRETRAINED, "train.steps=6", "checkpoint.every=3", "checkpoint.keep_best=false")
STAYS = (*PRETRAINED, "train.steps=1", "optim.warmup=0", "optim.weight_decay=0", "optim.lr=1e-12")
"""One step that changes nothing."""
LORA = ("lora.rank=2", "lora.modules=linear")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with a run of twelve steps: its checkpoints are 4, 8, 12, and the best one."""
    folder = make_project(tmp_path_factory.mktemp("initial"))
    fit_in(folder, "checkpoint.keep=5")
    return folder


@pytest.fixture
def project(trained: Path, tmp_path: Path) -> Path:
    return shutil.copytree(trained, tmp_path / "project")


class LeavesAtOnce(Callback):
    def on_train_start(self, run: RunHandle) -> None:
        run.request_stop()


def best_step(project: Path) -> int:
    return json.loads((project / "runs" / "tiny" / "checkpoints" / "best.json").read_text())["step"]


@pytest.mark.parametrize("which", ["@best", "@last", "@latest", "@8", ""])
def test_a_run_begins_with_the_weights_and_the_tokenizer_of_another(fit: Fit, project: Path, which: str) -> None:
    step = {"@best": best_step(project), "@8": 8}.get(which, 12)
    fit(*STAYS, f"task.model=runs/tiny{which}")
    second = project / "runs" / "second"
    for name, tensor in weights(project / "runs" / "tiny", step).items():
        torch.testing.assert_close(tensor, weights(second, 1)[name], atol=1e-8, rtol=0)
    said = json.loads((second / "initial_model" / "source.json").read_text())
    assert (said["task.model"], said["step"]) == (f"runs/tiny{which}", step)
    one, other = ((project / "runs" / run / "tokenizer" / "tokenizer.json").read_text() for run in ("tiny", "second"))
    assert json.loads(one)["model"] == json.loads(other)["model"]


@pytest.mark.exhaustive
def test_it_goes_on_when_the_other_run_is_gone(fit: Fit, project: Path) -> None:
    """Also before its first checkpoint, and in a fork of it."""
    fit(*NEXT, "run.name=straight", "task.model=runs/tiny@best")
    fit(*NEXT, "task.model=runs/tiny@best", callbacks=[LeavesAtOnce()])
    shutil.rmtree(project / "runs" / "tiny")
    for steps in (3, 6):
        fit(*NEXT, "optim.schedule_steps=6", f"train.steps={steps}", "task.model=runs/tiny@best")
    assert losses(project / "runs" / "second") == losses(project / "runs" / "straight")
    assert fit(*NEXT, "train.steps=8", "task.model=runs/tiny@best", fork="third").progress.step == 8
    with chdir(project):
        export_run(load_run("runs/third", (), None).config, None, project / "model", None, ExportFormat())
    card = (project / "model" / "README.md").read_text()
    assert f"the run tiny, step {best_step_of(project)}" in card
    assert str(project) not in card


@pytest.mark.exhaustive
def test_a_machine_that_has_nothing_gets_it_from_the_object_store(fit: Fit, project: Path) -> None:
    store = (project / "store").as_uri()
    settings = (*NEXT, *LORA, "optim.schedule_steps=6", "task.model=runs/tiny@8")
    fit(*settings, "run.name=straight")
    fit(*settings, f"checkpoint.remote={store}", "train.steps=3")
    shutil.rmtree(project / "runs" / "tiny")
    shutil.rmtree(project / "runs" / "second")
    copy = project / "store" / "second" / "initial_model" / "model.safetensors"
    content = copy.read_bytes()
    copy.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(UserError, match=r"initial_model/model\.safetensors .* does not have its checksum"):
        fit(*settings, f"checkpoint.remote={store}")
    copy.write_bytes(content)
    written = copy.stat().st_mtime_ns
    fit(*settings, f"checkpoint.remote={store}")
    run, straight = project / "runs" / "second", project / "runs" / "straight"
    assert {**losses(straight), **losses(run)} == losses(straight)
    assert list(losses(run))[-1] == 6
    assert (run / "initial_model" / "model.safetensors").read_bytes() == content
    assert copy.stat().st_mtime_ns == written  # not copied again


def best_step_of(project: Path) -> int:
    return json.loads((project / "runs" / "second" / "initial_model" / "source.json").read_text())["step"]


@pytest.mark.exhaustive
def test_adapters_of_the_other_run_are_merged_and_new_ones_are_kept_apart(fit: Fit, project: Path) -> None:
    fit(*NEXT, *LORA, "lora.alpha=64", "task.model=runs/tiny@8", "run.name=adapted")
    fit(*STAYS, "task.model=runs/adapted")
    with chdir(project):
        merged = ExportFormat(merge=True)
        export_run(load_run("runs/adapted", (), None).config, None, project / "merged", None, merged)
    wanted = load_file(project / "merged" / "model.safetensors")
    for name, tensor in weights(project / "runs" / "second", 1).items():
        torch.testing.assert_close(tensor, wanted[name], atol=1e-8, rtol=0)
    q_proj = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.allclose(wanted[q_proj], weights(project / "runs" / "tiny", 8)[q_proj], atol=1e-3)
    # what is frozen under adapters is in no checkpoint: the copy must outlive the other run
    shutil.rmtree(project / "runs" / "tiny")
    settings = (*NEXT, *LORA, "lora.alpha=64", "task.model=runs/tiny@8", "run.name=adapted", "train.steps=8")
    assert fit(*settings).progress.step == 8


@pytest.mark.parametrize(
    ("name", "says", "remedy"),
    [
        ("runs/tinny@best", "runs/tinny is not a run directory", "runs/tiny"),
        ("runs/tiny@7", "runs/tiny has no checkpoint @7", "runs/tiny@8"),
        ("runs/tiny@newest", "runs/tiny has no checkpoint @newest", "runs/tiny@latest"),
    ],
)
def test_a_name_that_is_wrong(fit: Fit, project: Path, name: str, says: str, remedy: str) -> None:
    with pytest.raises(UserError, match=says) as refused:
        fit(*NEXT, f"task.model={name}")
    assert refused.value.exit_code is ExitCode.WRONG_REQUEST
    assert remedy in str(refused.value.remedy)
    assert "task.model" in str(refused.value.where)
    assert not (project / "runs" / "second").exists()


def test_a_model_from_scratch_is_that_of_no_run(fit: Fit, project: Path) -> None:
    with pytest.raises(UserError, match=r"names a checkpoint of a run, .*, whose weights task.from_scratch") as refused:
        fit("run.name=second", "eval.every=null", f"task.model={project}/runs/tiny@best")
    assert "task.from_scratch=null" in str(refused.value.remedy)
    assert not (project / "runs" / "second").exists()


def test_a_request_that_is_wrong_leaves_no_copy(fit: Fit, project: Path) -> None:
    with pytest.raises(UserError, match="positions"):
        fit(*NEXT, "task.model=runs/tiny@best", "data.sequence_length=65")
    assert not (project / "runs" / "second").exists()


def test_what_a_killed_process_has_left_is_no_obstacle(fit: Fit, project: Path) -> None:
    second = project / "runs" / "second"
    (second / "initial_model.tmp-1").mkdir(parents=True)
    (second / LOCK_FILE).touch()
    fit(*STAYS, "task.model=runs/tiny@4")
    assert not list(second.glob("*.tmp*"))


def test_data_are_prepared_before_there_is_a_copy(fit: Fit, project: Path, capfd: pytest.CaptureFixture[str]) -> None:
    settings = (*NEXT, "task.model=runs/tiny@best")
    with chdir(project):
        config = drawbar.load_config("config.yaml", settings).config
        assert hub_names(config) == []
        prepare_run(config, None)
    assert not list((project / "runs" / ".cache").glob("initial_model*"))
    capfd.readouterr()
    fit(*settings)
    assert "train: taken from the cache" in capfd.readouterr().err


STRATEGIES = {
    "fsdp": ["parallel.strategy=fsdp"],
    "zero1": ["parallel.strategy=zero1"],
    "stages": ["parallel.pipeline=2"],
}


def train_each(folder: str) -> None:
    for name, parallel in STRATEGIES.items():
        fit_in(Path(folder), *NEXT, "task.model=runs/tiny@best", *parallel, "train.micro_batch=2", f"run.name={name}")


@pytest.mark.exhaustive
def test_every_strategy_begins_with_it(fit: Fit, project: Path) -> None:
    fit(*NEXT, "task.model=runs/tiny@best")
    run_ranks(train_each, 2, str(project))
    for name in STRATEGIES:
        assert largest_difference(losses(project / "runs" / "second"), losses(project / "runs" / name)) < 1e-5
