"""``drawbar jobs``, ``status``, ``logs``, ``cancel`` and ``resume`` of a run over ssh, with a program that stands for
training."""

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

import drawbar
from drawbar.errors import UserError
from drawbar.jobs.commands.resume import resumable_jobs
from drawbar.jobs.records import LOST, RUNNING, JobEnd, JobRecord, append_records
from drawbar.jobs.ssh.ssh_launcher import UNKNOWN, SshLauncher, find_process, is_running, lock_job_file
from drawbar.util.run_dir import LAUNCH_FOLDER as FOLDER
from harness import Finished, run_cli, start_cli, wait_until
from messages import check_one_message
from sshd import Sshd

PYTHON = f"""\
#!/bin/bash
if [[ "$3" != train ]]; then exec {sys.executable} "$@"; fi
trap 'echo saved; exit 75' TERM
echo training
while [ ! -e go ]; do sleep 0.05; done
exit 3
"""


class SshJob:
    """``drawbar submit --hosts gpu1:1`` at another terminal; its run has begun."""

    def __init__(self, sshd: Sshd, project: Path) -> None:
        self.project = project
        python = project / "python"
        python.write_text(PYTHON)
        python.chmod(0o755)
        (project / "terminal").mkdir()
        environment = json.dumps({"PYTHONPATH": str(Path(drawbar.__file__).parents[1])})
        self.environ = {"XDG_STATE_HOME": str(project / "state")}
        self.command = [
            *("submit", "config.yaml", "--hosts", "gpu1:1", f"cluster.ssh_config={sshd.config}"),
            *(f"cluster.environment={environment}", f"cluster.python={python}"),
        ]
        self.process: BaseProcess = self.start(*self.command, output=project / "terminal")
        wait_until(lambda: "training" in self.shown(), self.shown)
        self.number = self.status()["number"]

    def start(self, *arguments: str, output: Path) -> BaseProcess:
        for name in ("0.out", "0.err"):
            (output / name).touch()
        return start_cli(*arguments, cwd=self.project, output=output, env=self.environ)

    def shown(self) -> str:
        return "".join((self.project / "terminal" / name).read_text() for name in ("0.out", "0.err"))

    def call(self, *arguments: str) -> Finished:
        return run_cli(*arguments, cwd=self.project, env={**self.environ, "PATH": "/nowhere"})

    def status(self) -> dict[str, object]:
        done = self.call("status", "tiny", "--json")
        assert done.code == 0, done.err
        job: dict[str, object] = json.loads(done.out)["job"]
        return job

    def code(self) -> int | None:
        self.process.join(60)
        return self.process.exitcode


@pytest.fixture
def ssh_job(sshd: Sshd, project: Path) -> Iterator[SshJob]:
    job = SshJob(sshd, project)
    yield job
    job.process.kill()


def test_a_run_over_ssh_is_a_job(ssh_job: SshJob) -> None:
    number = str(ssh_job.number)
    assert f"job {number}: run tiny on 1 × 1 processes; log: " in ssh_job.shown()
    status = ssh_job.status()
    expected = {"launcher": "ssh", "state": "RUNNING", "detail": "on gpu1", "active": True, "exit_code": None}
    assert expected.items() <= status.items()
    listed = ssh_job.call("jobs")
    assert [number, "tiny", "RUNNING"] == listed.out.splitlines()[-1].split()[:3], listed.err
    assert ssh_job.call("logs", "tiny").out == "gpu1: training\n"
    check_one_message(ssh_job.call("resume", "tiny").err, f"job {number} has not ended: RUNNING on gpu1")

    follower = ssh_job.start("logs", number, "-f", output=ssh_job.project)
    cancelled = ssh_job.call("cancel", "tiny")
    run_dir = ssh_job.project / "runs" / "tiny"
    assert cancelled.out == f"job {number} of {run_dir}: stopped; nothing was saved\n", cancelled.err
    assert ssh_job.code() == 75
    follower.join(60)
    assert follower.exitcode == 75
    assert (ssh_job.project / "0.out").read_text() == "gpu1: training\ngpu1: saved\n"
    assert {"state": "STOPPED", "exit_code": 75}.items() <= ssh_job.status().items()
    check_one_message(ssh_job.call("cancel", number).err, "there is nothing to cancel", "STOPPED")

    again = ssh_job.call("resume", "tiny", "--dry-run")
    assert again.out == (ssh_job.project / "runs" / "tiny" / "launch" / f"job-{number}.sh").read_text()


@pytest.mark.exhaustive
def test_a_run_that_is_being_trained_is_not_submitted_again(ssh_job: SshJob) -> None:
    again = run_cli(*ssh_job.command, cwd=ssh_job.project, env=ssh_job.environ)
    assert again.code == 2
    check_one_message(again.err, f"the run tiny is being trained now, by job {ssh_job.number}", "drawbar cancel")
    assert ssh_job.status()["number"] == ssh_job.number


def test_how_it_failed_is_known_afterwards(ssh_job: SshJob) -> None:
    (ssh_job.project / "go").touch()
    assert ssh_job.code() == 3
    assert {"state": "FAILED", "exit_code": 3, "detail": "exit code 3"}.items() <= ssh_job.status().items()


@pytest.mark.exhaustive
def test_a_submitting_process_that_is_killed_is_told(ssh_job: SshJob) -> None:
    os.kill(ssh_job.process.pid or 0, signal.SIGKILL)
    ssh_job.process.join()
    status = ssh_job.status()
    assert (status["state"], status["active"]) == (LOST, False)
    assert "was killed" in str(status["detail"])
    assert ssh_job.call("resume", "tiny", "--dry-run").code == 0


def record(run_dir: Path) -> JobRecord:
    folder = run_dir / FOLDER
    folder.mkdir(parents=True)
    return JobRecord("ssh-1", time.time(), "tiny", str(run_dir), str(run_dir), str(folder / "log"), "", 1, 1, (),
                     launcher="ssh")  # fmt: skip


def test_the_end_of_a_process_frees_its_job(tmp_path: Path) -> None:
    job = record(tmp_path)
    assert not is_running(job)
    with lock_job_file(tmp_path, job.number, ("gpu1", "gpu2")):
        assert is_running(job)
        (status,) = SshLauncher().status([job])
        assert (status.state, status.detail) == (RUNNING, "on gpu1, gpu2")
    assert not is_running(job)
    process = find_process(job)
    assert process is not None
    assert (process.pid, process.is_here) == (os.getpid(), True)
    assert SshLauncher().status([job])[0].state == LOST
    JobEnd(0, 2000.0).write(job.end_file)
    assert SshLauncher().status([job])[0].state == "COMPLETED"


def test_a_process_of_another_machine_is_asked_about_there(tmp_path: Path) -> None:
    job = record(tmp_path)
    append_records([job])
    with lock_job_file(tmp_path, job.number):
        file = tmp_path / FOLDER / "process-ssh-1.json"
        file.write_text(file.read_text().replace(os.uname().nodename, "login7"))
        (running,) = SshLauncher().status([job])
        assert running.state == RUNNING  # the file system knows the lock
        with pytest.raises(UserError, match="was submitted on login7") as refused:
            SshLauncher().cancel([running], 0)
        assert "drawbar cancel ssh-1` on login7" in str(refused.value.remedy)
    (gone,) = SshLauncher().status([job])
    assert (gone.state, gone.is_active) == (UNKNOWN, False)
    assert "login7" in gone.detail
    assert resumable_jobs("tiny", [gone], ()) == [gone]
