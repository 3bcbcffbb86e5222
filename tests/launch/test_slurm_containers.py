"""A job in a container on a real Slurm of two nodes; ``apptainer_stand_in`` stands for Apptainer."""

import os
from collections import Counter
from pathlib import Path

import pytest
from test_slurm_jobs import steps, submit

from apptainer_stand_in import calls, install, make_image
from conftest import make_project
from harness import wait_until
from runs import fit_in, largest_difference, losses
from slurm_cluster import SlurmCluster

pytestmark = pytest.mark.exhaustive


def test_an_interrupted_job_in_a_container_goes_on(
    slurm: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two nodes; Slurm's programs outside and Python inside; saved, requeued from outside, and gone on inside."""
    folder = tmp_path / "it's $(touch planted) %j; #1"
    folder.mkdir()
    project = make_project(folder)
    image = make_image(tmp_path / "drawbar.sif")
    tools = install(tmp_path / "bin")
    monkeypatch.setitem(slurm.environment, "PATH", f"{tools}:{slurm.environment['PATH']}")
    settings = ("parallel.strategy=ddp", "eval.every=null", "checkpoint.every=1000", "train.steps=100")
    binds = f"cluster.binds=[{os.path.dirname(os.__file__)}:/mnt/data:ro]"
    job, log = submit(slurm, project, *settings, binds, "--nodes", "2", "--image", str(image))
    wait_until(lambda: steps(project) > 3, "the job to train")
    slurm.run("scancel", "--batch", "--signal=USR1", job)
    facts = slurm.wait_for(job, "COMPLETED", "FAILED", seconds=100)
    text = log.read_text()
    assert (facts["JobState"], facts["Restarts"]) == ("COMPLETED", "1"), text
    assert text.count("saved at step") == text.count("resumed from runs/tiny") == 1, text

    found = losses(project / "runs" / "tiny")
    fit_in(project, *settings, "run.name=alone")
    assert len(found) == 100
    assert largest_difference(losses(project / "runs" / "alone"), found) < 1e-4

    assert list(tmp_path.rglob("planted")) == []

    made = calls(image)
    parts = Counter(str(call["command"][2]) for call in made)
    assert parts == {
        "drawbar.jobs.node.restart": 2,
        "drawbar.jobs.node.first_node": 2,
        "drawbar.jobs.node.each_node": 4,
    }
    for call in made:
        assert call["command"][0] == "python3"
        assert call["options"] == {
            "--bind": [binds.removeprefix("cluster.binds=[").removesuffix("]"), f"{project}:{project}"],
            "--pwd": [str(project)],
        }
        assert call["environ"]["PYTHONNOUSERSITE"] == "1"
