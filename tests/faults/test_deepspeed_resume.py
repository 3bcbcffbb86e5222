"""A DeepSpeed run that is killed goes on as if nothing had happened, also with other processes and another strategy."""

import os
import shutil
import signal
from pathlib import Path

import pytest
import torch

from conftest import make_project
from drawbar.deepspeed.parts import DeepSpeedUpdater
from harness import run_ranks
from runs import fit_in, largest_difference, losses, weights

SETTINGS = ("train.steps=16", "checkpoint.every=4", "eval.every=null", "train.micro_batch=2")
"""Two micro-batches in each step of two processes."""
STAGES = (1, 2, 3)


def fit(project: Path, stage: int, name: str) -> None:
    fit_in(project, *SETTINGS, "parallel.strategy=deepspeed", f"parallel.zero_stage={stage}", f"run.name={name}")


def fit_whole(folder: str) -> None:
    for stage in STAGES:
        fit(Path(folder), stage, f"whole-{stage}")


def fit_and_die(folder: str, stage: int, step: int) -> None:
    """SIGKILL for every rank, in its backward pass, while a checkpoint may still be on its way to the disk."""
    update = DeepSpeedUpdater.step

    def die(updater: DeepSpeedUpdater, *args: object) -> object:
        if updater.ds_engine.global_steps + 1 == step:
            os.kill(os.getpid(), signal.SIGKILL)
        return update(updater, *args)

    DeepSpeedUpdater.step = die  # type: ignore[method-assign,assignment]
    fit(Path(folder), stage, f"killed-{stage}")


def go_on(folder: str) -> None:
    for stage in STAGES:
        fit(Path(folder), stage, f"killed-{stage}")


def go_on_otherwise(folder: str) -> None:
    """In another world, or with another stage, or with another engine."""
    for stage in STAGES:
        fit(Path(folder), 4 - stage, f"copy-{stage}")
    fit_in(Path(folder), *SETTINGS, "parallel.strategy=auto", "run.name=copy")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one process; those that went through on two; and those that were killed, with copies of them."""
    folder = make_project(tmp_path_factory.mktemp("killed"))
    runs = folder / "runs"
    fit_in(folder, *SETTINGS, "run.name=one")
    run_ranks(fit_whole, 2, str(folder))
    for stage in STAGES:
        with pytest.raises(AssertionError, match=r"ranks \[0, 1\] failed"):
            run_ranks(fit_and_die, 2, str(folder), stage, 7 + stage)
        assert len(losses(runs / f"killed-{stage}")) < 16
        shutil.copytree(runs / f"killed-{stage}", runs / f"copy-{stage}")
    shutil.copytree(runs / "killed-3", runs / "copy")
    return folder


def test_the_same_run(project: Path) -> None:
    run_ranks(go_on, 2, str(project))
    for stage in STAGES:
        whole, ours = project / "runs" / f"whole-{stage}", project / "runs" / f"killed-{stage}"
        assert losses(ours) == losses(whole)
        for name, tensor in weights(whole, 16).items():
            assert torch.equal(tensor, weights(ours, 16)[name]), name


def test_another_world_size_stage_and_strategy(project: Path) -> None:
    run_ranks(go_on_otherwise, 1, str(project))
    reference = losses(project / "runs" / "one")
    for name in [f"copy-{stage}" for stage in STAGES] + ["copy"]:
        assert largest_difference(reference, losses(project / "runs" / name)) <= 1e-5
