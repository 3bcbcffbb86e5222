"""Acceptance: the loss trace does not depend on the number of processes, on accumulation or on padding."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness import run_cli
from runs import largest_difference, losses, scores

STEPS = "train.steps=50"


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """50 steps of one process."""
    from conftest import make_project

    project = make_project(tmp_path_factory.mktemp("reference"))
    done = run_cli("train", "config.yaml", STEPS, "run.name=one", cwd=project)
    assert done.code == 0, done.err
    return project


@pytest.mark.exhaustive
@pytest.mark.parametrize("micro_batch", ["1", "2", "8"])
def test_micro_batch_does_not_change_the_losses(reference: Path, micro_batch: str) -> None:
    name = f"micro-{micro_batch}"
    setting = f"train.micro_batch={micro_batch}"
    done = run_cli("train", "config.yaml", STEPS, f"run.name={name}", setting, cwd=reference)
    assert done.code == 0, done.err
    check(reference, name)


@pytest.mark.exhaustive
@pytest.mark.parametrize("micro_batch", ["1", "4"])
def test_two_processes_started_by_drawbar(reference: Path, micro_batch: str) -> None:
    name = f"two-{micro_batch}"
    settings = ("launch.nproc=2", f"train.micro_batch={micro_batch}", f"run.name={name}")
    done = run_cli("train", "config.yaml", STEPS, *settings, cwd=reference)
    assert done.code == 0, done.err
    check(reference, name)
    logs = sorted(path.name for path in (reference / "runs" / name / "logs").iterdir())
    assert logs == ["rank-0000.log", "rank-0001.log"]


@pytest.mark.exhaustive
def test_two_processes_started_by_torchrun(reference: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command = [*torchrun, "-m", "drawbar", "train", "config.yaml", STEPS, "run.name=torchrun", "train.micro_batch=2"]
    done = subprocess.run(command, cwd=reference, capture_output=True, text=True, timeout=240, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
    check(reference, "torchrun")


def check(project: Path, name: str) -> None:
    """Losses and scores of a run are those of the reference."""
    one, other = project / "runs" / "one", project / "runs" / name
    trace = losses(other)
    assert len(trace) == 50
    assert max(trace.values()) > 2 * min(trace.values())  # it learned: equal traces are no accident of a flat one
    assert largest_difference(losses(one), trace) <= 1e-5
    for step, found in scores(one).items():
        assert scores(other)[step] == pytest.approx(found, rel=1e-5)
