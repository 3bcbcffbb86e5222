"""Jobs on a real Slurm of two nodes: see ``slurm_cluster``."""

import re
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from conftest import make_project
from harness import run_cli, wait_until
from messages import check_one_message
from runs import fit_in, largest_difference, losses
from slurm_cluster import SlurmCluster

LAUNCH = (sys.executable, "-m", "drawbar", "submit", "config.yaml", "--to", "slurm")
ENVIRONMENT = {"OMP_NUM_THREADS": "1"}
CANARY = "canary-5d02e8"
"""A secret, which only the environment of processes may hold."""


def submit(slurm: SlurmCluster, project: Path, *arguments: str) -> tuple[str, Path]:
    """``drawbar submit``: the job's number, and its log."""
    said = slurm.run(*LAUNCH, *arguments, cwd=project, env=ENVIRONMENT)
    found = re.fullmatch(r"job (\d+): run tiny on .* processes\nlog: (.*)\n", said)
    assert found is not None, said
    return found[1], Path(found[2])


def test_two_nodes_train_as_one_process(slurm: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder whose name a shell, or sbatch, could mistake for something else; and with a secret."""
    monkeypatch.setenv("HF_TOKEN", CANARY)
    folder = tmp_path / "it's $(touch planted) %j; #1"
    folder.mkdir()
    project = make_project(folder)
    job, log = submit(slurm, project, "parallel.strategy=ddp", "--nodes", "2")
    seen, told = set(), set()
    while (facts := slurm.facts(job))["JobState"] not in ("COMPLETED", "FAILED"):
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has ended
                command = (process / "cmdline").read_bytes()
                seen |= {command} if CANARY.encode() in command else set()
                told |= {process} if f"HF_TOKEN={CANARY}".encode() in (process / "environ").read_bytes() else set()
        time.sleep(0.1)
    text = log.read_text()
    assert facts["JobState"] == "COMPLETED", text
    assert seen == set()
    assert len(told) >= 4  # on each node a launcher and a rank
    kept = [path for path in tmp_path.rglob("*") if path.is_file() and CANARY.encode() in path.read_bytes()]
    assert kept == []
    assert (facts["NumNodes"], facts["JobName"]) == ("2", "tiny")
    for node, name in enumerate(("n1", "n2"), start=1):
        assert re.search(rf"node {node} of 2, {name}: meets the others at 127.0.0.1:\d+ over lo", text), text
    assert list(tmp_path.rglob("planted")) == []

    fit_in(project, "run.name=alone")
    found = losses(project / "runs" / "tiny")
    assert len(found) == 12
    assert largest_difference(losses(project / "runs" / "alone"), found) < 1e-5


@pytest.mark.exhaustive
def test_an_interrupted_job_goes_on_and_a_cancelled_one_does_not(slurm: SlurmCluster, tmp_path: Path) -> None:
    """Both at once, on nodes that they share."""
    settings = ("eval.every=null", "checkpoint.every=1000")
    projects = []
    for name in ("goes_on", "cancelled"):
        (tmp_path / name).mkdir()
        projects.append(make_project(tmp_path / name))
    goes_on, cancelled = projects
    cancelled_job, cancelled_log = submit(slurm, cancelled, "train.steps=100000", *settings)
    job, log = submit(slurm, goes_on, "train.steps=100", *settings, "parallel.strategy=ddp", "--nodes", "2")
    wait_until(lambda: steps(goes_on) > 3, "the job to train")
    slurm.run("scancel", "--batch", "--signal=USR1", job)  # what --signal does before the time limit
    wait_until(lambda: steps(cancelled) > 3, "the other job to train")
    slurm.run("scancel", cancelled_job)
    slurm.wait_for(cancelled_job, "CANCELLED")
    facts = slurm.wait_for(job, "COMPLETED", "FAILED", seconds=100)
    text = log.read_text()
    assert (facts["JobState"], facts["Restarts"]) == ("COMPLETED", "1"), text
    assert text.count("saved at step") == text.count("resumed from runs/tiny") == 1
    found = losses(goes_on / "runs" / "tiny")
    fit_in(goes_on, "run.name=alone", "eval.every=null", "train.steps=100")
    assert len(found) == 100
    assert largest_difference(losses(goes_on / "runs" / "alone"), found) < 1e-4

    # it saved, too, and whoever submits it again goes on from there; but the job itself stays away
    assert cancelled_log.read_text().count("saved at step") == 1, cancelled_log.read_text()
    assert "goes back into the queue" not in cancelled_log.read_text()
    assert slurm.facts(cancelled_job)["JobState"] == "CANCELLED"


def test_what_slurm_refuses_is_told_and_leaves_nothing(slurm: SlurmCluster, project: Path) -> None:
    environ = {**ENVIRONMENT, **slurm.environment}
    setting = "cluster.options={constraint: fast}"
    done = run_cli("submit", "config.yaml", "--to", "slurm", setting, cwd=project, env=environ)
    assert done.code == 2, done.out
    check_one_message(done.err, "Slurm refuses the job", "Invalid feature specification", "sinfo")
    assert not (project / "runs").exists()


def steps(project: Path) -> int:
    """How many steps the run has logged."""
    log = project / "runs" / "tiny" / "metrics.jsonl"
    return log.read_text().count("\n") if log.exists() else 0
