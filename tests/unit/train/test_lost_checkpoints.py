"""A run whose checkpoints cannot be used, or not written: nothing that it has made is lost."""

import errno
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_run_again import contents
from torch import nn

from conftest import make_project
from drawbar.checkpoint import directory
from drawbar.checkpoint.directory import CheckpointDirectory
from drawbar.checkpoint.format import Manifest, Snapshot
from drawbar.errors import ExitCode, UserError
from drawbar.tasks.batch import Batch
from drawbar.tasks.causal_lm import CausalLM
from drawbar.train.stop import Reason, Stop
from drawbar.util import atomic_files
from exhaustive import some
from harness import run_ranks
from runs import Fit, fit_in, losses

STEPS = ("step-00000008", "step-00000010", "step-00000012")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with a run of 12 steps and its checkpoints of ``STEPS``."""
    project = make_project(tmp_path_factory.mktemp("trained"))
    fit_in(project)
    return project


@pytest.fixture
def project(trained: Path, tmp_path: Path) -> Path:
    return shutil.copytree(trained, tmp_path / "project")


@pytest.fixture
def checkpoints(run: Path) -> Path:
    return run / "checkpoints"


def damage(folder: Path) -> None:
    """Right size, wrong content."""
    flip_last(folder / "tensors.json")


def damage_tensor(folder: Path) -> None:
    """What is found when the tensors are read, and not before."""
    flip_last(folder / "model-00000.safetensors")


def flip_last(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def lose_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def make_newer(folder: Path) -> None:
    manifest = Manifest.from_json((folder / "manifest.json").read_bytes())
    (folder / "manifest.json").write_bytes(manifest.model_copy(update={"format": 3, "drawbar": "9.0"}).to_json())


def saved(checkpoints: Path) -> list[str]:
    return sorted(path.name for path in checkpoints.iterdir() if path.is_dir())


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (damage, "tensors.json has the checksum"),
        (damage_tensor, "model-00000.safetensors is not as it was written"),
        (lose_manifest, "manifest.json is missing"),
        (make_newer, "manifest.json has format 3, from drawbar 9.0"),
    ],
)
def test_a_run_that_cannot_use_its_checkpoints_does_not_begin_anew(
    harm: Callable[[Path], None], reason: str, fit: Fit, run: Path, checkpoints: Path
) -> None:
    for step in STEPS:
        harm(checkpoints / step)
    before = contents(run)
    with pytest.raises(UserError, match="no checkpoint of the run can be used") as refused:
        fit()
    assert refused.value.what.count(reason) == 3
    assert all(words in str(refused.value.remedy) for words in ("from a copy", "--resume PATH", "--resume never"))
    assert contents(run) == before


@pytest.mark.parametrize("harm", [damage, damage_tensor])
def test_begin_anew_where_the_user_says_so(
    harm: Callable[[Path], None], fit: Fit, run: Path, checkpoints: Path
) -> None:
    expected = losses(run)
    for step in STEPS:
        harm(checkpoints / step)
    assert fit("train.steps=12", resume="never").progress.step == 12
    assert losses(run) == expected
    assert saved(checkpoints) == sorted([*STEPS, *(f"{step}.unusable" for step in STEPS)])
    with pytest.raises(UserError, match="exists already"):
        fit(resume="never")
    for step in STEPS:  # and nothing is forgotten of what was set aside
        shutil.rmtree(checkpoints / step)
    with pytest.raises(UserError, match="set aside before"):
        fit()


def test_go_on_from_a_copy(fit: Fit, project: Path, run: Path, checkpoints: Path) -> None:
    expected = losses(run)
    copy = shutil.copytree(checkpoints / "step-00000008", project / "copy")
    for step in STEPS:
        damage(checkpoints / step)
    assert fit(resume=str(copy)).progress.step == 12
    assert losses(run) == expected
    assert "step-00000012" in saved(checkpoints)


def test_a_newer_format_is_not_passed_over(fit: Fit, run: Path, checkpoints: Path) -> None:
    make_newer(checkpoints / "step-00000012")
    before = contents(run)
    with pytest.raises(UserError, match=r"step-00000012: manifest\.json has format 3") as refused:
        fit()
    assert "--resume step-00000010 --fork NEWNAME" in str(refused.value.remedy)
    assert contents(run) == before
    assert fit(resume="step-00000010", fork="older").progress.step == 12


@pytest.mark.parametrize("place", ["checkpoints", "checkpoints/step-00000012/tensors.json"])
def test_a_disk_that_cannot_be_read_is_an_error(
    place: str, fit: Fit, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = contents(run)
    with monkeypatch.context() as patch:
        patch.setattr(atomic_files, "_RETRY_DELAYS", ())
        for module, name in ((os, "scandir"), (__import__("io"), "open")):
            patch.setattr(module, name, stale(getattr(module, name), Path("runs/tiny") / place))
        with pytest.raises(UserError, match=f"cannot read runs/tiny/{place}: {os.strerror(errno.ESTALE)}") as error:
            fit()
    assert error.value.exit_code == ExitCode.FAILED
    assert contents(run) == before
    assert fit().progress.step == 12


def stale(look: Callable[..., Any], path: Path) -> Callable[..., Any]:
    def fail(asked: Any, *arguments: Any, **options: Any) -> Any:
        if str(asked) == str(path):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(asked))
        return look(asked, *arguments, **options)

    return fail


def test_a_fork_that_cannot_use_its_own_checkpoints_does_not_begin_anew(fit: Fit, project: Path) -> None:
    fit("train.steps=16", "optim.lr=1e-3", fork="other")
    fork = project / "runs" / "other"
    for path in (fork / "checkpoints").glob("step-*"):
        damage(path)
    before = contents(fork)
    with pytest.raises(UserError, match="no checkpoint of the run can be used"):
        fit("train.steps=16", "optim.lr=1e-3", fork="other")
    assert contents(fork) == before


class Failing(CausalLM):
    """causal_lm that fails in the second training step of a process: two micro-batches a step."""

    __qualname__ = "CausalLM"  # the run goes on with the class of this name
    forwards = 0

    def forward(self, model: nn.Module, batch: Batch) -> Any:
        self.forwards += model.training
        if self.forwards == 2 * 2:
            raise ValueError("planted")
        return super().forward(model, batch)


def test_a_damaged_checkpoint_does_not_rotate_good_ones_away(fit: Fit, run: Path, checkpoints: Path) -> None:
    expected = losses(run)
    damage(checkpoints / "step-00000012")
    settings = ("checkpoint.keep=1", "checkpoint.every=1", "checkpoint.keep_best=false", "eval.every=null")
    with pytest.raises(UserError, match=r"Failing\.forward fails: ValueError: planted"):
        fit(*settings, task=Failing)
    assert saved(checkpoints) == ["step-00000011", "step-00000012.unusable"]
    assert fit(*settings).progress.step == 12
    assert losses(run) == expected


def test_the_metrics_are_on_the_disk_before_the_checkpoint(
    fit: Fit, run: Path, checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(checkpoints / "step-00000012")
    synced, fsync = [], os.fsync

    def recorded(descriptor: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", recorded)
    fit()
    assert {"config.yaml.tmp", "metrics.jsonl.tmp", "best.json.tmp"} <= set(synced)
    of_checkpoints = [name for name in synced if name in ("metrics.jsonl", "manifest.json")]
    assert of_checkpoints[:4] == ["metrics.jsonl", "manifest.json"] * 2  # the second time with the score of its step


class Disk:
    """A disk that takes no checkpoint of some steps, the first time that each is written."""

    def __init__(self, *full: int) -> None:
        self.full = list(full)
        self.write = directory.write_files

    def __call__(self, folder: Path, snapshot: Snapshot) -> None:
        if snapshot.step in self.full:
            self.full.remove(snapshot.step)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.write(folder, snapshot)


class Slow(CausalLM):
    """causal_lm whose fifth step takes longer than the disk does to fail."""

    __qualname__ = "CausalLM"  # the run goes on with the class of this name
    forwards = 0
    asked = threading.Event()

    def forward(self, model: nn.Module, batch: Batch) -> Any:
        self.forwards += model.training
        if self.forwards == 2 * 5:
            self.asked.wait(5)
        return super().forward(model, batch)


def request(stop: Stop, reason: Reason, request: Callable[[Stop, Reason], None] = Stop.request) -> None:
    request(stop, reason)
    Slow.asked.set()


@pytest.mark.parametrize(
    ("every", "full"), some([("checkpoint.every=4", 4), ("checkpoint.every=1", 4), ("checkpoint.every=1", 1)], 1)
)
def test_a_save_that_failed_shows_at_once_and_the_state_is_saved(
    every: str, full: int, fit: Fit, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_own = ("data.padding_free=false", "task.cross_entropy=plain")  # as for any task with a forward of its own
    fit("run.name=whole", *as_own, "eval.every=null", "checkpoint.every=null")
    settings = ("run.name=full", *as_own, every, "eval.every=null", "checkpoint.keep_best=false")
    monkeypatch.setattr(directory, "write_files", Disk(full))
    monkeypatch.setattr(Stop, "request", request)
    Slow.asked.clear()
    with pytest.raises(UserError, match=f"step-0000000{full} could not be written: No space left") as error:
        fit(*settings, task=Slow)
    assert error.value.exit_code == ExitCode.FAILED
    run = project / "runs" / "full"
    last = max(losses(run))
    assert last in (full, full + 1)
    assert f"The newest complete checkpoint, step-{last:08d}, is intact" in error.value.what
    assert CheckpointDirectory(run / "checkpoints").steps()[-1] == last
    assert fit(*settings).progress.step == 12
    assert losses(run) == losses(project / "runs" / "whole")


def test_the_last_save_that_fails_is_an_error(fit: Fit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory, "write_files", Disk(*range(1, 13), *range(1, 13)))
    with pytest.raises(UserError, match=r"step-00000004 could not be written.*There is no complete checkpoint yet"):
        fit("run.name=full", "eval.every=null")


def fit_with_a_full_disk(folder: str) -> str:
    """What a rank says at the end; the disk is full at step 4."""
    directory.write_files = Disk(4)
    try:
        settings = ("run.name=full", "checkpoint.every=1", "checkpoint.keep_best=false", "parallel.strategy=ddp")
        return fit_in(Path(folder), *settings).exit_code.name
    except UserError as error:
        return error.what


def test_all_ranks_end_at_the_step_of_a_save_that_failed(trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained, tmp_path / "project", ignore=shutil.ignore_patterns("runs"))
    said = run_ranks(fit_with_a_full_disk, 2, str(tmp_path / "project"))
    last = CheckpointDirectory(tmp_path / "project" / "runs/full/checkpoints").steps()[-1]
    assert last in (4, 5)
    assert said[0] == said[1]
    assert "step-00000004 could not be written: No space left" in said[0]
    assert f"step-{last:08d}, is intact" in said[0]
