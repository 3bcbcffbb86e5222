"""What a user does with jobs, on a real Slurm of two nodes: see ``slurm_cluster``."""

import json
import os
import pty
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from conftest import make_project
from harness import Finished, run_cli, wait_until
from messages import check_one_message
from runs import fit_in, largest_difference, losses
from slurm_cluster import SlurmCluster

DRAWBAR = (sys.executable, "-m", "drawbar")
FAR = ("train.steps=100000", "eval.every=null", "checkpoint.every=50000")
SECONDS = 250


class User:
    """Somebody on the login node, in the folder of a project."""

    def __init__(self, slurm: SlurmCluster, project: Path) -> None:
        self.slurm, self.project = slurm, project

    def call(self, *arguments: str) -> Finished:
        """A command; what it did."""
        return run_cli(*arguments, cwd=self.project, env=self.slurm.environment, timeout=SECONDS)

    def do(self, *arguments: str) -> str:
        """A command that must succeed; what it says."""
        done = self.call(*arguments)
        assert done.code == 0, f"{arguments}: {done.out}{done.err}"
        return done.out

    def submit(self, *arguments: str) -> str:
        """The number of a new job."""
        said = self.do("submit", "config.yaml", "--to", "slurm", *arguments)
        found = re.match(r"job (\d+): ", said)
        assert found is not None, said
        return found[1]

    def status(self, what: str) -> dict[str, object]:
        """The job's part of the status, and how far the run is."""
        found = json.loads(self.do("status", what, "--json"))
        return {**found["job"], **found["progress"]}

    def follow(self, what: str) -> "subprocess.Popen[str]":
        """``drawbar logs -f``, in the background."""
        return subprocess.Popen(
            [*DRAWBAR, "logs", what, "-f"],
            cwd=self.project,
            env={**os.environ, **self.slurm.environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def steps(self, run: str) -> int:
        """How many lines the run has written."""
        file = self.project / "runs" / run / "metrics.jsonl"
        return file.read_text().count("\n") if file.exists() else 0


def finish(follower: "subprocess.Popen[str]") -> Finished:
    out, err = follower.communicate(timeout=SECONDS)
    return Finished(follower.returncode, out, err)


@pytest.mark.exhaustive
def test_a_job_that_waits(slurm: SlurmCluster, project: Path) -> None:
    user = User(slurm, project)
    number = user.submit("cluster.options={hold: true}")
    assert re.search(rf"^{number} +tiny +PENDING +waits: JobHeldUser", user.do("jobs"), re.MULTILINE)
    status = user.status("tiny")
    assert (status["number"], status["state"], status["detail"]) == (number, "PENDING", "waits: JobHeldUser")
    assert (status["step"], status["active"]) == (None, True)
    check_one_message(user.call("logs", number).err, "has no log yet: PENDING waits: JobHeldUser")
    check_one_message(user.call("resume", number).err, f"job {number} has not ended: PENDING")
    told = user.call("submit", "config.yaml", "--to", "slurm", "--dry-run").err
    assert f"job {number} of this run has not ended (PENDING waits: JobHeldUser)" in told
    follower = user.follow("runs/tiny")
    assert follower.stderr is not None
    assert follower.stderr.readline() == f"job {number} waits: JobHeldUser\n"
    runs = project / "runs"
    assert user.do("cancel", "tiny") == f"job {number} of {runs / 'tiny'}: cancelled; nothing was saved\n"
    assert finish(follower).code == 1
    check_one_message(user.call("cancel", number).err, f"nothing to cancel: {number}: CANCELLED")

    kept = (project / "runs" / "tiny" / "launch" / f"job-{number}.sh").read_text()
    assert user.do("resume", number, "--dry-run") == kept
    assert "#SBATCH --time=9\n" in user.do("resume", "tiny", "cluster.time=9", "--dry-run")

    number = user.submit("cluster.options={hold: true}", "--sweep", "optim.lr=1e-2,1e-3", "run.name=wide")
    elements = enumerate(("wide-lr1e-2", "wide-lr1e-3"))
    assert user.do("cancel", "wide").splitlines() == [
        f"job {number}_{index} of {runs / name}: cancelled; nothing was saved" for index, name in elements
    ]
    kept = (project / "runs" / "wide" / "launch" / f"job-{number}.sh").read_text()
    assert user.do("resume", number, "--dry-run") == kept
    single = user.do("resume", "wide-lr1e-3", "--dry-run")
    assert "#SBATCH --array=0-0\n" in single
    assert "runs/wide-lr1e-3\n" in single
    assert "runs/wide-lr1e-2\n" not in single


@pytest.mark.exhaustive
def test_cancelled_and_resumed(slurm: SlurmCluster, project: Path) -> None:
    user = User(slurm, project)
    number = user.submit(*FAR)
    follower = user.follow(number)
    wait_until(lambda: user.steps("tiny") > 3, "the job to train")
    status = user.status(number)
    assert (status["state"], status["total"], status["exit_code"]) == ("RUNNING", 100_000, None)
    assert re.fullmatch("on n[12]", str(status["detail"]))
    assert status["step"]
    saved = re.fullmatch(
        rf"job {number} of .*/runs/tiny: stopped; `drawbar resume {number}` resumes from step (\d+)\n",
        user.do("cancel", "tiny"),
    )
    assert saved is not None
    followed = finish(follower)
    assert followed.code == 75, followed.err
    assert followed.out == Path(str(status["log"])).read_text()
    assert "step 1/100,000" in followed.out
    assert f"job {number}: STOPPED exit code 75: stopped; what there was to save is saved" in followed.err
    status = user.status(number)
    assert (status["state"], status["exit_code"], status["checkpoint"]) == ("STOPPED", 75, int(saved[1]))
    assert "resumed" not in followed.out

    check_one_message(user.call("resume", number, "optim.lr=1").err, "with another configuration")
    again = re.match(r"job (\d+): ", user.do("resume", "runs/tiny"))
    assert again is not None
    wait_until(lambda: user.steps("tiny") > int(saved[1]) + 1, "the job to go on")
    assert f"at step {saved[1]}" in user.do("logs", again[1])
    said = user.call("cancel", "tiny", "--grace", "0")  # Slurm itself ends it then: it may have saved or not
    assert said.code == 0, said.err
    assert said.out.startswith(f"job {again[1]} of ")
    assert not user.status("tiny")["active"]

    # Slurm forgets jobs; the files do not
    records = project / "runs" / "tiny" / "launch" / "jobs.jsonl"
    records.write_text(records.read_text().splitlines()[0].replace(f'"{number}"', '"99999"') + "\n")
    assert user.status("runs/tiny")["state"] == "LOST"
    (records.parent / f"ended-{number}.json").rename(records.parent / "ended-99999.json")
    status = user.status("runs/tiny")
    assert (status["number"], status["state"], status["exit_code"]) == ("99999", "STOPPED", 75)


@pytest.mark.exhaustive
def test_a_sweep(slurm: SlurmCluster, tmp_path: Path) -> None:
    """Its last element is interrupted: it goes back into the queue alone, though Slurm gives it the array's
    number."""
    project = make_project(tmp_path)
    user = User(slurm, project)
    sweep = ("--sweep", "optim.lr=1e-2,1e-3", "--sweep", "train.steps=80", "eval.every=null", "checkpoint.every=1000")
    number = user.submit(*sweep)
    runs = ["tiny-lr1e-2-steps80", "tiny-lr1e-3-steps80"]
    follower = user.follow(number)
    wait_until(lambda: user.steps(runs[1]) > 3, "the second run to train")
    slurm.run("scancel", "--batch", "--signal=USR1", f"{number}_1")
    followed = finish(follower)
    assert followed.code == 0, followed.err
    for element, run in enumerate(runs):
        name = f"{number}_{element}"
        assert followed.out.count(f"==> {name} <==") >= 1
        status = user.status(run)
        assert (status["number"], status["state"], status["restarts"]) == (name, "COMPLETED", element), status
        assert status["step"] == status["total"] == 80
        assert user.status(name) == status
        found = losses(project / "runs" / run)
        fit_in(
            project,
            f"optim.lr={1 if element == 0 else 0.1}e-2",
            "train.steps=80",
            "eval.every=null",
            f"run.name=a{element}",
        )
        assert largest_difference(losses(project / "runs" / f"a{element}"), found) < 1e-4
    assert followed.out.count("goes back into the queue") == followed.out.count("resumed from") == 1
    assert user.do("jobs").count(f"{number}_") == 2
    assert len(user.do("status", number, "--json").splitlines()) == 2
    assert "80 steps made" in user.do("logs", f"{number}_0")
    assert "resumed from" in user.do("logs", runs[1], "--rank", "0")
    check_one_message(user.call("resume", number).err, f"{number} is complete")


@pytest.mark.exhaustive
def test_inside_an_allocation(slurm: SlurmCluster, project: Path) -> None:
    """At a terminal: the run starts there at once; srun on its own would make two runs of one."""
    drawbar = " ".join(DRAWBAR)
    script = f"""
    {drawbar} submit config.yaml --to slurm parallel.strategy=ddp; echo "submit: $?"
    {drawbar} submit config.yaml --to slurm --nodes 3; echo "too many: $?"
    srun --nodes=2 --ntasks=2 {drawbar} train config.yaml run.name=alone; echo "alone: $?"
    srun --nodes=1 --ntasks=1 --pty {drawbar} train config.yaml run.name=shell train.steps=4; echo "shell: $?"
    """
    said = at_a_terminal(slurm, project, "salloc", "--nodes=2", "bash", "-c", script)
    assert re.findall(r"(submit|too many|alone|shell): (\d+)\r\n", said) == [
        ("submit", "0"),
        ("too many", "2"),
        ("alone", "2"),
        ("shell", "0"),
    ], said
    assert "node 2 of 2, n2: meets the others" in said
    assert "the run asks for 3 nodes, but the allocation" in said
    assert "srun started 2 tasks, each of which would be a separate run" in said
    assert not (project / "runs" / "alone").exists()
    assert len(losses(project / "runs" / "tiny")) == 12
    assert len(losses(project / "runs" / "shell")) == 4


@pytest.mark.exhaustive
def test_ctrl_c_in_an_allocation_saves(slurm: SlurmCluster, project: Path) -> None:
    command = [*DRAWBAR, "submit", "config.yaml", "--to", "slurm", *FAR]
    said = at_a_terminal(slurm, project, "salloc", "bash", "-c", f"{' '.join(command)}; echo code: $?", until="step 3/")
    assert "code: 130\r\n" in said, said
    assert said.count("saved at step") == 1


def at_a_terminal(slurm: SlurmCluster, project: Path, *command: str, until: str | None = None) -> str:
    """Run a command on a terminal of its own, where somebody types Ctrl-C after ``until``; what it shows."""
    master, terminal = pty.openpty()
    process = subprocess.Popen(
        ["setsid", "--ctty", "--wait", *command],
        cwd=project,
        env={**os.environ, **slurm.environment, "OMP_NUM_THREADS": "1"},
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
    )
    os.close(terminal)
    guard = threading.Timer(SECONDS, process.kill)
    guard.start()
    shown, typed = b"", False
    try:
        while piece := os.read(master, 65536):
            shown += piece
            if until is not None and not typed and until.encode() in shown:
                os.write(master, b"\x03")
                typed = True
    except OSError:  # how Linux says that nobody has the terminal open any more
        pass
    finally:
        os.close(master)
        guard.cancel()
        process.wait(10)
    return shown.decode()
