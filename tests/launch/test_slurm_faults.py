"""What goes wrong on clusters, made to go wrong on a real Slurm of three nodes.

All jobs are submitted at once, as most of their time is waiting; each test follows one of them.
"""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from conftest import make_project
from drawbar.jobs.slurm.queries import parse_time
from harness import run_cli, wait_until
from runs import losses, weights
from slurm_cluster import SlurmCluster, kill_node, processes, start_node

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(600)]  # the machine may be busy
SECONDS = 300
STEPS = 60
PACED = '''
import os, time
import drawbar

class Paced(drawbar.CausalLM):
    """causal_lm that takes its time after some steps, until there is a file `fast`."""

    calls = 0

    def forward(self, model, batch):
        self.calls += model.training
        if self.calls > 10 and os.environ.get("PACED") and not os.path.exists("fast"):
            time.sleep(3)
        return super().forward(model, batch)
'''
BROKEN_PYTHON = f"""\
#!/bin/bash
# Runs Python, but for one module on one node, which hangs or ends with some exit code.
if [[ $2 == "$BROKEN_MODULE" && $SLURMD_NODENAME == $BROKEN_NODE ]]; then
  if [ "$BROKEN" = hangs ]; then exec sleep 1000; fi
  exit "$BROKEN"
fi
exec {sys.executable} "$@"
"""
EXACT = ("task.type=paced:Paced", f"train.steps={STEPS}", "eval.every=null", "checkpoint.every=5")


class Submitted:
    """A job, in a project of its own."""

    def __init__(self, slurm: SlurmCluster, folder: Path, *settings: str, nodes: int = 2, **environment: str) -> None:
        folder.mkdir()
        self.slurm, self.project = slurm, make_project(folder)
        (self.project / "paced.py").write_text(PACED)
        python = self.project / "python"
        python.write_text(BROKEN_PYTHON)
        python.chmod(0o755)
        command = (sys.executable, "-m", "drawbar", "submit", "config.yaml", "--to", "slurm", "--nodes", str(nodes))
        variables = {"OMP_NUM_THREADS": "1", "PACED": "yes", **environment}
        given = (f"cluster.python={python}", f"cluster.environment={json.dumps(variables)}", *settings)
        said = slurm.run(*command, *given, cwd=self.project)
        found = re.search(r"job (\d+): ", said)
        assert found is not None, said
        self.number = found[1]
        self.run = self.project / "runs" / "tiny"

    @property
    def log(self) -> str:
        path = self.run / "launch" / f"slurm-{self.number}.log"
        return path.read_text() if path.exists() else ""

    @property
    def facts(self) -> dict[str, str]:
        return self.slurm.facts(self.number)

    @property
    def bad_nodes(self) -> list[dict[str, str]]:
        path = self.run / "launch" / "bad-nodes.json"
        return [entry["nodes"] for entry in json.loads(path.read_text())] if path.exists() else []

    @property
    def steps(self) -> int:
        path = self.run / "metrics.jsonl"
        return path.read_text().count("\n") if path.exists() else 0

    def wait_for_log(self, text: str) -> None:
        wait_until(lambda: text in self.log, f"{text!r} in the log of {self.project.name}", SECONDS)

    def end(self) -> dict[str, str]:
        return self.slurm.wait_for(self.number, "COMPLETED", "FAILED", seconds=SECONDS)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of ``EXACT`` without a break, on two processes of one node."""
    project = make_project(tmp_path_factory.mktemp("whole"))
    (project / "paced.py").write_text(PACED)
    command = ("train", "config.yaml", *EXACT, "parallel.strategy=ddp", "launch.nproc=2")
    done = run_cli(*command, cwd=project, timeout=SECONDS)
    assert done.code == 0, done.err
    return project / "runs" / "tiny"


@pytest.fixture(scope="module")
def jobs(
    frail_slurm: SlurmCluster, uninterrupted: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Submitted]]:
    """All of them. The node n3 is the one that will be lost, and n2 the one that does not start."""
    folder = tmp_path_factory.mktemp("faults")
    ddp = "parallel.strategy=ddp"
    short = "launch.roll_call_seconds=20"
    safe = "cluster.options={exclude: n3}"
    broken = {"BROKEN_NODE": "n2", "BROKEN_MODULE": "drawbar"}
    found = {
        "limit": Submitted(frail_slurm, folder / "limit", *EXACT, ddp, safe, "cluster.time=30",
                           "cluster.signal_seconds=100"),
        "hangs": Submitted(frail_slurm, folder / "hangs", ddp, short, safe, **broken, BROKEN="hangs"),
        "avoids": Submitted(frail_slurm, folder / "avoids", ddp, short, "cluster.exclude_bad_nodes=true",
                            BROKEN_NODE="n2", BROKEN_MODULE="drawbar.jobs.node.each_node", BROKEN="127"),
        "requeued": Submitted(frail_slurm, folder / "requeued", *EXACT, ddp, safe),
        "lost": Submitted(frail_slurm, folder / "lost", ddp, "cluster.options={nodelist: 'n2,n3'}", "eval.every=null",
                          "task.type=paced:Paced", "train.steps=100000", "checkpoint.every=5"),
        "loops": Submitted(frail_slurm, folder / "loops", safe, nodes=1,
                           BROKEN_NODE="*", BROKEN_MODULE="drawbar.jobs.node.each_node", BROKEN="75"),
    }  # fmt: skip
    yield found
    for job in found.values():
        if job.facts["JobState"] not in ("COMPLETED", "FAILED"):
            frail_slurm.run("scancel", job.number)


def check_exact(job: Submitted, whole: Path) -> None:
    """It is the same run, to the last bit, and its log tells all of it."""
    facts = job.end()
    assert facts["JobState"] == "COMPLETED", job.log
    assert job.log.count("resumed from runs/tiny") == int(facts["Restarts"]) > 0, job.log
    assert losses(job.run) == losses(whole)
    final = weights(job.run, STEPS)
    for name, tensor in weights(whole, STEPS).items():
        assert torch.equal(tensor, final[name]), name


def test_a_requeued_job_goes_on_exactly(jobs: dict[str, Submitted], uninterrupted: Path) -> None:
    job = jobs["requeued"]
    wait_until(lambda: job.steps > 6, "the job to train", SECONDS)
    job.slurm.run("scontrol", "requeue", job.number)
    (job.project / "fast").touch()
    check_exact(job, uninterrupted)


def test_a_job_goes_on_after_its_time_limit(jobs: dict[str, Submitted], uninterrupted: Path) -> None:
    """Slurm sends the signal up to half a minute early, and knows no limits below a minute; so the limit comes when
    the job is well under way."""
    job = jobs["limit"]
    wait_until(lambda: job.steps > 6, "the job to train", SECONDS)
    minutes = (parse_time(job.facts["RunTime"]) + 60) // 60 + 1
    job.slurm.run("scontrol", "update", f"JobId={job.number}", f"TimeLimit={minutes}")
    job.wait_for_log("goes back into the queue")
    job.slurm.run("scontrol", "update", f"JobId={job.number}", "TimeLimit=30")
    (job.project / "fast").touch()
    check_exact(job, uninterrupted)
    assert job.log.count("saved at step") == 1
    assert job.facts["Restarts"] == "1"


def test_a_node_that_does_not_start_is_avoided(jobs: dict[str, Submitted]) -> None:
    job = jobs["avoids"]
    facts = job.end()
    assert facts["JobState"] == "COMPLETED", job.log
    assert (facts["Restarts"], facts["ExcNodeList"], facts["NodeList"]) == ("1", "n2", "n[1,3]")
    assert f"job {job.number} goes back into the queue, without n2" in job.log
    assert job.bad_nodes == [{"n2": "node n2 did not answer within 20 s"}]
    assert "the 2 nodes have answered: n1, n3" in job.log
    assert "a sum over 2 nodes is right (cpu): " in job.log


def test_a_node_that_is_lost_is_named(jobs: dict[str, Submitted]) -> None:
    """And nobody waits for it: the job is in the queue again, and goes on when it has its nodes."""
    job = jobs["lost"]
    wait_until(lambda: job.steps > 6, "the job to train", SECONDS)
    kill_node(job.slurm, "n3")
    wait_until(lambda: job.facts["Restarts"] == "1", "the job to be requeued", SECONDS)
    assert "error: node n3 is lost: it has sent no heartbeat" in job.log
    assert {name for nodes in job.bad_nodes for name in nodes} == {"n3"}
    wait_until(lambda: not processes(job.slurm, job=job.number), "the surviving node to be left", SECONDS)
    start_node(job.slurm, "n3")
    job.wait_for_log("resumed from runs/tiny")
    job.slurm.run("scancel", job.number)


def test_a_crash_loop_ends(jobs: dict[str, Submitted]) -> None:
    job = jobs["loops"]
    facts = job.end()
    assert (facts["JobState"], facts["ExitCode"], facts["Restarts"]) == ("FAILED", "1:0", "4")
    assert "was restarted 3 times without a new checkpoint" in job.log


def test_a_node_that_never_trains_is_named(jobs: dict[str, Submitted]) -> None:
    """By the others, which do not train without it."""
    job = jobs["hangs"]
    facts = job.end()
    assert (facts["JobState"], facts["ExitCode"], facts["Restarts"]) == ("FAILED", "1:0", "0"), job.log
    assert "node n2 did not answer within 20 s" in job.log
    assert "fix:" in job.log
    assert job.bad_nodes == [{"n2": "node n2 did not answer within 20 s"}]
    assert "step 1/" not in job.log
    assert not (job.run / "metrics.jsonl").exists()
